"""An offloaded ZeRO-3 that leaves gradients out, as of releases before 0.19, is refused where it does. Budget: 10 s."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from ds_hetero.errors import StepError
from ds_hetero.frameworks.deepspeed.zero.stale_gradients import _GradientTracker

BODY, HEAD = SimpleNamespace(ds_id=0), SimpleNamespace(ds_id=1)
NAMES: dict[int | None, str] = {0: "body.weight", 1: "head.weight"}


def _step(*backwards: tuple[bool, Sequence[Any]], by_method: bool = False) -> None:
    """Run backwards of one step: whether each is of the last micro-batch, and what it reaches.

    Releases before 0.19 say the first by an attribute, later ones ``by_method``.
    """
    optimizer = SimpleNamespace(
        offload_optimizer=True,
        partition_grads=lambda params, shards: None,
        independent_gradient_partition_epilogue=lambda: None,
        _pre_step=lambda: None,
        zero_grad=lambda: None,
    )
    _GradientTracker(optimizer, NAMES)
    for is_last, reached in backwards:
        optimizer.is_gradient_accumulation_boundary = (lambda is_last=is_last: is_last) if by_method else is_last
        optimizer.partition_grads(reached, [])
        optimizer.independent_gradient_partition_epilogue()


@pytest.mark.parametrize("by_method", [False, True])
def test_a_gradient_of_an_earlier_micro_batch_alone_is_named(by_method: bool) -> None:
    with pytest.raises(StepError, match=r"1 parameters, such as head\.weight"):
        _step((False, [BODY, HEAD]), (True, [BODY]), by_method=by_method)


@pytest.mark.parametrize("earlier", [[], [(False, [BODY, HEAD])]])
def test_several_backwards_of_the_last_micro_batch_reach_all_together(earlier: list[tuple[bool, list[Any]]]) -> None:
    """As of two losses: each backward of the last micro-batch gives the optimizer what it reaches."""
    _step(*earlier, (True, [BODY, HEAD]), (True, [BODY]))
