"""Sub-ring attention: groups pass KV round a ring, each sub-ring for one contiguous range of heads.

Forward step t attends to the KV of the group t positions back, while the KV of step t + 1 travels. Backward goes the
other way round the ring: the last remote KV of the forward is still in memory, and partial dK/dV travel home while the
local block is computed. There is no barrier: a rank waits for what it receives and, at the end, for what it sent.

Partial results are merged by log-sum-exp in fp32. Partial dK/dV add up in fp32, and travel in fp32 unless the job asks
for bf16 (`RingContext.gradient_dtype`).

Dimension key: B batch, S tokens of this group, h query heads of this rank, g its KV heads, D head size.
Source: Ring Attention (arXiv:2310.01889); sub-rings, HexiSeq (arXiv:2605.07569) section 3.3.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ds_hetero.runtime.attention.channel import Channel
from ds_hetero.runtime.attention.kernels import SavedForward
from ds_hetero.runtime.attention.lane_passes import LaneBackward, LaneForward, RingContext
from ds_hetero.runtime.attention.round_order import Rounds, run_as_ready, run_in_order
from ds_hetero.runtime.step_clock import ATTENTION, RING_WAIT

# FLOPs per pair of query and key and element of a head: QK^T and PV forward; the scores again, dV, dP, dQ and dK
# backward (FlashAttention-2, arXiv:2307.08691, section 3.1.2).
_FORWARD_FLOPS, _BACKWARD_FLOPS = 4, 10


def ring_forward(q: Tensor, k: Tensor, v: Tensor, context: RingContext) -> tuple[Tensor, Tensor, list[list[Tensor]]]:
    """Compute the attention of this group's tokens to the whole sequence, for this rank's heads.

        q [B, h, S, D], k and v [B, g, S, D]; each lane's tokens are consecutive
        out [B, h, S, D], token-major in memory; lse [B, h, S] in fp32 (fp64 for fp64), -inf for a query that sees
        nothing; for each lane, the remote KV block of the last step, for `ring_backward`, which may be empty

    Caller: every rank of the replica, in the forward of `attention`.
    Messages: one KV block per lane, sub-ring and round to the next group that needs it.
    """
    clock = context.clock
    clock.count_attention(_FORWARD_FLOPS * context.pairs * q.shape[-1], backward=False)
    if call := context.undivided:
        with clock.phase(ATTENTION, "attention"):
            out, lse = context.kernel.forward(q, k, v, context.scores, call.band)
        return out, lse, [[]]
    with clock.phase(ATTENTION, "attention_begin"):
        out, lse = _empty_result(q, is_written=context.writes_each_query(q.shape[2]))
        channel = Channel(context.groups)
        lanes = [
            LaneForward([x[:, :, ring.tokens] for x in (q, k, v, out, lse)], ring, context, channel)
            for ring in context.rings
        ]
    _run([lane.rounds() for lane in lanes], channel, context)
    return out.to(q.dtype), lse, [lane.last_remote_block for lane in lanes]


def ring_backward(
    dout: Tensor,
    saved: SavedForward,
    last_remote_blocks: Sequence[list[Tensor]],
    context: RingContext,
    *,
    in_reverse: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients (dq, dk, dv) of `ring_forward`, shaped like q, k, v; in fp32 if they are sums of parts.

    Args:
        dout: [B, h, S, D].
        saved: q, k, v of this group and the merged out and lse, so that every block's backward is exact by itself.
        last_remote_blocks: from the forward, for each lane.
        in_reverse: run the lanes in the reverse of the forward's order, those of one unit first; the same on all ranks.

    Caller: every rank of the replica, in the backward of `attention`.
    Messages: per lane, sub-ring and round one KV block, and one dK/dV block the other way round the ring, in fp32 or in
        ``context.gradient_dtype``.
    """
    clock = context.clock
    clock.count_attention(_BACKWARD_FLOPS * context.pairs * dout.shape[-1], backward=True)
    call = context.undivided
    if call is not None:
        with clock.phase(ATTENTION, "attention_backward"):
            return context.kernel.backward(dout, saved, context.scores, call.band)
    with clock.phase(ATTENTION, "attention_backward_begin"):
        accumulation_dtype = torch.promote_types(saved.q.dtype, torch.float32)
        own_is_empty = context.writes_own_key_gradients(saved.k.shape[2])
        make_own = torch.empty_like if own_is_empty else torch.zeros_like
        grads = [torch.zeros_like(saved.q, dtype=accumulation_dtype)]
        grads += [make_own(x, dtype=accumulation_dtype) for x in (saved.k, saved.v)]
        channel = Channel(context.groups)
        lanes = []
        for ring, last_remote_block in zip(context.rings, last_remote_blocks, strict=True):
            lane_index = (slice(None), slice(None), ring.tokens)  # views: the lanes fill parts of the same tensors
            lane_saved = SavedForward(*(x[lane_index] for x in (saved.q, saved.k, saved.v, saved.out, saved.lse)))
            lane_grads = [x[lane_index] for x in grads]
            arguments = (dout[lane_index], lane_saved, last_remote_block, lane_grads, ring, context, channel)
            lanes.append(LaneBackward(*arguments, own_is_empty=own_is_empty))
    if in_reverse:
        lanes.reverse()
    _run([lane.rounds() for lane in lanes], channel, context)
    dq, dk, dv = grads
    return dq, dk, dv


def _run(lanes: Sequence[Rounds], channel: Channel, context: RingContext) -> None:
    """Run all lanes to their end, and wait until their messages have been sent.

    If the backend pairs messages by their order, as NCCL does, lanes run in the placement's order, which all ranks
    share.
    """
    if channel.keeps_order or len(lanes) < 2:
        run_in_order(lanes, context.clock)
    else:
        run_as_ready(lanes, context.clock)
    if any(ring.size > 1 for ring in context.rings):
        with context.clock.phase(RING_WAIT, "ring_finish"):
            channel.finish()


def _empty_result(q: Tensor, *, is_written: bool) -> tuple[Tensor, Tensor]:
    """Return out [B, h, S, D] of zeros and lse [B, h, S] of -inf, the result of a query that sees nothing.

    ``out`` is token-major in memory, since it is sent to the ranks of the tokens next. If ``is_written``, every query
    gets a value, and both are uninitialised.
    """
    batch_size, heads, tokens, head_dim = q.shape
    accumulation_dtype = torch.promote_types(q.dtype, torch.float32)
    out = q.new_empty(tokens, batch_size, heads, head_dim, dtype=accumulation_dtype).permute(1, 2, 0, 3)
    lse = q.new_empty((batch_size, heads, tokens), dtype=accumulation_dtype)
    if not is_written:
        out.zero_()
        lse.fill_(-torch.inf)
    return out, lse
