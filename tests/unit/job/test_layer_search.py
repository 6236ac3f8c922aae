"""Layers by measured speeds: the cut that is found, what bounds it, and when a running job changes to it."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations

import pytest

from ds_hetero.job import replanning as module
from ds_hetero.job.job_times import JobTimes
from ds_hetero.job.layer_search import LayerSearch, speeds_of
from ds_hetero.job.pipeline_times import MeasuredPipeline
from ds_hetero.job.rank_times import RankTimes
from ds_hetero.job.replanning import Replanning
from ds_hetero.job.unit_cost import RankUnitCosts
from ds_hetero.planner.replan.stage_layers import PipelineSpeeds, StageSpeed, best_layers, pipeline_s, with_layers
from ds_hetero.values.plans import Pipeline, Plan, PlannedModel, Stage


def speeds(layer_s, most=None, head_s=0.0, hop_s=0.0, micro_batches=6):
    count = len(layer_s)
    stages = tuple(
        StageSpeed(
            forward_s=seconds,
            backward_s=2 * seconds,
            other_forward_s=head_s if j == count - 1 else 0.0,
            other_backward_s=2 * head_s if j == count - 1 else 0.0,
            most_layers=most[j] if most else 100,
        )
        for j, seconds in enumerate(layer_s)
    )
    return PipelineSpeeds(
        stages=stages,
        hop_s=(hop_s,) * (count - 1),
        micro_batches=micro_batches,
        in_flight=tuple(range(count, 0, -1)),
    )


def all_cuts(layers, stages):
    for cuts in combinations(range(1, layers), stages - 1):
        yield tuple(b - a for a, b in zip((0, *cuts), (*cuts, layers), strict=True))


@pytest.mark.parametrize("layer_s", [(1, 1), (1, 2.5), (1, 1, 2.5), (3, 1, 1), (1, 4, 2)])
@pytest.mark.parametrize("head_s", [0.0, 3.0])
def test_layers_are_the_best_of_all_cuts(layer_s, head_s):
    measured, count = speeds(layer_s, head_s=head_s), len(layer_s)
    found = best_layers(measured, (10 - count + 1, *([1] * (count - 1))))
    best_s = min(pipeline_s(measured, layers) for layers in all_cuts(10, count))
    assert pipeline_s(measured, found) <= 1.02 * best_s
    assert sum(found) == 10 and min(found) >= 1


def test_a_full_memory_takes_no_layers():
    assert best_layers(speeds((1, 1), most=[3, 100]), (3, 7)) == (3, 7)


def plan_of(*layers):
    stages, start = [], 0
    for rank, number in enumerate(layers):
        stages.append(Stage(ranks=(rank,), layers=(start, start + number)))
        start += number
    pipeline = Pipeline(stages=tuple(stages), micro_batch_size=1, micro_batches=6)
    return Plan(pipelines=(pipeline,), model=PlannedModel(num_layers=start, num_heads=4, num_kv_heads=4))


def test_stages_keep_their_ranks_and_order():
    moved = with_layers(plan_of(5, 5), [[7, 3]])
    assert [stage.layers for stage in moved.pipelines[0].stages] == [(0, 7), (7, 10)]
    assert [stage.ranks for stage in moved.pipelines[0].stages] == [(0,), (1,)]


def measured(layers, layer_s):
    return MeasuredPipeline(
        forward_s=tuple(number * seconds for number, seconds in zip(layers, layer_s, strict=True)),
        backward_s=tuple(2 * number * seconds for number, seconds in zip(layers, layer_s, strict=True)),
        layers_share=(1.0,) * len(layers),
        hop_s=(0.0,) * (len(layers) - 1),
        micro_batches=6,
        in_flight=tuple(range(len(layers), 0, -1)),
        passes_s=1.0,
    )


def test_what_is_not_in_layers_stays_with_its_stage():
    times = measured((4, 4), (1.0, 2.0))
    _, last = speeds_of(replace(times, layers_share=(1.0, 0.5)), (4, 4), (9.0, 9.0)).stages
    assert last.forward_s == pytest.approx(1.0) and last.other_forward_s == pytest.approx(4.0)
    assert last.backward_s == pytest.approx(2.0) and last.other_backward_s == pytest.approx(8.0)
    assert last.most_layers == 36


def seen(layers, layer_s):
    """An observation of two ranks whose memory has room."""
    rank = replace(RankTimes.from_steps([], RankUnitCosts(), float("inf"), 0.0, []), steps=1, step_s=2.0, tokens=8.0)
    return JobTimes([rank, rank], [measured(layers, layer_s)])


def test_layers_move_when_two_observations_ask_for_it(monkeypatch):
    told, plans = [], []
    monkeypatch.setattr(module, "announce", told.append)
    replanning = Replanning(plan_of(5, 5), LayerSearch(0.05), plans.append)
    assert not replanning.observe(5, seen((5, 5), (1.0, 1.0)))
    assert not replanning.observe(10, seen((5, 5), (1.0, 2.5)))
    assert replanning.observe(15, seen((5, 5), (1.0, 2.5)))
    (plan,) = plans
    assert [stage.num_layers for stage in plan.pipelines[0].stages] == [8, 2]
    assert replanning.plan is plan and [change.step for change in replanning.changes] == [15]
    assert len(told) == 1 and "8+2" in told[0]
    assert not replanning.observe(20, seen((8, 2), (1.0, 2.5)))
    assert told[1:] == ["step 20: since layers moved, a token takes 100.0% of the time it took"]


def test_a_single_slow_observation_moves_nothing():
    plans = []
    replanning = Replanning(plan_of(5, 5), LayerSearch(0.05), plans.append)
    for step in range(5, 40, 5):
        assert not replanning.observe(step, seen((5, 5), (1.0, 2.5 if step % 10 else 1.0)))
    assert not plans


def test_a_small_gain_moves_nothing():
    plans = []
    replanning = Replanning(plan_of(20, 20), LayerSearch(0.2), plans.append)
    for step in (5, 10, 15):
        assert not replanning.observe(step, seen((20, 20), (1.0, 1.2)))
    assert not plans
