"""Attention over a sequence that is split unevenly: ragged all-to-all, sub-rings, ragged all-to-all back.

Each phase is an autograd function, so that in the backward what a phase kept is gone before the next one starts. Kept
are the exchanged q, k, v, the output, its log-sum-exp and one remote KV block.

Dimension key: B batch, s this rank's tokens, H query heads, G KV heads, D head size; S and h, g after the exchange.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from ds_hetero.errors import BatchError
from ds_hetero.runtime.attention.batch_layout import BatchLayout
from ds_hetero.runtime.attention.head_exchange import (
    Exchange,
    Member,
    gather_output_heads,
    gather_sequence,
    make_exchange,
    scatter_output,
    scatter_sequence,
)
from ds_hetero.runtime.attention.kernels import AttentionKernel
from ds_hetero.runtime.attention.ring import Ring, make_ring, ring_backward, ring_forward
from ds_hetero.runtime.replica import Replica
from ds_hetero.runtime.step_clock import ALL_TO_ALL, UNTIMED, Clock

__all__ = ["attention"]


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    replica: Replica,
    batch: BatchLayout,
    *,
    kernel: AttentionKernel,
    causal: bool = True,
    window: int | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    clock: Clock = UNTIMED,
) -> Tensor:
    """Attention of this rank's tokens to the whole sequence.

        q [B, H, s, D], k and v [B, G, s, D]: this rank's tokens, every head
        sinks [H]: a logit per head that takes part in the softmax and carries no value (gpt-oss)
        result [B, s, H, D]; zero for tokens that are padding

    Args:
        batch: from `agree_on_batch`.
        window: with ``causal``, keys a query sees: itself and the ``window - 1`` before it.
        scale: of the scores, D ** -0.5 if left out.
        softcap: scores s become softcap * tanh(s / softcap) (Gemma 2).
        clock: is told of every phase, forward and backward.

    Caller: every rank of the replica, once per attention layer.
    Collectives: forward two all_to_all_single and K - 1 rounds of point-to-point messages; the same again backward.

    Raises:
        BatchError: q, k, v do not have the shapes that schedule and batch give this rank.
    """
    tokens, schedule = batch.tokens[replica.rank], replica.schedule
    expected = (batch.batch_size, schedule.num_heads, tokens), (batch.batch_size, schedule.num_kv_heads, tokens)
    if (q.shape[:3], k.shape[:3]) != expected or v.shape != k.shape or q.shape[3] != k.shape[3]:
        raise BatchError(
            f"rank {replica.rank} expects q [B, H, s, D] and k, v [B, G, s, D] of {expected[0]} and {expected[1]}, "
            f"got q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}."
        )
    exchange, ring = _plan(replica, batch, causal, window)
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    if exchange.process_group is not None:
        q, k, v = _GatherSequence.apply(q, k, v, exchange, clock)  # type: ignore[no-untyped-call]
    out_SBhD: Tensor = _GroupAttention.apply(  # type: ignore[no-untyped-call]
        q, k, v, sinks, replica, exchange.own, ring, kernel, scale, softcap, clock
    )
    if exchange.process_group is None:
        return out_SBhD.transpose(0, 1).contiguous()
    out: Tensor = _ScatterOutput.apply(out_SBhD, exchange, clock)  # type: ignore[no-untyped-call]
    return out


@lru_cache(maxsize=256)
def _plan(replica: Replica, batch: BatchLayout, causal: bool, window: int | None) -> tuple[Exchange, Ring]:
    if window is not None and window >= batch.length:
        window = None
    return make_exchange(replica, batch.length), make_ring(batch.ring_table(causal, window), replica.rank)


class _GatherSequence(torch.autograd.Function):
    """See `gather_sequence`."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, exchange: Exchange, clock: Clock
    ) -> tuple[Tensor, Tensor, Tensor]:
        ctx.plan = exchange, clock
        with clock.phase(ALL_TO_ALL, "gather_sequence"):
            return gather_sequence(q, k, v, exchange)

    @staticmethod
    def backward(ctx: Any, dq: Tensor, dk: Tensor, dv: Tensor) -> tuple[Tensor | None, ...]:
        exchange, clock = ctx.plan
        with clock.phase(ALL_TO_ALL, "scatter_sequence"):
            return *scatter_sequence(dq, dk, dv, exchange), None, None


class _GroupAttention(torch.autograd.Function):
    """Attention of the group's tokens, for this rank's heads: [B, h, S, D] in, [S, B, h, D] out."""

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        sinks: Tensor | None,
        replica: Replica,
        own: Member,
        ring: Ring,
        kernel: AttentionKernel,
        scale: float,
        softcap: float | None,
        clock: Clock,
    ) -> Tensor:
        out, lse, kept = ring_forward(q, k, v, ring, replica.sp_group, kernel, scale, softcap, clock)
        if sinks is not None:
            mine = sinks[slice(*own.q)].to(lse.dtype)[:, None]
            out = (out * torch.sigmoid(lse - mine).unsqueeze(-1)).to(out.dtype)
            lse = torch.logaddexp(lse, mine)
        out = out.permute(2, 0, 1, 3).contiguous()
        ctx.plan = (replica, own, ring, kernel, scale, softcap, clock)
        ctx.save_for_backward(q, k, v, sinks, out, lse, *kept)
        return out

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        replica, own, ring, kernel, scale, softcap, clock = ctx.plan
        q, k, v, sinks, out, lse, *kept = ctx.saved_tensors
        dout, out = (x.permute(1, 2, 0, 3) for x in (dout, out))
        dsinks = None
        if sinks is not None:
            mine = sinks[slice(*own.q)].to(lse.dtype)[:, None]
            delta = (dout.to(lse.dtype) * out).sum(-1)
            dsinks = torch.zeros_like(sinks)
            dsinks[slice(*own.q)] = -(torch.exp(mine - lse) * delta).sum((0, 2)).to(sinks.dtype)
        grads = ring_backward(dout, q, k, v, out, lse, kept, ring, replica.sp_group, kernel, scale, softcap, clock)
        dq, dk, dv = (x.to(q.dtype) for x in grads)
        return dq, dk, dv, dsinks, None, None, None, None, None, None, None


class _ScatterOutput(torch.autograd.Function):
    """See `scatter_output`."""

    @staticmethod
    def forward(ctx: Any, out_SBhD: Tensor, exchange: Exchange, clock: Clock) -> Tensor:
        ctx.plan = exchange, clock
        with clock.phase(ALL_TO_ALL, "scatter_output"):
            return scatter_output(out_SBhD, exchange)

    @staticmethod
    def backward(ctx: Any, dout_BsHD: Tensor) -> tuple[Tensor, None, None]:
        exchange, clock = ctx.plan
        with clock.phase(ALL_TO_ALL, "gather_output_heads"):
            return gather_output_heads(dout_BsHD, exchange), None, None
