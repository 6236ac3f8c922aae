"""Gather the results of all tokens of a batch from the ranks of a replica: the inverse of cutting a batch.

Every rank then computes the same values from the same full tensor. So each rank has the gradient of the full tensor,
and the gradient of its shard is the part of its own tokens.

A script computes one loss per replica from such results, the same on every rank. By the convention ``"replica_mean"``
of `ds_hetero.runtime.loss` this part is multiplied by the number of ranks of the replica, as in the backward of a
differentiable all_gather, which adds up over the ranks.

Dimension key: B batch, L tokens of the sequence, s tokens of this rank.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from ds_hetero.runtime.peers.watch import waiting_for_peers
from ds_hetero.runtime.replica import Replica
from ds_hetero.values.placement import Placement


def gather_tokens(shard: Tensor, placement: Placement, replica: Replica) -> Tensor:
    """All-gather results of tokens along the sequence, so that every rank has the results of the full batch.

        shard    [B, s, ...]; [B, 1, ...] on a rank without tokens, whose column is left out
        result   [B, L, ...], the same on every rank

    Caller: every rank of the replica.
    Collectives: one all_gather of [B, max s, ...] forward, none backward. The gradient of ``shard`` is its part of the
    result's, times the ranks of the replica.
    """
    if shard.dtype == torch.bool:  # which no backend sends
        return gather_tokens(shard.to(torch.uint8), placement, replica).to(torch.bool)
    gathered: Tensor = _GatherTokens.apply(shard, placement, replica)  # type: ignore[no-untyped-call]
    return gathered


class _GatherTokens(torch.autograd.Function):
    """The autograd function of `gather_tokens`."""

    @staticmethod
    def forward(ctx: Any, shard: Tensor, placement: Placement, replica: Replica) -> Tensor:
        ctx.placement, ctx.replica, ctx.columns = placement, replica, shard.shape[1]
        num_tokens, max_tokens = placement.tokens(replica.rank), max(placement.rank_tokens)
        # Padded, since all_gather needs one size.
        padded = shard.new_zeros(shard.shape[0], max_tokens, *shard.shape[2:])
        padded[:, :num_tokens] = shard[:, :num_tokens]
        parts = [torch.empty_like(padded) for _ in replica.ranks]
        with waiting_for_peers("putting results of all ranks together"):
            dist.all_gather(parts, padded, group=replica.sp_group)
        gathered = shard.new_empty(shard.shape[0], placement.length, *shard.shape[2:])
        for rank, part in zip(replica.ranks, parts, strict=True):
            next_token = 0
            for start, stop in placement.intervals(rank):
                gathered[:, start:stop] = part[:, next_token : next_token + stop - start]
                next_token += stop - start
        return gathered

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        replica: Replica = ctx.replica
        parts = [grad[:, start:stop] for start, stop in ctx.placement.intervals(replica.rank)]
        missing = ctx.columns - sum(part.shape[1] for part in parts)  # the column of a rank without tokens
        if missing:
            parts.append(grad.new_zeros(grad.shape[0], missing, *grad.shape[2:]))
        return torch.cat(parts, dim=1) * replica.sp_size, None, None
