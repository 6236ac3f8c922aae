"""Remapping: before attention, move tokens to the ranks that attend to them; after it, move them back.

The best placement of documents for attention differs from the best one for linear layers. Queries, keys and values
move, not hidden states: everything outside attention, projections included, is computed where the tokens are stored. A
moved token costs 2 (H + G) heads in a forward, where hidden states would cost 2 H, and the same in its backward.

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
from ds_hetero.runtime.attention.kept_results import keep_or_compute
from ds_hetero.runtime.attention.wide_copy import copy_rows_
from ds_hetero.runtime.peers.watch import waiting_for_peers
from ds_hetero.runtime.replica import Replica
from ds_hetero.runtime.step_clock import ALL_TO_ALL, Clock


def to_attention(
    qkv: Sequence[Tensor], replica: Replica, batch: BatchLayout, clock: Clock
) -> tuple[Tensor, Tensor, Tensor]:
    """Move tokens of q, k and v from the ranks that store them to the ranks that attend to them.

        qkv     [B, n, s, D] each
        result  [B, n, t, D] each; the same tensors if the placement moves nothing

    Caller: every rank of the replica, once per attention layer.
    Collectives: if tokens move, one all_to_all_single forward, one backward.
    """
    if batch.placement.moves:
        qkv = _MoveTokens.apply(_mover(replica, batch), False, clock, *qkv)  # type: ignore[no-untyped-call]
    q, k, v = qkv
    return q, k, v


def from_attention(out_BtHD: Tensor, replica: Replica, batch: BatchLayout, clock: Clock) -> Tensor:
    """Move outputs [B, t, H, D] back to the ranks that store the tokens, [B, s, H, D]; see `to_attention`."""
    if not batch.placement.moves:
        return out_BtHD
    out_BHtD = out_BtHD.transpose(1, 2)
    (out_BHsD,) = _MoveTokens.apply(_mover(replica, batch), True, clock, out_BHtD)  # type: ignore[no-untyped-call]
    out_BsHD: Tensor = out_BHsD.transpose(1, 2).contiguous()
    return out_BsHD


@dataclass(frozen=True)
class _Mover:
    """Moves the tokens of one placement between this rank and the others."""

    table: MoveTable
    process_group: ProcessGroup

    def run(self, tensors: Sequence[Tensor], back: bool) -> tuple[Tensor, ...]:
        """Send the last tokens of every tensor to other ranks, and append the tokens that other ranks send.

            tensors [B, n, s, D], result [B, n, t, D]; token-major in memory if tokens arrive

        Args:
            back: move tokens from the ranks that attend to them to the ranks that store them.

        Collectives: one all_to_all_single.
        Sends: B D (sum of n) elements for every token that leaves.
        """
        batch_size, _, tokens, head_dim = tensors[0].shape
        heads = [x.shape[1] for x in tensors]
        send_sizes, recv_sizes = self.table.sizes(batch_size * sum(heads) * head_dim, back=back)
        num_sent, num_received = map(sum, self.table.sizes(1, back=back))
        num_kept = tokens - num_sent
        send = tensors[0].new_empty(num_sent, batch_size, sum(heads), head_dim)
        for part, x in zip(send.split_with_sizes(heads, 2), tensors, strict=True):
            copy_rows_(part, x[:, :, num_kept:].permute(2, 0, 1, 3))
        recv = send.new_empty(num_received, batch_size, sum(heads), head_dim)
        with waiting_for_peers("moving tokens to the ranks that attend to them, or back"):
            dist.all_to_all_single(recv.view(-1), send.view(-1), recv_sizes, send_sizes, group=self.process_group)
        if not num_received:
            return tuple(x[:, :, :num_kept] for x in tensors)
        results = []
        for x, received in zip(tensors, recv.split_with_sizes(heads, 2), strict=True):
            staying = x[:, :, :num_kept].permute(2, 0, 1, 3)
            results.append(torch.cat([staying, received]).permute(1, 2, 0, 3))
        return tuple(results)


@lru_cache(maxsize=64)
def _mover(replica: Replica, batch: BatchLayout) -> _Mover:
    return _Mover(move_table(batch.placement, replica.rank), replica.sp_group)


class _MoveTokens(torch.autograd.Function):
    """`_Mover.run` with its gradient: the backward moves gradients the other way."""

    @staticmethod
    def forward(ctx: Any, mover: _Mover, back: bool, clock: Clock, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.mover, ctx.back, ctx.clock = mover, back, clock

        def moved() -> tuple[Tensor, ...]:
            with clock.phase(ALL_TO_ALL, "move_tokens"):
                return mover.run(tensors, back)

        return tuple(keep_or_compute("move_tokens", tensors, moved))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        with ctx.clock.phase(ALL_TO_ALL, "move_gradients"):
            return None, None, None, *ctx.mover.run(grads, not ctx.back)
