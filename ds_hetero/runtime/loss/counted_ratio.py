"""A term of a loss that is a sum divided by a count; its autograd node has the count as an attribute.

`ds_hetero.runtime.data.loss_reductions` reads the count from the node, and `ds_hetero.runtime.data.loss_weights` weighs
the term by the count: one process would divide the sum over all ranks by the sum of all counts.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable


def ratio(total: Tensor, count: Tensor | float) -> Tensor:
    """Return ``total / count``, or zero if ``count`` is zero.

    If ranks take different batches, the engine weighs the term by the ranks' counts.

    Args:
        total: a sum over this rank's samples.
        count: divisor on this rank. One process would divide the sum over all ranks by the sum of the ranks' counts.
    """
    value: Tensor = _Ratio.apply(total, torch.as_tensor(count, device=total.device))  # type: ignore[no-untyped-call]
    return value


class _Ratio(torch.autograd.Function):
    """Divides ``total`` by ``count``, and keeps the count in the attribute ``unit`` of its node."""

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
