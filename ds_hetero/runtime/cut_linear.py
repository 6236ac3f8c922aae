"""Linear layers that are cut over ranks with copies of the tokens, by columns or by rows.

    columns   a rank computes its part of the output. Gradients of the input are summands, which one all-reduce adds up
              for all layers that take the same tensor: q, k and v, or both matrices into a gated MLP
    rows      a rank takes its part of the input and computes a summand of the output, which an all-reduce adds up

Dimension key: b rows, L tokens, I inputs and O outputs of the whole layer, i and o of this rank's part.
Source: Megatron-LM (arXiv:1909.08053, section 3), here with parts of unequal size.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup


class CutLinears:
    """Runs the cut layers of a model, one after the other. ``group``: of the ranks that share every layer."""

    def __init__(self, group: ProcessGroup) -> None:
        self._group = group
        self._taken: tuple[Tensor, Tensor] | None = None  # the last input, and what layers of columns take for it

    @property
    def is_inside(self) -> bool:
        """Whether a layer of columns has run and none of rows after it, so that activations are cut."""
        return self._taken is not None

    def leave(self) -> None:
        """Take activations to be whole: a recomputation that had all it needed may have ended inside."""
        self._taken = None

    def columns(self, compute: Callable[[Tensor], Tensor], x_bLI: Tensor) -> Tensor:
        """Return outputs of this rank's columns.

            x_bLI   [b, L, I], the same on every rank
            result  [b, L, o]

        Args:
            compute: the layer with this rank's columns.

        Caller: every rank of the group, in the same order of layers.
        Collectives: none forward; one all_reduce backward for all layers in a row that take the same tensor.
        """
        if self._taken is None or self._taken[0] is not x_bLI:
            self._taken = x_bLI, with_summed_gradient(x_bLI, self._group)
        return compute(self._taken[1])

    def rows(self, compute: Callable[[Tensor], Tensor], x_bLi: Tensor, bias_O: Tensor | None = None) -> Tensor:
        """Return outputs of all rows.

            x_bLi   [b, L, i], of this rank
            bias_O  [O], the same on every rank
            result  [b, L, O], the same on every rank

        Args:
            compute: the layer with this rank's rows and without its bias.

        Caller: every rank of the group, in the same order of layers; the gradient of the result is the same on all.
        Collectives: one all_reduce forward, none backward.
        """
        self._taken = None  # what follows takes another tensor, and this one need not stay
        out_bLO = sum_over_ranks(compute(x_bLi), self._group)
        return out_bLO if bias_O is None else out_bLO + bias_O


def with_summed_gradient(x: Tensor, group: ProcessGroup) -> Tensor:
    """The same tensor, whose gradient on a rank is a summand. Collectives: none forward, one all_reduce backward."""

    def summed(summand: Tensor) -> Tensor:
        whole = summand.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(whole, group=group)
        return whole

    taken = x.view_as(x)
    if taken.requires_grad:
        taken.register_hook(summed)  # type: ignore[no-untyped-call]
    return taken


def sum_over_ranks(x: Tensor, group: ProcessGroup) -> Tensor:
    """Return the sum, in place; all ranks have the gradient of the result. Collectives: one all_reduce forward."""
    total: Tensor = _Sum.apply(x, group)  # type: ignore[no-untyped-call]
    return total


class _Sum(torch.autograd.Function):
    """See `sum_over_ranks`."""

    @staticmethod
    def forward(ctx: torch.autograd.function.FunctionCtx, x: Tensor, group: ProcessGroup) -> Tensor:
        ctx.mark_dirty(x)
        dist.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None
