"""Stages of unlike devices that share sequences: shares by speed, memory by device, plans and files with them."""

import json
from dataclasses import replace

import pytest

from ds_hetero.cluster.files import cluster_from_dict
from ds_hetero.cost.stages.calibrated import CalibratedStageCosts
from ds_hetero.cost.stages.stage import DeviceBlock, PoolPart
from ds_hetero.cost.workload import Workload
from ds_hetero.errors import PlanError
from ds_hetero.models import load_model
from ds_hetero.planner.pipeline_search.block_ranks import can_be_placed
from ds_hetero.planner.pipeline_search.cuts import make_cut
from ds_hetero.planner.pipeline_search.stage_schedules import ScheduleFinder
from ds_hetero.planner.pipelines.given import judge_plan
from ds_hetero.planner.pipelines.planning import plan_pipelines
from ds_hetero.planner.pipelines.replan import replan
from ds_hetero.values.plans import read_plan

FAST, SLOW = "H100-SXM-80GB", "A100-SXM-80GB"
MODEL, WORK = load_model("llama-2-13b"), Workload(seq_len=65536)


def nodes_of(devices, count):
    nodes = [{"name": "n", "devices": devices, "repeat": count}]
    return cluster_from_dict({"nodes": nodes, "network": {"bandwidth_gb_per_s": 1, "latency_us": 10}})


TWO_NODES = nodes_of([FAST, SLOW, FAST, SLOW], 2)


@pytest.fixture(scope="module")
def found():
    return plan_pipelines(TWO_NODES, MODEL, WORK, 4, micro_batch_sizes=(1,), effort_s=0.2)


def test_devices_share_a_sequence_by_their_speed():
    costs = CalibratedStageCosts(TWO_NODES, MODEL, WORK, find=ScheduleFinder())
    parts = (PoolPart(0, 0, 2), PoolPart(1, 0, 2))
    schedule = costs.schedule(DeviceBlock.of_parts(parts), 1)
    tokens = schedule.tokens(WORK.seq_len)
    assert min(tokens[0], tokens[1]) > 1.5 * max(tokens[2], tokens[3])
    option = costs.mixed_stage(parts, 1, 1)
    fast, slow = option.parts
    assert fast.memory.saved_bytes > slow.memory.saved_bytes  # activations follow tokens
    assert fast.memory.layer_bytes == slow.memory.layer_bytes  # parameters are whole everywhere
    even = CalibratedStageCosts(nodes_of([SLOW] * 4, 1), MODEL, WORK).stage(0, 4, "sequence", 1, 1)
    assert option.layer_s < even.layer_s  # better than the slow devices alone, as an even split would be


def test_a_schedule_does_not_depend_on_the_node():
    costs = CalibratedStageCosts(TWO_NODES, MODEL, WORK, find=ScheduleFinder())
    here, there = ((PoolPart(0, node, 2), PoolPart(1, node, 2)) for node in (0, 1))
    assert costs.schedule(DeviceBlock.of_parts(here), 1) == costs.schedule(DeviceBlock.of_parts(there), 1)
    assert costs.mixed_stage(here, 1, 2) == costs.mixed_stage(there, 1, 2)


def test_without_a_search_there_are_no_such_stages():
    costs = CalibratedStageCosts(TWO_NODES, MODEL, WORK)
    assert costs.mixed_stage((PoolPart(0, 0, 1), PoolPart(1, 0, 1)), 1, 1) is None
    block = DeviceBlock.of_parts([PoolPart(1, 0, 1), PoolPart(0, 0, 1)])
    assert block.parts == (PoolPart(0, 0, 1), PoolPart(1, 0, 1))
    assert make_cut(costs, (block,), (MODEL.num_layers,), 1, 1) is None


def test_nodes_of_unlike_devices_are_stages_where_that_is_fastest(found):
    stages = found.plan.pipelines[0].stages
    assert [stage.inner for stage in stages] == ["sequence", "sequence"]
    assert [stage.ranks for stage in stages] == [(0, 1, 2, 3), (4, 5, 6, 7)]
    for stage in stages:
        tokens = stage.schedule.tokens(WORK.seq_len)
        speeds = [TWO_NODES.devices[rank].peak_flops_per_s for rank in stage.ranks]
        order = sorted(stage.ranks, key=lambda rank: -speeds[stage.ranks.index(rank)])
        assert min(tokens[rank] for rank in order[:2]) > max(tokens[rank] for rank in order[2:])
    separate = CalibratedStageCosts(TWO_NODES, MODEL, WORK)
    without = plan_pipelines(TWO_NODES, MODEL, WORK, 4, costs=separate, micro_batch_sizes=(1,), effort_s=0.2)
    assert found.step_s < 0.9 * without.step_s


def test_devices_that_alternate_with_others_do_not_share_sequences_alone():
    """A schedule holds consecutive ranks, and devices of one kind are at every other one here."""
    costs = CalibratedStageCosts(TWO_NODES, MODEL, WORK)
    assert costs.stage(0, 2, "sequence", 1, 1) is None
    assert CalibratedStageCosts(nodes_of([SLOW] * 4, 1), MODEL, WORK).stage(0, 2, "sequence", 1, 1) is not None
    alone = [(DeviceBlock(1, 0, 2, "sequence"),)]
    assert not can_be_placed(costs.pools, alone)
    assert can_be_placed(costs.pools, [(DeviceBlock.of_parts([PoolPart(0, 0, 2), PoolPart(1, 0, 2)]),)])


def test_such_a_plan_is_predicted_from_its_file_as_it_was_planned(found):
    given = read_plan(json.loads(json.dumps(found.plan.to_dict())))
    objective = found.costs.time_objective()
    costs = CalibratedStageCosts(TWO_NODES, MODEL, found.costs.workload)  # without a search of its own
    assert judge_plan(costs, given, objective).step_s == pytest.approx(found.step_s, rel=1e-12)


def test_a_worse_schedule_in_the_file_is_predicted_as_worse(found):
    pipeline = found.plan.pipelines[0]
    stages = []
    for stage in pipeline.stages:
        groups = tuple(replace(group, tokens=(1,) * len(group.ranks)) for group in stage.schedule.groups)
        stages.append(replace(stage, schedule=replace(stage.schedule, groups=groups)))
    even = replace(found.plan, pipelines=(replace(pipeline, stages=tuple(stages)),))
    objective = found.costs.time_objective()
    costs = CalibratedStageCosts(TWO_NODES, MODEL, found.costs.workload)
    assert judge_plan(costs, even, objective).step_s > 1.1 * found.step_s


def test_equal_stages_with_different_schedules_are_refused(found):
    costs = CalibratedStageCosts(TWO_NODES, MODEL, WORK, find=ScheduleFinder())
    parts = (PoolPart(0, 0, 2), PoolPart(1, 0, 2))
    schedule = costs.schedule(DeviceBlock.of_parts(parts), 1)
    costs.keep_schedule(DeviceBlock.of_parts(parts), 1, schedule)
    with pytest.raises(PlanError, match="different schedules"):
        costs.keep_schedule(DeviceBlock.of_parts(parts), 1, schedule.on_ranks((1, 0, 2, 3)))


def test_a_device_of_such_a_stage_may_be_lost(found):
    def make_costs(left):
        return [CalibratedStageCosts(left, MODEL, found.costs.workload, find=ScheduleFinder())]

    again = replan(found.plan, TWO_NODES, make_costs, lost=[2])
    assert set(again.plan.ranks) <= set(range(7))
    assert again.finished.step_s < 2 * found.step_s
