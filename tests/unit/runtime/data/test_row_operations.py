"""Operations between a module's outputs and a loss: those that compute each row by itself are let pass."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from ds_hetero.runtime.data.row_operations import mixing_node


class _Watched(TorchDispatchMode):
    """Sees every operator, as profilers and the fake GPU do."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    ("mode", "node"), [(nullcontext(), "CtcLossBackward0"), (_Watched(), "CtcLossBackward1")], ids=["plain", "watched"]
)
def test_ctc_keeps_samples_apart_by_either_of_its_operators(mode: AbstractContextManager[Any], node: str) -> None:
    scores = torch.zeros(4, 5, 3, requires_grad=True)  # [samples, steps, classes]
    outputs = scores * 1
    targets, lengths = torch.ones(4, 2, dtype=torch.int64), torch.full((4,), 5)
    with mode:
        by_step = outputs.log_softmax(2).transpose(0, 1)
        losses = F.ctc_loss(by_step, targets, lengths, torch.full((4,), 2), reduction="none")
        loss = losses.mean()
    assert node in _names(loss.grad_fn)
    assert outputs.grad_fn is not None and loss.grad_fn is not None
    assert mixing_node(loss.grad_fn, {loss.grad_fn}, {outputs.grad_fn}, 4) is None


def _names(node: Any) -> set[str]:
    return {node.name()}.union(*(_names(below) for below, _ in node.next_functions if below is not None))
