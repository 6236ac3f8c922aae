"""From the steps of ranks to shares, events, a table and observations; and the planner at measured speeds."""

from __future__ import annotations

from dataclasses import replace
from math import inf

import pytest

from ds_hetero.cluster import load_cluster
from ds_hetero.cost import Workload, make_cost_model
from ds_hetero.job.job_times import JobTimes, observation_of, utilizations
from ds_hetero.job.rank_times import SHARES, RankTimes
from ds_hetero.job.times_report import events, times_table
from ds_hetero.job.unit_cost import RankUnitCosts
from ds_hetero.models import load_model
from ds_hetero.planner import plan
from ds_hetero.planner.replan.planned import PlannedEstimates
from ds_hetero.planner.replan.policy import Observation
from ds_hetero.planner.search.shares import apportion
from ds_hetero.runtime.step_clock import StepTimes
from ds_hetero.values.baselines import ring
from ds_hetero.values.plans import Plan
from ds_hetero.values.schedule import Schedule

STEP = StepTimes(
    step_s=10.0,
    attention_s=4.0,
    all_to_all_s=1.0,
    ring_wait_s=0.5,
    idle_s=1.5,
    model_s=2.0,
    attention_flops=1400,
    attention_backward_flops=1000,
    tokens=50,
    length=100,
)


def rank_times(*steps: StepTimes, peak: float = 0.0) -> RankTimes:
    unit_costs = RankUnitCosts()
    for step in steps:
        unit_costs.add(step)
    return RankTimes.from_steps(steps, unit_costs, inf, peak, [step.attention_s + step.model_s for step in steps])


def test_shares_add_up_and_rest_is_what_nobody_claims():
    times = rank_times(STEP, STEP)
    assert times.shares(SHARES) == pytest.approx(
        {"attention": 0.4, "model": 0.2, "all_to_all": 0.1, "ring_wait": 0.05, "idle": 0.15, "rest": 0.1}
    )
    assert tuple(times.shares(SHARES)) == (*SHARES, "rest")
    assert (times.tokens_per_s, times.compute_s) == (5.0, 6.0)
    assert (times + times).shares(SHARES) == pytest.approx(times.shares(SHARES))
    assert (times + times).steps == 4


def test_mfu_counts_what_is_useful_once():
    """6 operations per parameter and token, 12 of the 14 of attention; here with 3 layers of 7 weights and a head."""
    model = replace(load_model("gpt-7b"), num_layers=3)
    per_token = 3 * model.active_layer_parameters + model.hidden_size * model.vocab_size
    times = rank_times(STEP, peak=1e12)
    useful = 6 * per_token * 50 + 1200
    assert times.model_flops_utilization(model, 0.0) == pytest.approx(useful / 10 / 1e12)
    assert times.model_flops_utilization(model, 5e11) == pytest.approx(useful / 10 / 5e11)
    assert times.model_flops_utilization(None, 5e11) is None
    assert rank_times(STEP).model_flops_utilization(model, 0.0) is None


def test_events_and_table_name_every_rank():
    slow = replace(STEP, attention_s=6.0, idle_s=0.0, ring_wait_s=0.0)
    seen, pair = JobTimes([rank_times(STEP), rank_times(slow)]), Plan.of_replicas([ring(2, 4, 4)])
    utilization = utilizations(seen, load_model("gpt-7b"), [1e9, 0.0])
    told = {name: value for name, value, samples in events(seen, pair, utilization, 2, 640)}
    assert told["Heterogeneity/rank1/attention_share"] == pytest.approx(0.6)
    assert told["Heterogeneity/tokens_per_s"] == 10
    assert told["Heterogeneity/imbalance"] == pytest.approx(8 / 7)
    assert told["Heterogeneity/schedule_changes"] == 2
    assert "Heterogeneity/rank0/mfu" in told and "Heterogeneity/rank1/mfu" not in told
    drawn = times_table(seen, pair, utilizations(seen, None, [0.0, 0.0]), 2)
    assert "imbalance 1.14, 2 changes of schedule" in drawn
    assert "60.0%" in drawn


def test_an_observation_is_per_step_and_leaves_out_what_was_not_measured():
    idle = replace(STEP, attention_s=0.0, attention_flops=0, attention_backward_flops=0)
    observation = observation_of([rank_times(STEP, STEP), rank_times(idle, idle)])
    assert observation.attention_flops == (1400, 0)
    assert observation.tokens == (50, 50)
    assert observation.attention_s_per_flop == (pytest.approx(4 / 1400), None)
    assert observation.compute_s == pytest.approx((6.0, 2.0))
    assert (observation.step_s, observation.length) == (10, 100)


# --- the planner at measured speeds ---------------------------------------------------------------------

CLUSTER = load_cluster(
    {
        "nodes": [
            {"name": "a", "device": "A100-SXM-80GB", "count": 4, "link": {"bandwidth_gb_per_s": 300, "latency_us": 5}}
        ],
        "network": {"bandwidth_gb_per_s": 25, "latency_us": 10},
    }
)
MODEL = load_model("llama-3.1-8b")
SEQ_LEN = 32768
COST = make_cost_model("calibrated", CLUSTER, MODEL, Workload(seq_len=SEQ_LEN))


def observe(schedule: Schedule, speeds: tuple[float, ...], error: float = 0.005) -> Observation:
    """As if each rank's device were that much faster than its description."""
    busy_s = COST.predict(schedule.shifted(0)).busy_s
    tokens = schedule.tokens(SEQ_LEN)
    seconds = [
        (busy * MODEL.num_layers + float(COST.loss_s_per_token_D[i]) * tokens[rank]) / speed
        for i, (rank, busy, speed) in enumerate(zip(schedule.ranks, busy_s, speeds, strict=True))
    ]
    held = tuple(float(tokens[rank]) for rank in schedule.ranks)
    return Observation(
        attention_flops=(0.0,) * 4,
        tokens=held,
        attention_s_per_flop=(None,) * 4,
        model_s_per_token=tuple(s / t if t else None for s, t in zip(seconds, held, strict=True)),
        error=(error,) * 4,
        growth=(inf,) * 4,
        step_s=max(seconds),
        length=SEQ_LEN,
    )


def test_devices_as_described_call_for_no_change():
    present = plan(CLUSTER, MODEL, SEQ_LEN).schedule.shifted(8)
    estimate = PlannedEstimates(COST, None)(present, observe(present, (1.0, 1.01, 0.99, 1.0)))
    assert estimate.gain(present) == 0
    assert estimate.gain(estimate.best()) == pytest.approx(0, abs=0.01)
    assert estimate.best().ranks == present.ranks


def test_the_planner_gives_a_slow_device_less():
    present = plan(CLUSTER, MODEL, SEQ_LEN).schedule.shifted(8)
    estimate = PlannedEstimates(COST, None)(present, observe(present, (1.0, 1.0, 0.4, 1.0)))
    assert estimate.speeds == pytest.approx([1.0, 1.0, 0.4, 1.0])
    best = estimate.best()
    tokens = best.tokens(SEQ_LEN)
    assert tokens[10] < 0.7 * tokens[8]
    bound = 1 - 4 * 0.4 / 3.4  # all work spread over all speeds, against the slow rank's quarter
    assert 0.7 * bound < estimate.gain(best) <= bound + 0.02
    again = PlannedEstimates(COST, None)(best, observe(best, (1.0, 1.0, 0.4, 1.0)))
    assert again.speeds == pytest.approx([1.0, 1.0, 0.4, 1.0])
    assert again.gain(again.best()) < 0.02


def test_planning_again_keeps_the_token_unit():
    present = plan(CLUSTER, MODEL, SEQ_LEN, token_unit=128).schedule
    for speed in (0.4, 0.83):
        estimate = PlannedEstimates(COST, None, 128)(present, observe(present, (1.0, 1.0, speed, 1.0)))
        tokens = estimate.best().tokens(SEQ_LEN)
        assert tokens[2] < tokens[0] and not any(count % 128 for count in tokens.values())


def test_searches_of_a_running_job_leave_no_entry_in_the_cache_of_the_planner():
    present = plan(CLUSTER, MODEL, SEQ_LEN).schedule
    assert apportion.cache_info().currsize > 0  # one search: its entries are used again while it runs
    estimates = PlannedEstimates(COST, None)
    for speed in (0.4, 0.5):
        estimates(present, observe(present, (1.0, 1.0, speed, 1.0))).best()
        assert apportion.cache_info().currsize == 0


def test_a_rank_without_work_keeps_the_speed_it_was_known_by():
    present = plan(CLUSTER, MODEL, SEQ_LEN).schedule
    estimates = PlannedEstimates(COST, None)
    estimates(present, observe(present, (1.0, 1.0, 0.4, 1.0)))
    observation = observe(present, (1.0,) * 4)
    observation = replace(
        observation, model_s_per_token=(*observation.model_s_per_token[:2], None, observation.model_s_per_token[3])
    )
    assert estimates(present, observation).speeds == pytest.approx([1.0, 1.0, 0.4, 1.0])
