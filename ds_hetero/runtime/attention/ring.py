"""Sub-ring attention: groups trade KV in a ring, each sub-ring over one contiguous range of heads.

Forward step t attends to the KV of the group t positions back, while the KV of step t + 1 travels. Backward walks the
ring the other way round: the last remote KV of the forward is still held, and partial dK/dV come home under the local
block. There is no barrier: a rank waits for what it receives and, at the end, for what it sent.

Partial results are merged by log-sum-exp in fp32, and partial dK/dV travel in fp32.

Dimension key: B batch, S tokens of this group, h query heads of this rank, g its KV heads, n travelling tokens,
D head size. A block of KV is a list with one [2, B, heads, n, D] tensor per sub-ring, keys and values.
Source: Ring Attention (arXiv:2310.01889); sub-rings, HexiSeq (arXiv:2605.07569) section 3.3.

The forward and the backward of one lane, round by round; see `ds_hetero.runtime.attention.ring`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from ds_hetero.batch.ring_steps import KernelCall, Ring
from ds_hetero.runtime.attention.channel import NOTHING, Channel
from ds_hetero.runtime.attention.kernel_calls import BlockCall, Call, local_kv, pack_kv, packed_calls
from ds_hetero.runtime.attention.kernels import AttentionKernel, SavedForward, Scores
from ds_hetero.runtime.attention.lane_mail import GradientBlocks, KVBlocks, LaneMail
from ds_hetero.runtime.attention.round_order import Rounds, run_as_ready, run_in_order
from ds_hetero.runtime.step_clock import ATTENTION, RING_WAIT, UNTIMED, Clock

# Operations a pair of query and key and element of a head: QK^T and PV forward; the scores again, dV, dP, dQ and dK
# backward (FlashAttention-2, arXiv:2307.08691, section 3.1.2).
_FORWARD_FLOPS, _BACKWARD_FLOPS = 4, 10


def ring_forward(q: Tensor, k: Tensor, v: Tensor, context: RingContext) -> tuple[Tensor, Tensor, list[list[Tensor]]]:
    """Attention of this group's tokens to the whole sequence, for this rank's heads.

        q [B, h, S, D], k and v [B, g, S, D]; each lane's tokens are consecutive
        out [B, h, S, D], laid out token-major; lse [B, h, S] in fp32 (fp64 for fp64), -inf where nothing is visible
        kept: by lane the remote KV of the last step for `ring_backward`; may be empty

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
        out, lse = _empty_result(q)
        channel = Channel(context.group, context.far_group)
        lanes = [
            LaneForward([x[:, :, ring.tokens] for x in (q, k, v, out, lse)], ring, context, channel)
            for ring in context.rings
        ]
    _run([lane.rounds() for lane in lanes], channel, context)
    return out.to(q.dtype), lse, [lane.kept for lane in lanes]


def ring_backward(
    dout: Tensor, saved: SavedForward, kept: Sequence[list[Tensor]], context: RingContext, *, in_reverse: bool = False
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients (dq, dk, dv) of `ring_forward`, shaped like q, k, v; in fp32 where they are sums of several parts.

    Args:
        dout: [B, h, S, D].
        saved: q, k, v of this group and the merged out and lse, so that every block's backward is exact by itself.
        kept: from the forward, by lane.
        in_reverse: lanes in the reverse of the forward's order, what a unit holds alone first; the same on all ranks.

    Caller: every rank of the replica, in the backward of `attention`.
    Messages: per lane, sub-ring and round one KV block, and one fp32 dK/dV block the other way round the ring.
    """
    clock = context.clock
    clock.count_attention(_BACKWARD_FLOPS * context.pairs * dout.shape[-1], backward=True)
    call = context.undivided
    if call is not None:
        with clock.phase(ATTENTION, "attention_backward"):
            return context.kernel.backward(dout, saved, context.scores, call.band)
    with clock.phase(ATTENTION, "attention_backward_begin"):
        wide = torch.promote_types(saved.q.dtype, torch.float32)
        grads = [torch.zeros_like(x, dtype=wide) for x in (saved.q, saved.k, saved.v)]
        channel = Channel(context.group, context.far_group)
        lanes = []
        for ring, kept_of_lane in zip(context.rings, kept, strict=True):
            of_lane = (slice(None), slice(None), ring.tokens)  # views: the lanes fill parts of the same tensors
            lane_saved = SavedForward(*(x[of_lane] for x in (saved.q, saved.k, saved.v, saved.out, saved.lse)))
            lane_grads = [x[of_lane] for x in grads]
            lanes.append(LaneBackward(dout[of_lane], lane_saved, kept_of_lane, lane_grads, ring, context, channel))
    if in_reverse:
        lanes.reverse()
    _run([lane.rounds() for lane in lanes], channel, context)
    dq, dk, dv = grads
    return dq, dk, dv


def _run(lanes: Sequence[Rounds], channel: Channel, context: RingContext) -> None:
    """Run all lanes to their end, and wait until their messages have left.

    In the placement's order where the backend pairs messages by their order, as NCCL does: it is the same on all ranks.
    """
    if channel.keeps_order or len(lanes) < 2:
        run_in_order(lanes, context.clock)
    else:
        run_as_ready(lanes, context.clock)
    if any(ring.size > 1 for ring in context.rings):
        with context.clock.phase(RING_WAIT, "ring_finish"):
            channel.finish()


def _empty_result(q: Tensor) -> tuple[Tensor, Tensor]:
    """Return out, [B, h, S, D] of zeros, and lse, [B, h, S] of -inf: a query that sees nothing keeps these.

    ``out`` is token-major in memory: it is sent to the ranks of the tokens next.
    """
    batch_size, heads, tokens, head_dim = q.shape
    wide = torch.promote_types(q.dtype, torch.float32)
    out = q.new_zeros(tokens, batch_size, heads, head_dim, dtype=wide).permute(1, 2, 0, 3)
    return out, q.new_full((batch_size, heads, tokens), -torch.inf, dtype=wide)


@dataclass(frozen=True, slots=True)
class RingContext:
    """Context that the forward and the backward of one attention layer share."""

    rings: Sequence[Ring]  # this rank's part in the ring of each of its lanes, in the placement's order
    group: ProcessGroup  # process group of the replica, on which messages travel
    far_group: ProcessGroup | None  # the same ranks, for messages between nodes
    kernel: AttentionKernel
    scores: Scores
    clock: Clock = UNTIMED  # times the phases and counts the operations

    @property
    def undivided(self) -> KernelCall | None:
        """The one call that computes everything; None if there are several."""
        return self.rings[0].undivided if len(self.rings) == 1 else None

    @property
    def pairs(self) -> int:
        """Pairs of query and key that this rank computes, over heads and rows."""
        return sum(ring.pairs for ring in self.rings)

    def packs(self, q: Tensor) -> bool:
        """Whether the kernel is given many blocks of queries like these in one call."""
        return q.shape[0] == 1 and self.kernel.packs(q, self.scores)


class LaneForward:
    """The forward of one lane on its way round the ring.

    Args:
        tensors: q, k, v, and out and lse to be filled, of the lane's tokens.
    """

    def __init__(self, tensors: Sequence[Tensor], ring: Ring, context: RingContext, channel: Channel) -> None:
        self._q, k, v, self._out, self._lse = tensors
        self._ring, self._context, self._channel = ring, context, channel
        own = pack_kv(k, v, ring)
        self._local = local_kv(k, v, own, ring)
        self._kv = KVBlocks(ring, self._q, own)
        self.kept: list[Tensor] = []  # after the last round, the remote KV that came last

    def rounds(self) -> Rounds:
        """See `ds_hetero.runtime.attention.channel`."""
        ring, clock = self._ring, self._context.clock
        mail = LaneMail(ring, self._channel)
        for step in range(ring.steps):
            with clock.phase(ATTENTION, "attention"):
                mail.post(step, (ring.forward_rounds[step], self._kv))
            if step == 0:
                yield NOTHING  # let every lane post its first messages before any of them computes
            for calls in _portions(ring, ring.forward_source(step), self._channel, self._context.packs(self._q)):
                with clock.phase(ATTENTION, "attention"):
                    self._compute(step, calls)
                yield NOTHING
            yield mail.pending(step + 1)
            with clock.phase(ATTENTION, "attention"):
                mail.put_away(step + 1)
                self._kv.keep_only(ring.needed_after_forward_step[step])
        if ring.kept is not None:
            self.kept = self._kv.whole[ring.kept]

    def _compute(self, step: int, calls: Sequence[_Call]) -> None:
        """Merge the attention of this rank's queries to the KV of a step into ``out`` and ``lse``."""
        source, context = self._ring.forward_source(step), self._context
        assert source is not None
        for sub_ring, call in calls:
            keys, values = self._local[sub_ring] if step == 0 else self._kv.whole[source][sub_ring]
            part = call.forward(context.kernel, (self._q, keys, values), context.scores)
            call.store(self._out, self._lse, part)


class LaneBackward:
    """The backward of one lane on its way round the ring: KV blocks here, and partial dK/dV that travel home."""

    def __init__(
        self,
        dout: Tensor,
        saved: SavedForward,
        kept: list[Tensor],
        grads: Sequence[Tensor],
        ring: Ring,
        context: RingContext,
        channel: Channel,
    ) -> None:
        self._dout, self._saved, self._ring, self._context, self._channel = dout, saved, ring, context, channel
        self._dq, dk, dv = grads
        own = pack_kv(saved.k, saved.v, ring)
        self._local = local_kv(saved.k, saved.v, own, ring)
        self._kv = KVBlocks(ring, saved.q, own)
        if ring.kept is not None:
            self._kv.whole[ring.kept] = kept
        self._local_grads = [(dk[:, sub.kv_heads], dv[:, sub.kv_heads]) for sub in ring.sub_rings]
        self._partial = GradientBlocks(ring, saved.q, self._dq.dtype, self._local_grads)

    def rounds(self) -> Rounds:
        """See `ds_hetero.runtime.attention.channel`."""
        ring, clock = self._ring, self._context.clock
        mail = LaneMail(ring, self._channel)
        for step in range(ring.steps):
            with clock.phase(ATTENTION, "attention_backward"):
                kv = (ring.backward_kv_rounds[step], self._kv)
                mail.post(step, kv, (ring.backward_grad_rounds[step], self._partial))
            if step == 0:
                yield NOTHING
            source = ring.backward_source(step)
            if source is not None and ring.table.reads(ring.position, source):
                self._partial.begin(source)
            for calls in _portions(ring, source, self._channel, self._context.packs(self._saved.q)):
                with clock.phase(ATTENTION, "attention_backward"):
                    self._compute(source, calls)
                yield NOTHING
            yield mail.pending(step + 1)
            with clock.phase(ATTENTION, "attention_backward"):
                mail.put_away(step + 1)
                self._kv.keep_only(ring.needed_after_backward_step[step])

    def _compute(self, source: int | None, calls: Sequence[_Call]) -> None:
        """Add the gradients of this rank's queries to dq, and those of the KV block of ``source`` to its dK/dV."""
        assert source is not None
        saved, context, is_local = self._saved, self._context, source == self._ring.position
        for sub_ring, call in calls:
            keys, values = self._local[sub_ring] if is_local else self._kv.whole[source][sub_ring]
            dkeys, dvalues = self._local_grads[sub_ring] if is_local else self._partial.whole[source][sub_ring]
            block = SavedForward(saved.q, keys, values, saved.out, saved.lse)
            dq, dk, dv = call.backward(context.kernel, self._dout, block, context.scores)
            call.add_to_queries_(self._dq, dq)
            call.add_to_keys_(dkeys, dk)
            call.add_to_keys_(dvalues, dv)


_Call = tuple[int, Call]  # with the index of its sub-ring


def _portions(ring: Ring, source: int | None, channel: Channel, is_packed: bool) -> Iterator[Sequence[_Call]]:
    """Return the calls of one step together; in a lane without a ring one by one, so that others go on in between."""
    if source is None:
        return
    calls = _calls(ring, source, is_packed)
    if ring.size > 1 or channel.keeps_order:
        yield calls
    else:
        yield from ([call] for call in calls)


def _calls(ring: Ring, source: int, is_packed: bool) -> Sequence[_Call]:
    """Made once per ring, which every layer uses."""
    if (source, is_packed) not in ring.prepared:
        make = packed_calls if is_packed else lambda calls: map(BlockCall, calls)
        by_sub_ring = enumerate(ring.calls[source])
        ring.prepared[source, is_packed] = [(i, call) for i, calls in by_sub_ring for call in make(calls)]
    calls: Sequence[_Call] = ring.prepared[source, is_packed]
    return calls
