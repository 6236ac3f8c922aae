"""Uniform grids: equal stages over consecutive ranks, with and without context parallelism."""

from dataclasses import replace

import pytest

from ds_hetero.cluster.files import cluster_from_dict
from ds_hetero.cost.stages.calibrated import CalibratedStageCosts
from ds_hetero.cost.workload import Workload
from ds_hetero.models import load_model
from ds_hetero.planner.pipeline_search import uniform_grids as grids
from ds_hetero.planner.pipeline_search.finish import finish, to_plan
from ds_hetero.planner.pipeline_search.given_layers import evaluate_with_layers
from ds_hetero.planner.pipeline_search.stage_schedules import ScheduleFinder
from ds_hetero.planner.pipelines.baselines import best_grid
from ds_hetero.planner.pipelines.planning import plan_pipelines
from ds_hetero.values.plans import read_plan

NODES = [
    {"name": "fast", "device": "H100-SXM-80GB", "count": 4},
    {"name": "slow", "device": "A100-SXM-80GB", "count": 4},
]
CLUSTER = cluster_from_dict({"nodes": NODES, "network": {"bandwidth_gb_per_s": 25, "latency_us": 10}})
MODEL, WORK = load_model("llama-3.1-8b"), Workload(seq_len=131072)


def costs_of(**options):
    return CalibratedStageCosts(CLUSTER, MODEL, WORK, find=ScheduleFinder(), **options)


def test_stages_of_context_parallelism_are_consecutive_tensor_groups():
    found = dict(grids.context_parallel_grids(costs_of(), 2, (1,)))
    assert {"tp2 cp4 pp1 dp1 b1", "tp1 cp8 pp1 dp1 b1", "tp4 cp2 pp1 dp1 b1", "tp2 cp2 pp2 dp1 b1"} <= set(found)
    assert "tp2 cp2 pp1 dp2 b1" in found and not any("tp8" in name for name in found)
    (pipeline,) = found["tp2 cp4 pp1 dp1 b1"]
    (block,) = pipeline.blocks
    assert (block.tensor_size, [part.size for part in block.parts]) == (2, [4, 4])
    (pipeline,) = found["tp2 cp2 pp2 dp1 b1"]
    assert [(block.node, block.size, block.tensor_size) for block in pipeline.blocks] == [(0, 4, 2), (1, 4, 2)]
    assert pipeline.layers == (16, 16) and pipeline.micro_batches == 2


def test_grids_share_sequences_equally_on_unlike_devices():
    costs = costs_of()
    even = costs.with_even_shares()
    assert even.with_even_shares() is even
    ((pipeline,),) = [
        grid for name, grid in grids.context_parallel_grids(even, 1, (1,)) if name == "tp2 cp4 pp1 dp1 b1"
    ]
    (block,) = pipeline.blocks
    assert len(set(even.schedule(block, 1).tokens(WORK.seq_len).values())) == 1
    assert len(set(costs.schedule(block, 1).tokens(WORK.seq_len).values())) > 1
    assert even.of_block(block, 1, 1).layer_s > 1.2 * costs.of_block(block, 1, 1).layer_s


@pytest.mark.parametrize(
    ("inners", "names"),
    [(("tensor",), set()), (("sequence",), {"tp1"}), (("tensor", "sequence"), {"tp1", "tp2", "tp4"})],
)
def test_grids_have_what_the_model_can_run(inners, names):
    found = grids.context_parallel_grids(costs_of(inners=inners), 2, (1,))
    assert {name.partition(" ")[0] for name, _ in found} == names


def test_every_grid_of_context_parallelism_is_a_plan_that_jobs_can_read():
    """Stages over two nodes of three GPUs: as pipelines are placed, some have ranks that are no tensor groups."""
    three = {"device": "A100-SXM-80GB", "count": 3, "repeat": 4}
    cluster = cluster_from_dict(
        {"nodes": [{"name": "n", **three}], "network": {"bandwidth_gb_per_s": 25, "latency_us": 10}}
    )
    costs = CalibratedStageCosts(cluster, load_model("qwen3-8b"), Workload(seq_len=4096), find=ScheduleFinder())
    even = costs.with_even_shares()
    found = dict(grids.context_parallel_grids(even, 12, (1,)))
    num_plans = 0
    for grid in found.values():
        candidate = evaluate_with_layers(even, even.time_objective(), grid)
        if candidate is not None:  # it fits into memory
            plan = to_plan(even, finish(even, candidate))
            assert read_plan(plan.to_dict()) == plan
            num_plans += 1
    assert num_plans > 3


def test_rings_in_stages_are_predicted_with_the_gradients_that_they_send():
    """Over a link so slow that messages do not hide behind attention."""
    slow = cluster_from_dict({"nodes": NODES, "network": {"bandwidth_gb_per_s": 1, "latency_us": 10}})
    block = dict(grids.context_parallel_grids(costs_of(), 1, (1,)))["tp1 cp8 pp1 dp1 b1"][0].blocks[0]
    exact, rounded = (
        CalibratedStageCosts(
            slow, MODEL, replace(WORK, ring_gradients=gradients), find=ScheduleFinder()
        ).with_even_shares()
        for gradients in ("fp32", "bf16")
    )
    assert rounded.of_block(block, 1, 1).layer_s < exact.of_block(block, 1, 1).layer_s


def test_many_ranks_have_no_grids_of_context_parallelism(monkeypatch):
    monkeypatch.setattr(grids, "CONTEXT_PARALLEL_RANKS", 7)
    assert not list(grids.context_parallel_grids(costs_of(), 2, (1,)))


def test_the_best_grid_of_a_long_sequence_has_context_parallelism_and_is_not_better_than_the_plan():
    """128K tokens of 8B: without sharing sequences, activations fit on no device."""
    costs = costs_of()
    baseline, candidate = best_grid(costs, costs.time_objective(), 1, (1,))
    assert " cp" in baseline.name and candidate.step_s == baseline.step_s
    planned = plan_pipelines(CLUSTER, MODEL, WORK, 1, micro_batch_sizes=(1,), effort_s=0.2, with_sequence=False)
    assert planned.baselines["grid"].name.startswith("uniform grid, tp")
    assert planned.step_s < planned.baselines["grid"].step_s
