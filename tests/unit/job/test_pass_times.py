"""Phases and speeds of pipelines, from moments that a pipeline of known times would have on clocks that differ."""

from __future__ import annotations

from math import inf

import pytest

from ds_hetero.cost.stages.pipeline_time import run_pipeline
from ds_hetero.job.job_times import times_of_passes
from ds_hetero.job.pipeline_times import common_steps, measure_pipeline
from ds_hetero.job.rank_times import PHASES, RankTimes
from ds_hetero.job.times_report import events as events_of
from ds_hetero.job.times_report import times_table
from ds_hetero.job.unit_cost import RankUnitCosts
from ds_hetero.runtime.step_clock import PassTimes, StepTimes
from ds_hetero.values.plans import Pipeline, Plan, PlannedModel, Stage
from ds_hetero.values.plans.timetable import FORWARD, one_f_one_b

SYNC_S, REST_S = 0.5, 0.25


def plan_of(num_stages: int, micro_batches: int) -> Plan:
    stages = tuple(Stage(ranks=(j,), layers=(j, j + 1)) for j in range(num_stages))
    pipeline = Pipeline(stages=stages, micro_batch_size=1, micro_batches=micro_batches)
    model = PlannedModel(num_layers=num_stages, num_heads=4, num_kv_heads=4)
    return Plan(pipelines=(pipeline,), model=model, predicted={"step_s": 40.0})


def step_of(pipeline: Pipeline, forward_s, backward_s, hop_s, clocks, number=0):
    """A step of the recurrence as the ranks would measure it, by rank."""
    count = pipeline.micro_batches
    in_flight = [pipeline.in_flight(j) for j in range(len(pipeline.stages))]
    run = run_pipeline(forward_s, backward_s, hop_s, count, in_flight)
    by_rank = {}
    for j, ahead in enumerate(clocks):
        free, passes = 0.0, []
        for kind, k in one_f_one_b(in_flight[j], count):
            end = (run.forward_end_s if kind == FORWARD else run.backward_end_s)[j][k]
            begin = end - (forward_s if kind == FORWARD else backward_s)[j]
            passes.append(PassTimes(kind, k, *(moment + ahead for moment in (free, begin, end, end))))
            free = end
        joined = run.total_s + ahead
        by_rank[j] = step_times(number, joined + SYNC_S + REST_S, joined, SYNC_S, passes)
    return by_rank, run.total_s


def step_times(number, step_s, joined_s, sync_s, passes):
    phases = dict.fromkeys(("attention_s", "all_to_all_s", "ring_wait_s", "idle_s", "model_s"), 0.0)
    counts = dict.fromkeys(("attention_flops", "attention_backward_flops", "tokens", "length"), 0)
    return StepTimes(
        number=number, step_s=step_s, joined_s=joined_s, sync_s=sync_s, passes=tuple(passes), **phases, **counts
    )


def seen_of(plan, steps):
    """What an observation of these steps says."""
    own = [
        RankTimes.from_steps([step[rank] for step in steps], RankUnitCosts(), inf, 0.0, [])
        for rank in range(len(steps[0]))
    ]
    return times_of_passes(plan, own, steps)


TIMES = {
    "slow link": ([1.0, 1.0, 1.0], [2.0, 2.0, 2.0], [0.1, 3.0]),
    "slow first stage": ([3.0, 1.0, 1.0], [6.0, 2.0, 2.0], [0.1, 0.2]),
    "slow last stage": ([1.0, 0.5, 2.0], [2.0, 1.0, 4.0], [0.0, 0.0]),
}


@pytest.mark.parametrize("clocks", [(0.0, 0.0, 0.0), (0.0, 1.7, -0.4)], ids=["one clock", "clocks apart"])
@pytest.mark.parametrize("name", TIMES)
def test_stages_and_hops_are_measured_on_any_clocks(name, clocks):
    plan = plan_of(3, 6)
    forward_s, backward_s, hop_s = TIMES[name]
    step, total_s = step_of(plan.pipelines[0], *TIMES[name], clocks)
    measured = measure_pipeline(plan.pipelines[0], [step])
    assert measured.forward_s == pytest.approx(forward_s)
    assert measured.backward_s == pytest.approx(backward_s)
    assert measured.hop_s == pytest.approx(hop_s)
    assert measured.micro_batches == 6 and measured.in_flight == (3, 2, 1)
    assert measured.predicted_s == pytest.approx(total_s)
    assert measured.passes_s == pytest.approx(total_s)


@pytest.mark.parametrize("name", TIMES)
def test_phases_are_all_of_a_step(name):
    plan = plan_of(3, 6)
    forward_s, backward_s, _ = TIMES[name]
    step, total_s = step_of(plan.pipelines[0], *TIMES[name], (0.0, 0.0, 0.0))
    phases = seen_of(plan, [step, step]).ranks
    for j, rank in enumerate(phases):
        assert rank.steps == 2
        assert rank.forward_s == pytest.approx(2 * 6 * forward_s[j])
        assert rank.backward_s == pytest.approx(2 * 6 * backward_s[j])
        assert rank.sync_s == pytest.approx(2 * SYNC_S)
        assert rank.hop_s + rank.bubble_s == pytest.approx(2 * (total_s - 6 * (forward_s[j] + backward_s[j])))
        assert sum(rank.shares(PHASES).values()) == pytest.approx(1)
        assert rank.shares(PHASES)["rest"] == pytest.approx(REST_S / step[j].step_s)


def test_a_slow_link_is_a_hop_and_a_slow_neighbour_a_bubble():
    plan = plan_of(2, 4)
    of_link, _ = step_of(plan.pipelines[0], [1.0, 1.0], [2.0, 2.0], [9.0], (0.0, 5.0))
    link = seen_of(plan, [of_link]).ranks[1]
    slow, _ = step_of(plan.pipelines[0], [10.0, 1.0], [20.0, 2.0], [0.0], (0.0, 5.0))
    neighbour = seen_of(plan, [slow]).ranks[1]
    assert link.hop_s == pytest.approx(30)
    assert neighbour.hop_s == pytest.approx(0, abs=1e-9)
    assert neighbour.bubble_s > 30


def test_steps_that_a_rank_has_not_finished_are_left_out():
    plan = plan_of(2, 4)
    steps = [step_of(plan.pipelines[0], [1.0, 1.0], [2.0, 2.0], [0.0], (0.0, 0.0), number)[0] for number in range(3)]
    common = common_steps([[step[0] for step in steps], [step[1] for step in steps[1:]]])
    assert [step[0].number for step in common] == [1, 2]


def test_an_idle_rank_waits():
    plan = plan_of(2, 4)
    step, _ = step_of(plan.pipelines[0], [1.0, 1.0], [2.0, 2.0], [0.0], (0.0, 0.0))
    step[2] = step_times(0, 20.0, 16.0, 1.0, ())
    idle = seen_of(plan, [step]).ranks[2]
    assert idle.shares(PHASES)["bubble"] == pytest.approx(0.8)


def test_events_and_table_set_prediction_beside_measurement():
    plan = plan_of(3, 6)
    step, total_s = step_of(plan.pipelines[0], *TIMES["slow link"], (0.0, 0.0, 0.0))
    seen = seen_of(plan, [step])
    events = {name: value for name, value, _ in events_of(seen, plan, [None] * 3, 0, 12)}
    assert events["Heterogeneity/pipeline0/predicted_s"] == pytest.approx(total_s)
    assert events["Heterogeneity/rank1/hop_share"] == pytest.approx(seen.ranks[1].shares(PHASES)["hop"])
    assert events["Heterogeneity/step_s"] == pytest.approx(total_s + SYNC_S + REST_S)
    text = times_table(seen, plan, [None] * 3, 0)
    assert "forward" in text and "bubble" in text
    assert "0.0%)" in text
    assert "the plan says 40 s" in text
