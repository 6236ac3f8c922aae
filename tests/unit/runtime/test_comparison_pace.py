"""How many steps lie between two comparisons."""

from __future__ import annotations

import pytest

from ds_hetero.common.reading import MAX_STEPS
from ds_hetero.runtime.step_checks import ComparisonPace, comparison_pace
from ds_hetero.runtime.step_checks.comparison_pace import SHARE, comparison_interval


@pytest.mark.parametrize("comparison_s", [0.001, 0.03, 0.5, 2.0, 7.3])
@pytest.mark.parametrize("step_s", [0.002, 0.1, 1.0, 30.0])
def test_comparisons_take_less_than_their_share_and_come_as_often_as_that_lets_them(
    comparison_s: float, step_s: float
) -> None:
    steps = comparison_interval(comparison_s / step_s)
    assert comparison_s < SHARE * steps * step_s
    assert steps == 1 or comparison_s >= SHARE * (steps - 1) * step_s * (1 - 1e-9)


def test_steps_of_a_comparison_that_takes_for_ever_are_a_number() -> None:
    assert comparison_interval(1e30) == MAX_STEPS


class _Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def perf_counter(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> _Clock:
    fake = _Clock()
    monkeypatch.setattr(comparison_pace.time, "perf_counter", fake.perf_counter)
    return fake


def _step(pace: ComparisonPace, clock: _Clock, seconds: float) -> float:
    clock.now += seconds
    ratio, _ = pace.numbers()
    return ratio


def test_the_slowest_rank_counts_and_comparisons_are_no_part_of_steps(clock: _Clock) -> None:
    pace = ComparisonPace("by_cost")
    with pace.comparing():
        clock.now += 0.3
    ratios = [_step(pace, clock, 10.0), *(_step(pace, clock, 2.0) for _ in range(5))]
    assert ratios == [0.0] * 5 + [0.15]  # of the first step the beginning is not known
    pace.verdict([[0.15, 0.0], [0.0, 0.0]])  # a rank does not know yet
    assert not pace.is_due
    pace.verdict([[0.15, 0.0], [0.295, 0.0]])  # 29.5 steps by the other rank
    for _ in range(23):
        assert not pace.is_due
        _step(pace, clock, 2.0)
    assert not pace.is_due
    _step(pace, clock, 2.0)
    assert pace.is_due  # 30 steps
    with pace.comparing():
        clock.now += 0.1
    assert not pace.is_due
    assert _step(pace, clock, 2.0) == pytest.approx(0.05)  # of a step of 2 seconds still


def test_a_given_number_of_steps_is_kept(clock: _Clock) -> None:
    pace = ComparisonPace(3)
    due = []
    for _ in range(7):
        due.append(pace.is_due)
        if pace.is_due:
            with pace.comparing():
                pass
        _step(pace, clock, 1.0)
    assert due == [False, False, False, True, False, False, True]


@pytest.mark.parametrize("every", ["first_batch", "off", "always"])
def test_nothing_is_repeated_by_steps_where_none_are_named(every: str, clock: _Clock) -> None:
    pace = ComparisonPace(every)
    with pace.comparing():
        clock.now += 1e-6
    for _ in range(20):
        pace.verdict([[_step(pace, clock, 1.0), 0.0]])
    assert not pace.is_due


def test_gradients_of_zero_are_compared_again_after_1_2_4_and_8_steps() -> None:
    def steps_of_comparisons(has_zeros: list[bool], every: int | str = "by_cost") -> list[int]:
        pace, compared = ComparisonPace(every), []
        for step in range(40):
            if step == 0 or pace.is_due:
                compared.append(step)
                with pace.comparing():
                    if has_zeros[min(len(compared), len(has_zeros)) - 1]:
                        pace.note_zeros()
            _, has_seen_zeros = pace.numbers()
            pace.verdict([[0.0, 0.0], [0.0, has_seen_zeros]])  # the ranks agree, whoever has seen them
        return compared

    assert steps_of_comparisons([True]) == [0, 1, 3, 7, 15]
    assert steps_of_comparisons([True, True, False]) == [0, 1, 3]
    assert steps_of_comparisons([False]) == [0]
    assert steps_of_comparisons([True], "first_batch") == [0]
    assert steps_of_comparisons([True], 30) == [0, 30]
