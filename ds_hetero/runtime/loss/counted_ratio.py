"""A term of a loss that is divided by a count: the graph keeps the count, which adds up over ranks.

`ds_hetero.runtime.data.loss_graph` finds it there, and `ds_hetero.runtime.data.loss_weights` weighs the term by it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable


def ratio(total: Tensor, count: Tensor | float) -> Tensor:
    """Return a sum over this rank's samples divided by a number that adds up over ranks; zero where there is nothing.

    Where ranks take different batches, the term is weighed by its counts; see `ds_hetero.runtime.data.loss_weights`.
    """
    value: Tensor = _Ratio.apply(total, torch.as_tensor(count, device=total.device))  # type: ignore[no-untyped-call]
    return value


class _Ratio(torch.autograd.Function):
    """Divides, and keeps the denominator as ``unit``."""

    @staticmethod
    def forward(ctx: Any, total: Tensor, count: Tensor) -> Tensor:
        ctx.unit = count.detach()
        ctx.save_for_backward(count)
        return torch.where(count == 0, 0.0, total / count.masked_fill(count == 0, 1)).to(total.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (count,) = ctx.saved_tensors
        return torch.where(count == 0, 0.0, grad / count.masked_fill(count == 0, 1)).to(grad.dtype), None
