"""Attention over a sequence that is split unevenly: uneven all-to-all, sub-rings, uneven all-to-all back.

Each phase is an autograd function of its own, so that the backward frees the tensors that a phase has saved before the
next phase begins. Saved are the exchanged q, k, v, the output, its log-sum-exp and one remote KV block.

Dimension key: B batch, s this rank's tokens, H query heads, G KV heads, D head size; S and h, g after the exchange.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain, islice
from typing import Any

import torch
from torch import Tensor

from ds_hetero.errors import BatchError
from ds_hetero.runtime.attention.batch_layout import BatchLayout
from ds_hetero.runtime.attention.head_exchange import (
    Exchange,
    gather_output_heads,
    gather_sequence,
    make_exchange,
    packed_gradients,
    scatter_output,
    scatter_sequence,
)
from ds_hetero.runtime.attention.kept_results import keep_or_compute
from ds_hetero.runtime.attention.kernels import AttentionKernel, SavedForward, Scores
from ds_hetero.runtime.attention.lane_passes import RingContext
from ds_hetero.runtime.attention.moves import from_attention, to_attention
from ds_hetero.runtime.attention.ring import ring_backward, ring_forward
from ds_hetero.runtime.attention.wide_copy import contiguous_rows
from ds_hetero.runtime.replica import Replica
from ds_hetero.runtime.step_clock import ALL_TO_ALL, UNTIMED, Clock
from ds_hetero.values.section import RingGradients


@dataclass(frozen=True, slots=True, eq=False)
class AttentionSpec:
    """The attention of a layer: its mask, its scale, and its kernel.

    Attributes:
        kernel: computes the blocks; see `ds_hetero.runtime.attention.kernels.select`.
        causal: a query sees no later key.
        window: with ``causal``, the number of keys that a query sees: its own and the ``window - 1`` before it.
        scale: of the scores; D ** -0.5 if left out.
        softcap: scores s become softcap * tanh(s / softcap) (Gemma 2).
        sinks: [H], a logit per head that takes part in the softmax and has no value (gpt-oss).
        ring_gradients: key ``"ring_gradients"``: type in which partial dK/dV travel between the groups of a ring.
    """

    kernel: AttentionKernel
    causal: bool = True
    window: int | None = None
    scale: float | None = None
    softcap: float | None = None
    sinks: Tensor | None = None
    ring_gradients: RingGradients = "fp32"

    def scores(self, head_dim: int) -> Scores:
        """Return scale and soft cap of the scores for heads of this size."""
        return Scores(head_dim**-0.5 if self.scale is None else self.scale, self.softcap)


def attention(
    q: Tensor, k: Tensor, v: Tensor, replica: Replica, batch: BatchLayout, spec: AttentionSpec, clock: Clock = UNTIMED
) -> Tensor:
    """Compute the attention of this rank's tokens to the whole sequence.

        q [B, H, s, D], k and v [B, G, s, D]: this rank's tokens, every head
        result [B, s, H, D]; zero for padding

    Args:
        batch: from `agree_on_batch`.
        clock: times every phase, forward and backward.

    Caller: every rank of the replica, once per attention layer.
    Collectives: forward two all_to_all_single, and at least K - 1 rounds of point-to-point messages in every lane of K
        units, see `ds_hetero.batch.routes`; the same again backward. Two more all_to_all_single in forward and backward
        if the placement moves tokens.

    Raises:
        BatchError: q, k, v have other shapes.
    """
    _check_shapes(q, k, v, replica, batch)
    q, k, v = to_attention((q, k, v), replica, batch, clock)
    out, begin = [], 0
    for part_replica, part in batch.parts(replica):
        end = begin + part.placement.tokens(replica.rank)
        q_part, k_part, v_part = q, k, v
        if q.shape[2] != end - begin:
            q_part, k_part, v_part = (x[:, :, begin:end] for x in (q, k, v))
        out.append(_attention_of_part(q_part, k_part, v_part, part_replica, part, spec, clock))
        begin = end
    return from_attention(out[0] if len(out) == 1 else torch.cat(out, dim=1), replica, batch, clock)


def _attention_of_part(
    q: Tensor, k: Tensor, v: Tensor, replica: Replica, batch: BatchLayout, spec: AttentionSpec, clock: Clock
) -> Tensor:
    """Compute the attention of the tokens of one part of the placement; see `attention`."""
    window = None if spec.window is not None and spec.window >= batch.placement.length else spec.window
    exchange = _exchange(replica, batch)
    rings = batch.rings(replica.rank, spec.causal, window)
    context = RingContext(
        rings,
        replica.ring_groups,
        spec.kernel,
        spec.scores(q.shape[-1]),
        clock,
        gradient_dtype=torch.bfloat16 if spec.ring_gradients == "bf16" else None,
    )
    if exchange.process_group is not None:
        q, k, v = _ExchangeHeads.apply(gather_sequence, scatter_sequence, exchange, clock, q, k, v)  # type: ignore[no-untyped-call]
    out_SBhD: Tensor = _GroupAttention.apply(q, k, v, spec.sinks, exchange, context)  # type: ignore[no-untyped-call]
    if exchange.process_group is None:
        return out_SBhD.transpose(0, 1).contiguous()
    out: Tensor = _ExchangeHeads.apply(scatter_output, gather_output_heads, exchange, clock, out_SBhD)  # type: ignore[no-untyped-call]
    return out


def _check_shapes(q: Tensor, k: Tensor, v: Tensor, replica: Replica, batch: BatchLayout) -> None:
    tokens, schedule = batch.placement.tokens(replica.rank), replica.schedule
    expected = (batch.batch_size, schedule.num_heads, tokens), (batch.batch_size, schedule.num_kv_heads, tokens)
    if (q.shape[:3], k.shape[:3]) != expected or v.shape != k.shape or q.shape[3] != k.shape[3]:
        raise BatchError(
            f"rank {replica.rank} expects q [B, H, s, D] and k, v [B, G, s, D] of {expected[0]} and {expected[1]}, "
            f"got q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}."
        )


@lru_cache(maxsize=64)
def _exchange(replica: Replica, batch: BatchLayout) -> Exchange:
    return make_exchange(replica, batch.placement)


class _ExchangeHeads(torch.autograd.Function):
    """Runs one function of `head_exchange` in the forward, and its mirror in the backward."""

    @staticmethod
    def forward(
        ctx: Any,
        run: Callable[..., Any],
        mirror: Callable[..., Any],
        exchange: Exchange,
        clock: Clock,
        *tensors: Tensor,
    ) -> Any:
        ctx.mirror, ctx.exchange, ctx.clock = mirror, exchange, clock

        def exchanged() -> tuple[Tensor, ...]:
            with clock.phase(ALL_TO_ALL, run.__name__):
                return _as_tuple(run(*tensors, exchange))

        results = keep_or_compute(run.__name__, tensors, exchanged)
        return results[0] if len(results) == 1 else tuple(results)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        with ctx.clock.phase(ALL_TO_ALL, ctx.mirror.__name__):
            result = ctx.mirror(*grads, ctx.exchange)
        return None, None, None, None, *_as_tuple(result)


def _as_tuple(result: Tensor | tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return (result,) if isinstance(result, Tensor) else result


class _GroupAttention(torch.autograd.Function):
    """Attention of the group's tokens, for this rank's heads: [B, h, S, D] in, [S, B, h, D] out."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, sinks_H: Tensor | None, exchange: Exchange, context: RingContext
    ) -> Tensor:
        def computed() -> list[Tensor]:
            out, lse, remote_blocks = ring_forward(q, k, v, context)
            if sinks_H is not None:
                out, lse = _with_sinks(out, lse, sinks_H[_local_heads(exchange)])
            # One flat list, since `save_for_backward` takes tensors only.
            return [contiguous_rows(out.permute(2, 0, 1, 3)), lse, *chain.from_iterable(remote_blocks)]

        out_SBhD, lse, *remote_blocks = keep_or_compute("ring attention", (q, k, v), computed)
        ctx.exchange, ctx.context = exchange, context
        ctx.save_for_backward(q, k, v, sinks_H, out_SBhD, lse, *remote_blocks)
        return out_SBhD

    @staticmethod
    def backward(ctx: Any, dout_SBhD: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, sinks_H, out_SBhD, lse, *remote_blocks = ctx.saved_tensors
        dout, out = (x.permute(1, 2, 0, 3) for x in (dout_SBhD, out_SBhD))
        dsinks_H = None
        if sinks_H is not None:
            dsinks_H = torch.zeros_like(sinks_H)
            local_heads = _local_heads(ctx.exchange)
            dsinks_H[local_heads] = _sinks_gradient(dout, out, lse, sinks_H[local_heads])
        flat_blocks = iter(remote_blocks)
        remote_blocks_by_lane = [list(islice(flat_blocks, ring.num_kept_blocks)) for ring in ctx.context.rings]
        grads = ring_backward(dout, SavedForward(q, k, v, out, lse), remote_blocks_by_lane, ctx.context)
        dq, dk, dv = packed_gradients(*grads, ctx.exchange, q.dtype)
        return dq, dk, dv, dsinks_H, None, None


def _local_heads(exchange: Exchange) -> slice:
    """Return the query heads of this rank."""
    return slice(*exchange.this_member.q)


def _with_sinks(out: Tensor, lse: Tensor, sinks_h: Tensor) -> tuple[Tensor, Tensor]:
    """Add the sinks to the softmax: returns a smaller out [B, h, S, D], and a larger lse [B, h, S]."""
    sinks_h1 = sinks_h.to(lse.dtype)[:, None]
    out = (out * torch.sigmoid(lse - sinks_h1).unsqueeze(-1)).to(out.dtype)
    return out, torch.logaddexp(lse, sinks_h1)


def _sinks_gradient(dout: Tensor, out: Tensor, lse: Tensor, sinks_h: Tensor) -> Tensor:
    """Return the gradient of the sinks [h], from out and lse with sinks.

    A sink is a key whose value is zero, so its dP is zero, and dS = -P rowsum(dout * out).
    """
    probs = torch.exp(sinks_h.to(lse.dtype)[:, None] - lse)
    delta = (dout.to(lse.dtype) * out).sum(-1)
    return -(probs * delta).sum((0, 2)).to(sinks_h.dtype)
