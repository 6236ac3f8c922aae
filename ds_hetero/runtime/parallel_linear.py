"""ColumnParallel and RowParallel linear layers, for ranks that hold copies of the tokens.

    columns   each rank computes its part of the output. The gradient of the input on a rank is a summand; one
              all-reduce sums it for all layers with the same input: q, k and v, or both matrices into a gated MLP
    rows      each rank takes its part of the input and computes a summand of the output, which an all-reduce sums

Inside a region of `ds_hetero.runtime.shared_tokens`, the ends of the region sum both, and the layers send nothing.

Dimension key: b rows, L tokens, I inputs and O outputs of the whole layer, i and o of this rank's part.
Source: Megatron-LM (arXiv:1909.08053, section 3), here with parts of unequal size.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup


class Linears(Protocol):
    """Runs the sharded linear layers of a model, one after the other."""

    @property
    def is_inside(self) -> bool:
        """Whether activations are sharded: a layer of columns has run, and none of rows after it."""

    def leave(self) -> None:
        """Reset the state of `is_inside`."""

    def columns(self, compute: Callable[[Tensor], Tensor], x_bLI: Tensor) -> Tensor:
        """Compute this rank's part of the output of a layer that is sharded by columns."""

    def rows(self, compute: Callable[[Tensor], Tensor], x_bLi: Tensor, bias_O: Tensor | None = None) -> Tensor:
        """Compute the output of a layer that is sharded by rows, or this rank's summand of it."""


class SummandLinears:
    """Runs sharded linear layers inside a region of `ds_hetero.runtime.shared_tokens`, without collectives.

    Args:
        group: of the ranks that share every layer.
    """

    is_inside = True

    def __init__(self, group: ProcessGroup) -> None:
        self._adds_bias = dist.get_rank(group) == 0

    def leave(self) -> None:
        """Do nothing: there is no state."""

    def columns(self, compute: Callable[[Tensor], Tensor], x_bLI: Tensor) -> Tensor:
        """Compute this rank's part [b, L, o] of the output. The gradient of the input is a summand."""
        return compute(x_bLI)

    def rows(self, compute: Callable[[Tensor], Tensor], x_bLi: Tensor, bias_O: Tensor | None = None) -> Tensor:
        """Compute this rank's summand [b, L, O] of the output; the first rank adds the bias."""
        out_bLO = compute(x_bLi)
        return out_bLO + bias_O if bias_O is not None and self._adds_bias else out_bLO


class ParallelLinears:
    """Runs the sharded linear layers of a model, one after the other.

    Args:
        group: of the ranks that share every layer.
    """

    def __init__(self, group: ProcessGroup) -> None:
        self._group = group
        # Input of the latest layer of columns, and the same tensor with a summed gradient.
        self._latest_input: tuple[Tensor, Tensor] | None = None

    @property
    def is_inside(self) -> bool:
        """Whether activations are sharded: a layer of columns has run, and none of rows after it."""
        return self._latest_input is not None

    def leave(self) -> None:
        """Reset the state: a recomputation may have stopped early, between columns and rows."""
        self._latest_input = None

    def columns(self, compute: Callable[[Tensor], Tensor], x_bLI: Tensor) -> Tensor:
        """Compute this rank's part of the output of a layer that is sharded by columns.

            x_bLI   [b, L, I], the same on every rank
            result  [b, L, o]

        Args:
            compute: the layer with this rank's columns.

        Caller: every rank of the group, in the same order of layers.
        Collectives: none forward; one all_reduce backward for all layers in a row that take the same tensor.
        """
        if self._latest_input is None or self._latest_input[0] is not x_bLI:
            self._latest_input = x_bLI, with_summed_gradient(x_bLI, self._group)
        return compute(self._latest_input[1])

    def rows(self, compute: Callable[[Tensor], Tensor], x_bLi: Tensor, bias_O: Tensor | None = None) -> Tensor:
        """Compute the output of a layer that is sharded by rows.

            x_bLi   [b, L, i], of this rank
            bias_O  [O], the same on every rank
            result  [b, L, O], the same on every rank

        Args:
            compute: the layer with this rank's rows, without its bias.

        Caller: every rank of the group, in the same order of layers; the gradient of the result is the same on all.
        Collectives: one all_reduce forward, none backward.
        """
        self._latest_input = None  # the layers that follow take another tensor, so this one can be freed
        out_bLO = sum_over_ranks(compute(x_bLi), self._group)
        return out_bLO if bias_O is None else out_bLO + bias_O


def with_summed_gradient(x: Tensor, group: ProcessGroup) -> Tensor:
    """Return the same tensor; its gradient on a rank is a summand, which the backward sums over the ranks.

    Collectives: none forward, one all_reduce backward.
    """

    def sum_gradient(summand: Tensor) -> Tensor:
        total = summand.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total, group=group)
        return total

    result = x.view_as(x)
    if result.requires_grad:
        result.register_hook(sum_gradient)  # type: ignore[no-untyped-call]
    return result


def sum_over_ranks(x: Tensor, group: ProcessGroup) -> Tensor:
    """Sum x over the ranks, in place; the gradient of the result must be the same on all ranks.

    Collectives: one all_reduce forward, none backward.
    """
    total: Tensor = _Sum.apply(x, group)  # type: ignore[no-untyped-call]
    return total


class _Sum(torch.autograd.Function):
    """Autograd function of `sum_over_ranks`: sums in the forward, returns the gradient unchanged in the backward."""

    @staticmethod
    def forward(ctx: torch.autograd.function.FunctionCtx, x: Tensor, group: ProcessGroup) -> Tensor:
        ctx.mark_dirty(x)
        dist.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None
