"""Remapping: tokens that one rank attends to and another holds outside attention change ranks before and after it.

Attention of whole documents wants other tokens on a rank than linear layers do. Queries, keys and values move, not
hidden states: what is outside attention, projections included, stays where its tokens are held. A moved token is
2 (H + G) heads in a forward, of which hidden states would be 2 H, and as many in its backward.

Dimension key: B batch, n heads of a tensor, s this rank's tokens before and t after, D head size, H and G all query and
KV heads.
Source: Zeppelin (EuroSys 2026), section 3.4.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from ds_hetero.batch.token_moves import MoveTable, move_table
from ds_hetero.runtime.attention.batch_layout import BatchLayout
from ds_hetero.runtime.peers.watch import waiting_for_peers
from ds_hetero.runtime.replica import Replica
from ds_hetero.runtime.step_clock import ALL_TO_ALL, Clock


def to_attention(
    qkv: Sequence[Tensor], replica: Replica, batch: BatchLayout, clock: Clock
) -> tuple[Tensor, Tensor, Tensor]:
    """Move tokens from the ranks that hold them to the ranks that attend to them.

        qkv     [B, n, s, D] each
        result  [B, n, t, D] each; the same tensors where the placement moves nothing

    Caller: every rank of the replica, once per attention layer.
    Collectives: where tokens move, one all_to_all_single forward, one backward.
    """
    if batch.placement.moves:
        qkv = _MoveTokens.apply(_mover(replica, batch), False, clock, *qkv)  # type: ignore[no-untyped-call]
    q, k, v = qkv
    return q, k, v


def from_attention(out_BtHD: Tensor, replica: Replica, batch: BatchLayout, clock: Clock) -> Tensor:
    """Back to the tokens that this rank holds: [B, t, H, D] to [B, s, H, D]; see `to_attention`."""
    if not batch.placement.moves:
        return out_BtHD
    out_BHtD = out_BtHD.transpose(1, 2)
    (out_BHsD,) = _MoveTokens.apply(_mover(replica, batch), True, clock, out_BHtD)  # type: ignore[no-untyped-call]
    out_BsHD: Tensor = out_BHsD.transpose(1, 2).contiguous()
    return out_BsHD


@dataclass(frozen=True)
class _Mover:
    table: MoveTable
    process_group: ProcessGroup

    def run(self, tensors: Sequence[Tensor], back: bool) -> tuple[Tensor, ...]:
        """Give the last tokens away, and put what others give behind the rest; laid out token-major where some come.

            tensors [B, n, s, D], result [B, n, t, D]

        Collectives: one all_to_all_single.
        Sends: for every token given, B D (sum of n) elements.
        """
        batch_size, _, tokens, head_dim = tensors[0].shape
        heads = [x.shape[1] for x in tensors]
        send_sizes, recv_sizes = self.table.sizes(batch_size * sum(heads) * head_dim, back=back)
        gives, takes = map(sum, self.table.sizes(1, back=back))
        kept = tokens - gives
        send = tensors[0].new_empty(gives, batch_size, sum(heads), head_dim)
        for part, x in zip(send.split_with_sizes(heads, 2), tensors, strict=True):
            part.copy_(x[:, :, kept:].permute(2, 0, 1, 3))
        recv = send.new_empty(takes, batch_size, sum(heads), head_dim)
        with waiting_for_peers("moving tokens to the ranks that attend to them, or back"):
            dist.all_to_all_single(recv.view(-1), send.view(-1), recv_sizes, send_sizes, group=self.process_group)
        if not takes:
            return tuple(x[:, :, :kept] for x in tensors)
        arrived = recv.split_with_sizes(heads, 2)
        return tuple(
            torch.cat([x[:, :, :kept].permute(2, 0, 1, 3), behind]).permute(1, 2, 0, 3)
            for x, behind in zip(tensors, arrived, strict=True)
        )


@lru_cache(maxsize=64)
def _mover(replica: Replica, batch: BatchLayout) -> _Mover:
    return _Mover(move_table(batch.placement, replica.rank), replica.sp_group)


class _MoveTokens(torch.autograd.Function):
    """See `_Mover.run`; the backward is the same the other way."""

    @staticmethod
    def forward(ctx: Any, mover: _Mover, back: bool, clock: Clock, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.mover, ctx.back, ctx.clock = mover, back, clock
        with clock.phase(ALL_TO_ALL, "move_tokens"):
            return mover.run(tensors, back)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        with ctx.clock.phase(ALL_TO_ALL, "move_gradients"):
            return None, None, None, *ctx.mover.run(grads, not ctx.back)
