"""Probes are repeated by their cost, alike on all ranks."""

from __future__ import annotations

import pytest

from ds_hetero.runtime.data.probe_pace import ProbePace, ProbeTimes


class _Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def _run(every: int | str, probe_s: float, step_s: float, steps: int, other: ProbeTimes | None = None) -> list[int]:
    """The steps at which a probe was due, after one at the first step."""
    clock = _Clock()
    pace, due = ProbePace(every, clock), []

    def probe() -> None:
        with pace.timing():
            clock.now += probe_s

    probe()
    for step in range(steps):
        pace.begin_step()
        if pace.is_due([pace.times] if other is None else [pace.times, other]):
            due.append(step)
            probe()
        clock.now += step_s * (50 if step == 7 else 1)  # an evaluation, once
    return due


def test_probes_by_cost_take_under_one_percent_of_the_steps() -> None:
    due = _run("by_cost", 0.5, 0.25, 1000)
    assert due == [200, 400, 600, 800]
    assert len(due) * 0.5 <= 0.01 * 1000 * 0.25


def test_the_dearest_probe_and_the_shortest_step_of_all_ranks_count() -> None:
    assert _run("by_cost", 0.5, 0.25, 900, ProbeTimes(1.0, 0.25)) == [400, 800]
    assert _run("by_cost", 0.5, 0.25, 900, ProbeTimes(0.1, 0.125)) == [400, 800]


@pytest.mark.parametrize(("every", "due"), [("always", [1, 2, 3, 4, 5]), (2, [2, 4]), ("first_batch", []), ("off", [])])
def test_probes_by_number(every: int | str, due: list[int]) -> None:
    assert _run(every, 0.5, 0.25, 6) == due
