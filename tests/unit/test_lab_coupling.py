"""Rows of `benchmarks.lab coupling`: fitted steps, the recurrence beside them, and the share of the loss that goes."""

from __future__ import annotations

import pytest

from benchmarks.lab.coupling import ALONE, BACKWARD, COLOURED, COUPLED, FORWARD, fitted_steps, recurrence_s, summarize

TOKENS = (400, 400, 100, 100)


def steps_of(slope_s: float, fixed_s: float, *, backward: bool) -> list[list[float]]:
    """Seconds of the steps of every rank: 1 s per 100 tokens of the block that it works on."""
    count = len(TOKENS)
    sources = [
        [(rank + 1 + step) % count if backward else (rank - step) % count for step in range(count)]
        for rank in range(count)
    ]
    return [[slope_s * TOKENS[source] + fixed_s for source in of_rank] for of_rank in sources]


@pytest.mark.parametrize("backward", [False, True])
def test_steps_that_are_linear_are_fitted_exactly(backward: bool) -> None:
    slopes, fixed = fitted_steps(TOKENS, steps_of(0.01, 0.25, backward=backward), backward=backward)
    assert slopes == pytest.approx([0.01] * 4) and fixed == pytest.approx([0.25] * 4)
    assert recurrence_s(TOKENS, slopes, fixed, backward=backward, coupled=False) == pytest.approx(10 + 4 * 0.25)
    assert recurrence_s(TOKENS, slopes, fixed, backward=backward, coupled=True) == pytest.approx(
        12 + 3 * 0.25
    )  # a wait takes the place of a step


def test_rows_name_the_loss_and_the_best_order_of_one_communicator() -> None:
    seconds = {ALONE: 10.0, COUPLED: 12.1, COLOURED: 10.1}
    case = {
        "shares": (4, 4, 1, 1),
        "tokens": TOKENS,
        "seconds": {f"{name} {way}": [value] * 3 for name in (FORWARD, BACKWARD) for way, value in seconds.items()},
        "steps": {name: steps_of(0.01, 0.0, backward=name == BACKWARD) for name in (FORWARD, BACKWARD)},
        "foreign_cores": 0.0,
    }
    for row in summarize([case]):
        assert row["coupled_recurrence_s"] == pytest.approx(12) and row["coloured_recurrence_s"] == pytest.approx(10)
        assert row["loss_gone"] == pytest.approx(2.0 / 2.1)
        assert row["best_order"] == [4, 1, 4, 1] and row["best_order_recurrence_s"] == pytest.approx(10)
