"""Stages whose devices divide experts: time, memory and gradients of a device, and Tangram's plans of them."""

from dataclasses import replace

import pytest

from ds_hetero.cluster.files import cluster_from_dict
from ds_hetero.cost.calibrated import CalibratedCostModel
from ds_hetero.cost.stages.calibrated import CalibratedStageCosts
from ds_hetero.cost.stages.stage import DeviceBlock, PlacedPipeline
from ds_hetero.cost.workload import Workload
from ds_hetero.errors import PlanError
from ds_hetero.models import load_model
from ds_hetero.planner.published.tangram import TangramVariant, plan_tangram
from ds_hetero.planner.published.tangram.interface import Slice
from ds_hetero.planner.published.tangram.islands import form_islands
from ds_hetero.planner.published.tangram.uniform_parallelizer import UniformParallelizer

NODE = {"device": "A100-SXM-80GB", "count": 8}
CLUSTER = cluster_from_dict(
    {
        "nodes": [{"name": "a", **NODE}, {"name": "b", **NODE}],
        "network": {"bandwidth_gb_per_s": 25, "latency_us": 10},
    }
)
MODEL, WORK = load_model("mixtral-8x7b"), Workload(seq_len=4096)
EXPERTS = MODEL.num_experts * MODEL.mlp_parameters  # weights of the experts of a layer


def costs_of(work=WORK, *, divides_experts=True, **options):
    return CalibratedStageCosts(CLUSTER, MODEL, work, divides_experts=divides_experts, **options)


def sharing(size, node=0):
    return DeviceBlock(0, node, size, "sequence")


@pytest.mark.parametrize("size", [2, 4, 8])
@pytest.mark.parametrize("checkpointing", [True, False])
def test_a_layer_takes_as_long_as_in_a_job_without_pipelines(size, checkpointing):
    work = replace(WORK, activation_checkpointing=checkpointing)
    costs = costs_of(work)
    alone = CalibratedCostModel(
        CLUSTER.subset(range(size)), replace(MODEL, num_layers=1), replace(work, zero_stage=1, experts="equal")
    )
    expected_s = alone.block_s(*alone.arrays(costs.schedule(sharing(size), 1)))
    assert costs.of_block(sharing(size), 1, 1).layer_s == pytest.approx(expected_s, rel=1e-9)


def test_a_device_holds_its_share_of_the_experts_and_all_other_weights():
    whole = costs_of(divides_experts=False).of_block(sharing(4), 1, 1).memory.of_layer
    divided = costs_of().of_block(sharing(4), 1, 1).memory.of_layer
    assert whole.trained == MODEL.layer_parameters
    assert divided.trained == whole.trained - 0.75 * EXPERTS
    assert divided.weight_bytes == 2 * divided.trained
    # The four devices own every optimizer state once: an expert's where it is, shares of the rest.
    assert 4 * divided.owned == pytest.approx(4 * whole.owned) == MODEL.layer_parameters
    # Two pipelines: two devices hold every expert, five holders (the other pipeline counts as one) the rest.
    both = costs_of().of_block(sharing(4), 1, 2).memory.of_layer
    assert both.owned == pytest.approx(EXPERTS / 4 / 2 + (MODEL.layer_parameters - EXPERTS) / 5)


def test_experts_are_summed_between_the_pipelines_alone():
    """Without divided experts all four ranks of a stage hold them, and sum their gradients with those of the other."""
    one = [PlacedPipeline((sharing(4),), (MODEL.num_layers,), 1, 1)]
    two = [*one, PlacedPipeline((sharing(4, node=1),), (MODEL.num_layers,), 1, 1)]
    whole, divided = costs_of(divides_experts=False), costs_of()
    assert divided.sync_times(one).reduce_s < 0.1 * whole.sync_times(one).reduce_s
    assert divided.sync_times(one).reduce_s < divided.sync_times(two).reduce_s < whole.sync_times(two).reduce_s


def test_blocks_whose_experts_no_cost_model_divides_have_no_cost():
    costs, tensor = costs_of(), DeviceBlock(0, 0, 4, "tensor")
    assert costs.of_block(sharing(3), 1, 1) is None  # 8 experts on 3 devices
    assert costs.of_block(sharing(4)._replace(tensor_size=2), 1, 1) is None
    spanning = DeviceBlock.of_parts([*sharing(4).parts, *sharing(4, node=1).parts])
    assert costs.of_block(spanning, 1, 1) is None
    assert costs.of_block(tensor, 1, 1) == costs_of(divides_experts=False).of_block(tensor, 1, 1)


@pytest.mark.parametrize(
    ("options", "refused"),
    [
        ({"model": load_model("llama-2-7b")}, "llama-2-7b has no experts"),
        ({"owners": "fitted"}, "predicted for even owners alone"),
        ({"work": replace(WORK, adapter_rank=8, quantization="nf4")}, "quantized experts, which are not divided"),
    ],
)
def test_experts_that_cannot_be_divided_are_refused_by_name(options, refused):
    model, work = options.pop("model", MODEL), options.pop("work", WORK)
    with pytest.raises(PlanError, match=refused):
        CalibratedStageCosts(CLUSTER, model, work, divides_experts=True, **options)


def test_tangram_plans_experts_inside_islands():
    """Stages that share sequences fit with divided experts alone, and partial plans say in how many parts."""
    costs, whole = costs_of(), costs_of(divides_experts=False)
    (island,) = form_islands(costs.pools)
    part = Slice(MODEL.num_layers, True, True)
    plans = UniformParallelizer(costs, 32, (1, 2)).plan(part, island)
    assert {plan.expert_parallel for plan in plans} > {1}
    assert all(plan.expert_parallel == plan.sequence_parallel for plan in plans)
    assert all(plan.expert_parallel == 1 for plan in UniformParallelizer(whole, 32, (1, 2)).plan(part, island))
    found, without = (plan_tangram(each, each.time_objective(), 32, (1, 2)) for each in (costs, whole))
    assert found.candidate.step_s < without.candidate.step_s

    class Whole(UniformParallelizer):
        """A parallelizer that leaves experts whole."""

        def plan(self, part, island):
            return [replace(plan, expert_parallel=1) for plan in super().plan(part, island)]

    variant = TangramVariant(parallelizer=Whole(costs, 32, (1, 2)))
    with pytest.raises(
        PlanError, match=r"expert_parallel=1 with sequence_parallel=\d, for which this cost model counts"
    ):
        plan_tangram(costs, costs.time_objective(), 32, (1, 2), variant=variant)
