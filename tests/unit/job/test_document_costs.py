"""Measured times of ranks become costs of units, and costs that no longer hold are seen to cost time."""

from __future__ import annotations

from dataclasses import replace
from math import inf

import pytest

from ds_hetero.job.documents import measured_costs, predicted_gain_of_documents
from ds_hetero.job.rank_times import RankTimes
from ds_hetero.job.unit_cost import RankUnitCosts
from ds_hetero.models import load_model
from ds_hetero.planner.documents import UnitCosts as DocumentCosts
from ds_hetero.runtime.step_clock import StepTimes
from ds_hetero.values.baselines import ring
from ds_hetero.values.schedule import Group, Schedule

SPEC = replace(load_model("gpt-7b"), num_layers=5)


def times_of(attention_s: float, model_s: float, flops: int = 1_400_000, tokens: int = 100) -> RankTimes:
    step = StepTimes(
        step_s=9.0,
        attention_s=attention_s,
        all_to_all_s=0.0,
        ring_wait_s=0.0,
        idle_s=0.0,
        model_s=model_s,
        attention_flops=flops,
        attention_backward_flops=1_000_000,
        tokens=tokens,
        length=100,
    )
    costs = RankUnitCosts()
    costs.add(step)
    return RankTimes.from_steps([step], costs, inf, 0.0, [])


def test_a_square_takes_the_time_of_its_pairs_and_a_token_that_of_a_layer():
    """4 + 10 operations a pair: n * n / 2 pairs of 32 heads; a rank of half the speed has twice the costs."""
    schedule = ring(2, 32, 32)
    costs = measured_costs(
        DocumentCosts.from_weights(schedule), schedule, [times_of(1.4, 2.0), times_of(2.8, 4.0)], SPEC
    )
    assert costs.square_s == pytest.approx((32 * 14 * SPEC.head_dim / 2 * 1e-6, 2 * 32 * 14 * SPEC.head_dim / 2 * 1e-6))
    assert costs.token_s == pytest.approx((2 / 100 / 5, 4 / 100 / 5))


def test_a_unit_is_as_slow_as_its_slowest_rank_and_keeps_its_ratio_while_it_has_no_work():
    groups = (Group(ranks=(0, 2), tokens=(3, 1), heads=(16, 16)), Group(ranks=(1,), tokens=(4,), heads=(32,)))
    schedule = Schedule(num_heads=32, num_kv_heads=32, groups=groups)
    before = DocumentCosts.from_weights(schedule)
    ranks = [times_of(1.4, 2.0), times_of(0.0, 0.0, flops=0, tokens=0), times_of(2.8, 8.0)]
    costs = measured_costs(before, schedule, ranks, SPEC)
    assert costs.token_s[0] == pytest.approx(max(0.75 * 2 / 100, 0.25 * 8 / 100) / 5)
    assert costs.token_s[1] / costs.token_s[0] == pytest.approx(before.token_s[1] / before.token_s[0])
    assert costs.square_s[1] / costs.square_s[0] == pytest.approx(before.square_s[1] / before.square_s[0])


def test_a_rank_at_60_percent_is_predicted_to_be_worth_a_change():
    """Four equal ranks, one at 0.6: it holds up the others by 1 / 0.6, where 4 / 3.6 would do."""
    schedule = ring(4, 32, 32)
    old = DocumentCosts.from_weights(schedule)
    slow = tuple(cost / (0.6 if unit == 1 else 1.0) for unit, cost in enumerate(old.token_s))
    new = replace(old, token_s=slow, square_s=tuple(cost / old.token_s[0] * old.square_s[0] for cost in slow))
    ranks = [times_of(1.4, 2.0)] * 4
    assert predicted_gain_of_documents(old, new, ranks) == pytest.approx(1 - 4 / 3.6 * 0.6)
    assert predicted_gain_of_documents(new, new, ranks) == pytest.approx(0.0)
    scaled = replace(old, token_s=tuple(3 * c for c in old.token_s), square_s=tuple(3 * c for c in old.square_s))
    assert predicted_gain_of_documents(old, scaled, ranks) == pytest.approx(0.0)  # the same ratios
