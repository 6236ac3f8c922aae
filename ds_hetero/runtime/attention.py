"""Attention over a sequence that is split unevenly: ragged all-to-all, sub-rings, ragged all-to-all back.

One autograd function holds the three phases, so that their buffers are handed on without copies and nothing but the
exchanged q, k, v, the output, its log-sum-exp and one remote KV block is kept for the backward.

Dimension key: B batch, s this rank's tokens, H query heads, G KV heads, D head size; S and h, g after the exchange.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from ds_hetero.errors import BatchError
from ds_hetero.runtime.all_to_all import (
    Exchange,
    gather_output_heads,
    gather_sequence,
    make_exchange,
    scatter_output,
    scatter_sequence,
)
from ds_hetero.runtime.batch import BatchLayout
from ds_hetero.runtime.kernels import AttentionKernel
from ds_hetero.runtime.replica import Replica
from ds_hetero.runtime.ring import Ring, make_ring, ring_backward, ring_forward

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
    out: Tensor = _UnevenAttention.apply(  # type: ignore[no-untyped-call]
        q, k, v, sinks, replica, exchange, ring, kernel, scale, softcap
    )
    return out


@lru_cache(maxsize=256)
def _plan(replica: Replica, batch: BatchLayout, causal: bool, window: int | None) -> tuple[Exchange, Ring]:
    if window is not None and window >= batch.length:
        window = None
    return make_exchange(replica, batch.length), make_ring(batch.ring_table(causal, window), replica.rank)


class _UnevenAttention(torch.autograd.Function):
    """See `attention`."""

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        sinks: Tensor | None,
        replica: Replica,
        exchange: Exchange,
        ring: Ring,
        kernel: AttentionKernel,
        scale: float,
        softcap: float | None,
    ) -> Tensor:
        if exchange.process_group is not None:
            packed = gather_sequence(q, k, v, exchange)
            saved: tuple[Tensor, ...] = (packed,)
            q, k, v = _unpack(packed, exchange)
        else:
            saved = (q, k, v)
        out, lse, kept = ring_forward(q, k, v, ring, replica.sp_group, kernel, scale, softcap)
        if sinks is not None:
            mine = sinks[slice(*exchange.own.q)].to(lse.dtype)[:, None]
            out = (out * torch.sigmoid(lse - mine).unsqueeze(-1)).to(out.dtype)
            lse = torch.logaddexp(lse, mine)
        out = out.permute(2, 0, 1, 3).contiguous()
        ctx.plan = (replica, exchange, ring, kernel, scale, softcap)
        ctx.num_packed = len(saved)
        ctx.save_for_backward(sinks, out, lse, *saved, *kept)
        return scatter_output(out, exchange)

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        replica, exchange, ring, kernel, scale, softcap = ctx.plan
        sinks, out, lse, *saved = ctx.saved_tensors
        kept, saved = saved[ctx.num_packed :], saved[: ctx.num_packed]
        dout = gather_output_heads(dout, exchange).permute(1, 2, 0, 3)
        out = out.permute(1, 2, 0, 3)
        q, k, v = _unpack(saved[0], exchange) if exchange.process_group is not None else saved
        dsinks = None
        if sinks is not None:
            mine = sinks[slice(*exchange.own.q)].to(lse.dtype)[:, None]
            delta = (dout.to(lse.dtype) * out).sum(-1)
            dsinks = torch.zeros_like(sinks)
            dsinks[slice(*exchange.own.q)] = -(torch.exp(mine - lse) * delta).sum((0, 2)).to(sinks.dtype)
        if call := ring.undivided:
            grads = kernel.backward(dout, q, k, v, out, lse, call.band, scale, softcap)
            packed_grad = None
        else:
            wide = torch.promote_types(q.dtype, torch.float32)
            packed_grad = q.new_zeros(exchange.group_tokens, q.shape[0], exchange.own.width, q.shape[3], dtype=wide)
            grads = _unpack(packed_grad, exchange)
            ring_backward(dout, q, k, v, out, lse, kept, grads, ring, replica.sp_group, kernel, scale, softcap)
        if exchange.process_group is not None:
            if packed_grad is None:
                packed_grad = torch.cat(grads, dim=1).permute(2, 0, 1, 3)
            grads = scatter_sequence(packed_grad.to(q.dtype), exchange)
        dq, dk, dv = (x.to(q.dtype) for x in grads)
        return dq, dk, dv, dsinks, None, None, None, None, None, None


def _unpack(packed_SBWD: Tensor, exchange: Exchange) -> tuple[Tensor, Tensor, Tensor]:
    """Views q [B, h, S, D], k and v [B, g, S, D] of an exchanged buffer."""
    own = exchange.own
    q, k, v = packed_SBWD.permute(1, 2, 0, 3).split_with_sizes([own.num_q, own.num_kv, own.num_kv], dim=1)
    return q, k, v
