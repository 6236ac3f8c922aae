"""Share the residual stream of tensor-parallel ranks: between their parallel regions each keeps a part of the tokens.

Attention and MLP are regions: a rank computes all tokens there, with its heads and columns. Norms and residuals lie
between regions, and so does what recomputation saves. There each of n ranks has 1 / n of the tokens. The all-reduce at
the end of a region becomes a reduce-scatter, and an all-gather begins the next one, which together send as much:

    rank's part [b, c, H]  --all-gather-->  all tokens [b, L, H]  --region-->  summands [b, L, H]  --reduce-scatter-->

The parts are equally long, and follow one another. If n does not divide L, the last ones are padded with zeros.

Dimension key: b rows, L tokens, n ranks, c tokens of a part, H hidden size.
Source: "sequence parallelism" of Megatron-LM (arXiv:2205.05198, section 4.2.2).
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from ds_hetero.common.rounding import ceil_div

# torch 2.13 has given both functions other names.
_ALL_GATHER = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_REDUCE_SCATTER = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def part_of_copies(x_bLH: Tensor, group: ProcessGroup) -> Tensor:
    """Return this rank's part [b, c, H] of a tensor that is the same on all ranks of the group.

    Collectives: none forward; one all-gather backward, so that all ranks have the whole gradient.
    """
    part: Tensor = _PartOfCopies.apply(x_bLH, group)  # type: ignore[no-untyped-call]
    return part


def copies_of_parts(part_bcH: Tensor, tokens: int, group: ProcessGroup) -> Tensor:
    """Return all ``tokens`` [b, L, H] on every rank; the gradient of the result must be the same on all ranks.

    Collectives: one all-gather forward, none backward.
    """
    copies: Tensor = _CopiesOfParts.apply(part_bcH, tokens, group)  # type: ignore[no-untyped-call]
    return copies


def enter_region(part_bcH: Tensor, tokens: int, group: ProcessGroup) -> Tensor:
    """Return all ``tokens`` [b, L, H] on every rank, each of which computes a summand of their gradient.

    Collectives: one all-gather forward, one reduce-scatter backward.
    """
    copies: Tensor = _EnterRegion.apply(part_bcH, tokens, group)  # type: ignore[no-untyped-call]
    return copies


def leave_region(summand_bLH: Tensor, group: ProcessGroup) -> Tensor:
    """Sum over the ranks, and return this rank's part [b, c, H] of the sum.

    Collectives: one reduce-scatter forward, one all-gather backward.
    """
    part: Tensor = _LeaveRegion.apply(summand_bLH, group)  # type: ignore[no-untyped-call]
    return part


class _PartOfCopies(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: ProcessGroup) -> Tensor:
        ctx.tokens, ctx.group = x.shape[1], group
        return _parts(x, dist.get_world_size(group))[dist.get_rank(group)].clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gather_parts(gradient, ctx.tokens, ctx.group), None


class _CopiesOfParts(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, part: Tensor, tokens: int, group: ProcessGroup) -> Tensor:
        ctx.group = group
        return gather_parts(part, tokens, group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return _parts(gradient, dist.get_world_size(ctx.group))[dist.get_rank(ctx.group)].clone(), None, None


class _EnterRegion(_CopiesOfParts):
    # The forward is the same. But here the ranks' gradients are summands, and not equal.
    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return _sum_to_parts(gradient, ctx.group), None, None


class _LeaveRegion(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, summand: Tensor, group: ProcessGroup) -> Tensor:
        ctx.tokens, ctx.group = summand.shape[1], group
        return _sum_to_parts(summand, group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gather_parts(gradient, ctx.tokens, ctx.group), None


def _parts(x: Tensor, num_parts: int) -> Tensor:
    """Cut [b, L, H] into parts along L, padded with zeros, and return them as [n, b, c, H], contiguous."""
    rows, tokens, width = x.shape
    padding = ceil_div(tokens, num_parts) * num_parts - tokens
    if padding:
        x = nn.functional.pad(x, (0, 0, 0, padding))
    return x.view(rows, num_parts, -1, width).transpose(0, 1).contiguous()


def gather_parts(part: Tensor, tokens: int, group: ProcessGroup) -> Tensor:
    """All-gather parts [b, c, H], which follow one another, to [b, ``tokens``, H].

    Collectives: one all-gather, outside of autograd.
    """
    num_parts = dist.get_world_size(group)
    gathered = part.new_empty(num_parts * part.shape[0], *part.shape[1:])
    _ALL_GATHER(gathered, part.contiguous(), group=group)
    parts_bncH = gathered.view(num_parts, *part.shape).transpose(0, 1)
    # The last parts may be padded.
    return parts_bncH.flatten(1, 2)[:, :tokens].contiguous()


def _sum_to_parts(summand: Tensor, group: ProcessGroup) -> Tensor:
    """Sum [b, L, H] over the ranks; return this rank's part [b, c, H] of the sum."""
    parts = _parts(summand, dist.get_world_size(group))
    part = torch.empty_like(parts[0])
    _REDUCE_SCATTER(part, parts.flatten(0, 1), group=group)
    return part
