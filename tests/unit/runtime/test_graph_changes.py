"""Graphs of losses that are made of other operations call for a comparison. Budget: 2 s."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ds_hetero.runtime.step_checks import GraphChanges

WEIGHT = torch.ones(4, requires_grad=True)


class Doubled(torch.autograd.Function):
    """Identity of its own."""

    @staticmethod
    def forward(ctx: object, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: object, gradient: Tensor) -> Tensor:  # type: ignore[override]
        return 2 * gradient


def plain(layers: int = 3) -> Tensor:
    x = WEIGHT * 1
    for _ in range(layers):
        x = torch.tanh(x)
    return x.sum()


def _steps(losses: Sequence[Callable[[], Tensor]], others: float = 0.0) -> list[bool]:
    """Whether a comparison is called for after each step; ``others``: what another rank says."""
    check, called = GraphChanges(), []
    for loss in losses:
        check.note_forward()
        check.note_backward(loss())
        assert check.verdict([check.numbers(), [others]]) is None
        called.append(check.take_change())
        assert not check.take_change()
    return called


def test_equal_steps_call_for_nothing() -> None:
    assert _steps([plain] * 5) == [False] * 5


def test_another_number_of_operations_calls_once() -> None:
    assert _steps([plain, plain, lambda: plain(4), lambda: plain(4), plain]) == [False, False, True, False, False]


def test_a_new_kind_calls_where_sizes_vary() -> None:
    varying: list[Callable[[], Tensor]] = [lambda n=n: plain(n) for n in range(1, 12)]  # type: ignore[misc]
    called = _steps([*varying, lambda: Doubled.apply(plain(20))])
    assert called == [False, True, True, True, *[False] * 7, True]


def test_what_another_rank_has_seen_counts() -> None:
    assert _steps([plain] * 2, others=1.0) == [True, True]


def test_micro_batches_of_the_first_step_are_known() -> None:
    check = GraphChanges()
    for layers in (1, 2, 3):
        check.note_forward()
        check.note_backward(plain(layers))
    assert list(check.numbers()) == [0.0]
    check.note_forward()
    check.note_forward()  # two forwards whose losses are added up
    check.note_backward(plain(1) + plain(2))
    assert list(check.numbers()) == [1.0]


def test_a_comparison_between_two_forwards_of_a_backward_is_left_out() -> None:
    check = GraphChanges()
    for step in range(4):
        check.note_forward()
        first = plain(1)
        if step == 2:
            with torch.no_grad(), check.leaving_out(), torch.enable_grad():
                plain(9).backward()
        check.note_forward()
        check.note_backward(first + plain(2))
        with check.leaving_out():  # between two steps
            plain(3).backward()
        assert list(check.numbers()) == [0.0], step


def test_another_schedule_begins_again() -> None:
    check = GraphChanges()
    for layers in (1, 5):
        check.restart()
        check.note_forward()
        check.note_backward(plain(layers))
        assert list(check.numbers()) == [0.0]
