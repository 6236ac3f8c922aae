"""Stages that share sequences between tensor groups: time, memory and gradients of a device, and plan files."""

from dataclasses import replace

import pytest

from ds_hetero.cluster.files import cluster_from_dict
from ds_hetero.cost.calibrated import CalibratedCostModel
from ds_hetero.cost.stages.calibrated import CalibratedStageCosts
from ds_hetero.cost.stages.sequence import column_model
from ds_hetero.cost.stages.stage import DeviceBlock, PoolPart
from ds_hetero.cost.workload import Workload
from ds_hetero.errors import PlanError
from ds_hetero.models import load_model
from ds_hetero.planner.pipeline_search.evaluate import Evaluator, Shape
from ds_hetero.planner.pipeline_search.finish import finish, to_plan
from ds_hetero.planner.pipeline_search.stage_schedules import ScheduleFinder
from ds_hetero.planner.pipelines.given import judge_plan
from ds_hetero.values.plans import read_plan

FAST, SLOW = "H100-SXM-80GB", "A100-SXM-80GB"
CLUSTER = cluster_from_dict(
    {
        "nodes": [{"name": "fast", "device": FAST, "count": 4}, {"name": "slow", "device": SLOW, "count": 4}],
        "network": {"bandwidth_gb_per_s": 25, "latency_us": 10},
    }
)
MODEL, WORK = load_model("llama-3.1-8b"), Workload(seq_len=32768)
PARTS = (PoolPart(0, 0, 4), PoolPart(1, 1, 4))


def costs_of(work=WORK):
    return CalibratedStageCosts(CLUSTER, MODEL, work, find=ScheduleFinder())


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("checkpointing", [True, False])
def test_a_device_takes_its_part_of_the_model_and_the_all_reduces(size, checkpointing):
    """The time of attention and of matmuls is that of a job without pipelines on the first device of every group."""
    work = replace(WORK, activation_checkpointing=checkpointing, zero_stage=1)
    costs, block = costs_of(work), DeviceBlock.of_parts(PARTS, size)
    option = costs.of_block(block, 1, 1)
    firsts = CLUSTER.subset(range(0, 8, size))
    alone = CalibratedCostModel(firsts, replace(column_model(MODEL, size), num_layers=1), work)
    schedule = costs.schedule(block, 1)
    tokens = schedule.tokens(WORK.seq_len)
    places = range(len(tokens))
    # An all-reduce is twice an all-gather of the group's tokens: (size - 1) / size of them over NVLink.
    reduce_s = max(costs._all_reduce_s(0 if place < 4 // size else 1, size, tokens[place]) for place in places)
    num_reduces = 4 + checkpointing
    expected = alone.block_s(*alone.arrays(schedule)) + num_reduces * reduce_s
    assert option.layer_s == pytest.approx(expected, 1e-9)
    assert reduce_s > 0


def test_a_group_holds_each_weight_once_and_each_token_of_norms_once():
    one, two, four = (costs_of().of_block(DeviceBlock.of_parts(PARTS, size), 1, 1) for size in (1, 2, 4))
    assert two.memory.of_layer.weight_bytes == one.memory.of_layer.weight_bytes / 2
    assert four.memory.of_layer.weight_bytes == one.memory.of_layer.weight_bytes / 4
    # All ranks of the stage together own the optimizer state once.
    assert one.memory.of_layer.owned == two.memory.of_layer.owned == four.memory.of_layer.owned
    # What recomputation keeps is the layer's input, of which a device has its part of its group's tokens. A group of
    # the faster devices has as many of the tokens as its devices have without groups.
    assert four.memory.saved_bytes == pytest.approx(one.memory.saved_bytes, rel=0.1)
    assert four.other_parts[0].memory.saved_bytes < four.memory.saved_bytes


def test_without_sharing_tokens_every_device_of_a_group_keeps_all_of_them():
    adapters = replace(WORK, adapter_rank=16)
    block = DeviceBlock.of_parts(PARTS, 4)
    saved = costs_of().of_block(block, 1, 1).memory.saved_bytes
    assert costs_of(adapters).of_block(block, 1, 1).memory.saved_bytes == pytest.approx(4 * saved, rel=0.1)


@pytest.mark.parametrize(
    ("parts", "size", "work"),
    [
        ((PoolPart(0, 0, 3), PoolPart(1, 1, 4)), 2, WORK),  # a group would span two nodes
        (PARTS, 2, replace(WORK, adapter_rank=16, quantization="nf4")),  # packed weights are not cut
        ((PoolPart(0, 0, 4),), 4, WORK),  # a single group shares no sequence
    ],
)
def test_groups_that_no_job_can_have_have_no_cost(parts, size, work):
    first, *others = parts
    block = DeviceBlock(*first, "sequence", tuple(others), size)._replace(size=sum(part.size for part in parts))
    assert costs_of(work).of_block(block, 1, 1) is None


def test_a_plan_with_groups_is_written_read_and_predicted_alike():
    costs = costs_of()
    block = DeviceBlock.of_parts(PARTS, 2)
    found = Evaluator(costs, 4, costs.time_objective())([Shape((block,), 1)])
    plan = to_plan(costs, finish(costs, found))
    (stage,) = plan.pipelines[0].stages
    assert stage.tensor_size == 2 and stage.token_holders == ((0, 1), (2, 3), (4, 5), (6, 7))
    again = read_plan(plan.to_dict())
    assert again == plan
    judged = judge_plan(costs_of(), again, costs.time_objective())
    assert judged.step_s == pytest.approx(plan.predicted["step_s"], 1e-9)
    even = {"ranks": [0, 2, 4, 6], "tokens": [1] * 4, "heads": [8] * 4}
    content = plan.to_dict()
    content["pipelines"][0]["stages"][0]["schedule"] |= {"groups": [even], "ring": [0]}
    slower = judge_plan(costs_of(), read_plan(content), costs.time_objective())
    assert slower.step_s > 1.2 * judged.step_s


def test_groups_over_two_kinds_of_devices_are_refused_by_name():
    costs = costs_of()
    group = {"ranks": [2, 4], "tokens": [1, 1], "heads": [16, 16]}
    schedule = {"version": 1, "num_heads": 32, "num_kv_heads": 8, "layout": "zigzag", "groups": [group]}
    stage = {"ranks": [2, 3, 4, 5], "layers": [0, 32], "inner": "sequence", "tensor_size": 2, "schedule": schedule}
    model = {"num_layers": 32, "num_heads": 32, "num_kv_heads": 8}
    plan = {"version": 2, "model": model, "pipelines": [{"micro_batch_size": 1, "micro_batches": 1, "stages": [stage]}]}
    assert judge_plan(costs, read_plan(plan), costs.time_objective()).step_s > 0
    stage["ranks"] = [3, 4, 5, 6]
    group["ranks"] = [3, 5]
    with pytest.raises(PlanError, match="spans devices of several kinds or nodes"):
        judge_plan(costs, read_plan(plan), costs.time_objective())
