"""Results of the tokens of a batch, put together from all ranks of a replica: the other way than cutting.

What follows is computed on every rank from the same whole tensor. Each rank's gradient is then the whole one, and its
own tokens' part of it is all that its backward needs. A script computes one loss per replica from such results, the
same on every rank: by the convention ``"replica_mean"`` of `ds_hetero.runtime.loss` the part is times the ranks of the
replica, as it is behind a differentiable all_gather whose backward adds up over them.

Dimension key: B batch, L tokens of the sequence, s tokens of this rank.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from ds_hetero.runtime.peers.waiting import waiting_for_peers
from ds_hetero.runtime.replica import Replica
from ds_hetero.values.placement import Placement


def gather_tokens(shard: Tensor, placement: Placement, replica: Replica) -> Tensor:
    """Give every rank the results of all tokens.

        shard    [B, s, ...]; [B, 1, ...] on a rank without tokens, which is left out
        result   [B, L, ...], the same on every rank

    Args:
        shard: of this rank's tokens, in their order.
        placement: of the batch.
        replica: this rank's replica.

    Caller: every rank of the replica.
    Collectives: one all_gather of [B, max s, ...] forward, none backward. The gradient of ``shard`` is its part of the
    result's, times the ranks of the replica.
    """
    if shard.dtype == torch.bool:  # which no backend sends
        return gather_tokens(shard.to(torch.uint8), placement, replica).to(torch.bool)
    whole: Tensor = _GatherTokens.apply(shard, placement, replica)  # type: ignore[no-untyped-call]
    return whole


class _GatherTokens(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, shard: Tensor, placement: Placement, replica: Replica) -> Tensor:
        ctx.placement, ctx.replica, ctx.columns = placement, replica, shard.shape[1]
        own, widest = placement.tokens(replica.rank), max(placement.rank_tokens)
        sent = shard.new_zeros(shard.shape[0], widest, *shard.shape[2:])
        sent[:, :own] = shard[:, :own]
        parts = [torch.empty_like(sent) for _ in replica.ranks]
        with waiting_for_peers("putting results of all ranks together"):
            dist.all_gather(parts, sent, group=replica.sp_group)
        whole = shard.new_empty(shard.shape[0], placement.length, *shard.shape[2:])
        for rank, part in zip(replica.ranks, parts, strict=True):
            at = 0
            for start, stop in placement.intervals(rank):
                whole[:, start:stop] = part[:, at : at + stop - start]
                at += stop - start
        return whole

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        replica: Replica = ctx.replica
        own = [grad[:, start:stop] for start, stop in ctx.placement.intervals(replica.rank)]
        missing = ctx.columns - sum(part.shape[1] for part in own)
        if missing:
            own.append(grad.new_zeros(grad.shape[0], missing, *grad.shape[2:]))
        return torch.cat(own, dim=1) * replica.sp_size, None, None
