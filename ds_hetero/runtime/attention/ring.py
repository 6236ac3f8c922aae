"""Sub-ring attention: groups trade KV in a ring, each sub-ring over one contiguous range of heads.

Forward step t attends to the KV of the group t positions back, while the KV of step t + 1 travels. Backward walks the
ring the other way round: the last remote KV of the forward is still held, and partial dK/dV come home under the local
block. There is no barrier: a rank waits for what it receives and, at the end, for what it sent.

Partial results are merged by log-sum-exp in fp32, and partial dK/dV travel in fp32.

Dimension key: B batch, S tokens of this group, h query heads of this rank, g its KV heads, n travelling tokens,
D head size. A block of KV is a list with one [2, B, heads, n, D] tensor per sub-ring, keys and values.
Source: Ring Attention (arXiv:2310.01889); sub-rings, HexiSeq (arXiv:2605.07569) section 3.3.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from ds_hetero.placement import Range
from ds_hetero.runtime.attention.channel import NOTHING, Channel, Message, PendingReceives
from ds_hetero.runtime.attention.kernels import AttentionKernel, SavedForward, Scores, merge_
from ds_hetero.runtime.attention.lane_order import Rounds, run_as_ready, run_in_order
from ds_hetero.runtime.attention.ring_steps import KernelCall, Ring
from ds_hetero.runtime.attention.ring_table import Transfer
from ds_hetero.runtime.step_clock import ATTENTION, RING_WAIT, UNTIMED, Clock

__all__ = ["RingContext", "ring_backward", "ring_forward"]

_GRAD_TAG = 1 << 30  # tags below carry KV, tags above carry its gradient
# Operations a pair of query and key and element of a head: QK^T and PV forward; the scores again, dV, dP, dQ and dK
# backward (FlashAttention-2, arXiv:2307.08691, section 3.1.2).
_FORWARD_FLOPS, _BACKWARD_FLOPS = 4, 10


@dataclass(frozen=True, slots=True)
class RingContext:
    """What the forward and the backward of one attention layer have in common.

    Args:
        rings: this rank's part in the ring of each of its lanes, in the placement's order.
        group: process group of the replica, on which messages travel.
        kernel: computes the blocks.
        scores: how scores are made.
        clock: times the phases and counts the operations.
    """

    rings: Sequence[Ring]
    group: ProcessGroup
    kernel: AttentionKernel
    scores: Scores
    clock: Clock = UNTIMED

    @property
    def undivided(self) -> KernelCall | None:
        """The one call that computes everything, or None if there are more."""
        return self.rings[0].undivided if len(self.rings) == 1 else None

    @property
    def pairs(self) -> int:
        """Pairs of query and key that this rank computes, over heads and rows."""
        return sum(ring.pairs for ring in self.rings)


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
        channel = Channel(context.group)
        lanes = [
            _LaneForward([x[:, :, ring.tokens] for x in (q, k, v, out, lse)], ring, context, channel)
            for ring in context.rings
        ]
    _run([lane.rounds() for lane in lanes], channel, context)
    return out.to(q.dtype), lse, [lane.kept for lane in lanes]


def ring_backward(
    dout: Tensor, saved: SavedForward, kept: Sequence[list[Tensor]], context: RingContext
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients (dq, dk, dv) of `ring_forward`, shaped like q, k, v; in fp32 where they are sums of several parts.

    Args:
        dout: [B, h, S, D].
        saved: q, k, v of this group and the merged out and lse, so that every block's backward is exact by itself.
        kept: from the forward, by lane.
        context: of the forward.

    Caller: every rank of the replica, in the backward of `attention`.
    Messages: per lane, sub-ring and round one KV block, and one fp32 dK/dV block the other way round the ring.
    """
    clock = context.clock
    clock.count_attention(_BACKWARD_FLOPS * context.pairs * dout.shape[-1], backward=True)
    if call := context.undivided:
        with clock.phase(ATTENTION, "attention_backward"):
            return context.kernel.backward(dout, saved, context.scores, call.band)
    with clock.phase(ATTENTION, "attention_backward_begin"):
        wide = torch.promote_types(saved.q.dtype, torch.float32)
        grads = [torch.zeros_like(x, dtype=wide) for x in (saved.q, saved.k, saved.v)]
        channel = Channel(context.group)
        lanes = []
        for ring, kept_of_lane in zip(context.rings, kept, strict=True):
            at = (slice(None), slice(None), ring.tokens)
            lane_saved = SavedForward(saved.q[at], saved.k[at], saved.v[at], saved.out[at], saved.lse[at])
            lane_grads = [x[at] for x in grads]
            lanes.append(_LaneBackward(dout[at], lane_saved, kept_of_lane, lane_grads, ring, context, channel))
    _run([lane.rounds() for lane in lanes], channel, context)
    dq, dk, dv = grads
    return dq, dk, dv


def _run(lanes: Sequence[Rounds], channel: Channel, context: RingContext) -> None:
    """Run all lanes to their end and wait for what they have sent."""
    if channel.keeps_order or len(lanes) < 2:
        run_in_order(lanes, context.clock)
    else:
        run_as_ready(lanes, context.clock)
    if any(ring.size > 1 for ring in context.rings):
        with context.clock.phase(RING_WAIT, "ring_finish"):
            channel.finish()


class _LaneForward:
    """The forward of one lane on its way round the ring.

    Args:
        tensors: q, k, v, and out and lse to be filled, of the lane's tokens.
        ring: of the lane.
        context: of the layer.
        channel: of all lanes of the layer.

    Attributes:
        kept: after the last round, the remote KV of the last step.
    """

    def __init__(self, tensors: Sequence[Tensor], ring: Ring, context: RingContext, channel: Channel) -> None:
        self._q, k, v, self._out, self._lse = tensors
        self._ring, self._context, self._channel = ring, context, channel
        self._held = {ring.position: _pack(k, v, ring)}
        self._local = _local_kv(k, v, self._held[ring.position], ring)
        self._arriving: dict[int, list[Tensor]] = {}
        self.kept: list[Tensor] = []

    def rounds(self) -> Rounds:
        """See `ds_hetero.runtime.attention.lane_order`."""
        ring, clock = self._ring, self._context.clock
        for step in range(ring.size):
            with clock.phase(ATTENTION, "attention"):
                pending = self._start_round(step)
            if step == 0:
                yield NOTHING
            for calls in _portions(ring, ring.forward_source(step), self._channel):
                with clock.phase(ATTENTION, "attention"):
                    self._compute(step, calls)
                yield NOTHING
            yield pending
            if step + 1 < ring.size:  # the KV of the last step is kept for the backward
                self._held = _only(self._held, keep=ring.sent_after_forward_step[step]) | self._arriving
        self.kept = self._held.get(ring.forward_source(ring.size - 1), []) if ring.size > 1 else []

    def _start_round(self, step: int) -> PendingReceives:
        ring, q, transfers = self._ring, self._q, self._ring.forward_rounds[step]
        self._arriving = {t.source: _block_like(q, ring, t.source, q.dtype) for t in transfers.receives}
        pending = self._channel.post(
            _receives(ring, self._arriving, transfers.receives), _sends(ring, self._held, transfers.sends)
        )
        return pending if transfers.receives else NOTHING

    def _compute(self, step: int, calls: Sequence[_Call]) -> None:
        source = self._ring.forward_source(step)
        for i, call in calls:
            keys, values = self._local[i] if step == 0 else self._held[source][i]
            q, k, v = self._q[call.queries], keys[call.keys], values[call.keys]
            part = self._context.kernel.forward(q, k, v, self._context.scores, call.band)
            _accumulate(self._out, self._lse, call, *part)


class _LaneBackward:
    """The backward of one lane on its way round the ring: KV blocks that are held, and partial dK/dV that travel home.

    Args:
        dout: of the lane's tokens.
        saved: of the lane's tokens.
        kept: from the lane's forward.
        grads: dq, dk and dv of the lane's tokens, to be added to.
        ring: of the lane.
        context: of the layer.
        channel: of all lanes of the layer.
    """

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
        self._held = {ring.position: _pack(saved.k, saved.v, ring)}
        if kept:
            self._held[(ring.position + 1) % ring.size] = kept
        self._local = _local_kv(saved.k, saved.v, self._held[ring.position], ring)
        self._local_grads = [(dk[:, sub.kv_heads], dv[:, sub.kv_heads]) for sub in ring.sub_rings]
        self._partial: dict[int, list[Tensor]] = {}  # dK/dV of remote blocks, until the next group takes them over
        self._arriving_kv: dict[int, list[Tensor]] = {}
        self._arriving_grads: dict[int, list[Tensor]] = {}

    def rounds(self) -> Rounds:
        """See `ds_hetero.runtime.attention.lane_order`."""
        ring, clock = self._ring, self._context.clock
        for step in range(ring.size):
            with clock.phase(ATTENTION, "attention_backward"):
                pending = self._start_round(step)
            if step == 0:
                yield NOTHING
            source = ring.backward_source(step)
            self._begin_partial(source)
            for calls in _portions(ring, source, self._channel):
                with clock.phase(ATTENTION, "attention_backward"):
                    self._compute(source, calls)
                yield NOTHING
            yield pending
            with clock.phase(ATTENTION, "attention_backward"):
                self._finish_round(step)

    def _start_round(self, step: int) -> PendingReceives:
        """Post all messages of a round: the KV of the next step, and the dK/dV to which this step adds."""
        ring, like = self._ring, self._saved.q
        kv, grads = ring.backward_kv_rounds[step], ring.backward_grad_rounds[step]
        self._arriving_kv = {t.source: _block_like(like, ring, t.source, like.dtype) for t in kv.receives}
        self._arriving_grads = {t.source: _block_like(like, ring, t.source, self._dq.dtype) for t in grads.receives}
        pending = self._channel.post(
            _receives(ring, self._arriving_kv, kv.receives)
            + _receives(ring, self._arriving_grads, grads.receives, _GRAD_TAG),
            _sends(ring, self._held, kv.sends) + _sends(ring, self._partial, grads.sends, _GRAD_TAG),
        )
        for transfer in grads.sends:
            del self._partial[transfer.source]
        return pending if kv.receives or grads.receives else NOTHING

    def _begin_partial(self, source: int) -> None:
        """Zero dK/dV for the KV of another group."""
        if self._ring.table.reads(self._ring.position, source):
            block = _block_like(self._saved.q, self._ring, source, self._dq.dtype)
            self._partial[source] = [x.zero_() for x in block]

    def _compute(self, source: int, calls: Sequence[_Call]) -> None:
        """Add what the queries of this rank give to dq, and to dK/dV of the block of ``source``."""
        saved, is_local = self._saved, source == self._ring.position
        for i, call in calls:
            keys, values = self._local[i] if is_local else self._held[source][i]
            dkeys, dvalues = self._local_grads[i] if is_local else self._partial[source][i]
            at_q, at_k = call.queries, call.keys
            block = SavedForward(saved.q[at_q], keys[at_k], values[at_k], saved.out[at_q], saved.lse[at_q])
            part = self._context.kernel.backward(self._dout[at_q], block, self._context.scores, call.band)
            self._dq[at_q] += part[0]
            dkeys[at_k] += part[1]
            dvalues[at_k] += part[2]

    def _finish_round(self, step: int) -> None:
        """Add the dK/dV that have arrived, and let go of the KV that is not sent any more."""
        ring = self._ring
        for source, arrived in self._arriving_grads.items():
            for i, parts in enumerate(arrived):
                if source == ring.position:
                    for grad, part in zip(self._local_grads[i], parts, strict=True):
                        _add_columns_(grad, part, ring.table.columns(source))
                else:
                    self._partial[source][i] += parts
        self._arriving_grads = {}
        self._held = _only(self._held, keep=ring.sent_after_backward_step[step]) | self._arriving_kv


_Call = tuple[int, KernelCall]  # with the index of its sub-ring


def _portions(ring: Ring, source: int, channel: Channel) -> Iterator[list[_Call]]:
    """The calls of one step: together, but one by one in a lane without a ring, during which others may go on."""
    calls = [(i, call) for i, of_sub_ring in enumerate(ring.calls[source]) for call in of_sub_ring]
    if ring.size > 1 or channel.keeps_order:
        yield calls
    else:
        yield from ([call] for call in calls)


def _empty_result(q: Tensor) -> tuple[Tensor, Tensor]:
    batch_size, heads, tokens, head_dim = q.shape
    wide = torch.promote_types(q.dtype, torch.float32)
    out = q.new_zeros(tokens, batch_size, heads, head_dim, dtype=wide).permute(1, 2, 0, 3)
    return out, q.new_full((batch_size, heads, tokens), -torch.inf, dtype=wide)


def _accumulate(out: Tensor, lse: Tensor, call: KernelCall, out_part: Tensor, lse_part: Tensor) -> None:
    if call.first:
        out[call.queries], lse[call.queries] = out_part, lse_part
    else:
        merge_(out[call.queries], lse[call.queries], out_part, lse_part)


def _pack(k: Tensor, v: Tensor, ring: Ring) -> list[Tensor]:
    """This rank's KV as it travels; no tensor if no other group needs it."""
    columns = ring.table.columns(ring.position)
    if not columns:
        return []
    blocks = []
    for sub in ring.sub_rings:
        if len(columns) == 1:
            blocks.append(torch.stack([x[:, sub.kv_heads, slice(*columns[0])] for x in (k, v)]))
        else:
            index = _index(columns, k.device)
            blocks.append(torch.stack([x[:, sub.kv_heads].index_select(2, index) for x in (k, v)]))
    return blocks


def _add_columns_(grad: Tensor, part: Tensor, columns: tuple[Range, ...]) -> None:
    """Add the gradient of keys that have travelled to that of all keys, both [B, heads, tokens, D]."""
    if len(columns) == 1:
        grad[:, :, slice(*columns[0])] += part
    else:
        grad.index_add_(2, _index(columns, grad.device), part)


@lru_cache(maxsize=256)
def _index(columns: tuple[Range, ...], device: torch.device) -> Tensor:
    """The indices in ``columns``, one behind the other."""
    return torch.cat([torch.arange(start, stop) for start, stop in columns]).to(device)


def _local_kv(k: Tensor, v: Tensor, packed: list[Tensor], ring: Ring) -> list[tuple[Tensor, Tensor]]:
    """Keys and values of the local block, per sub-ring: the packed ones, being contiguous, if they hold all tokens."""
    if packed and packed[0].shape[3] == k.shape[2]:
        return [(kv[0], kv[1]) for kv in packed]
    return [(k[:, sub.kv_heads], v[:, sub.kv_heads]) for sub in ring.sub_rings]


def _block_like(q: Tensor, ring: Ring, source: int, dtype: torch.dtype) -> list[Tensor]:
    """Uninitialised memory for the KV of ``source``, or for its gradient."""
    batch_size, _, _, head_dim = q.shape
    return [
        q.new_empty(
            2, batch_size, sub.kv_heads.stop - sub.kv_heads.start, ring.num_columns(source), head_dim, dtype=dtype
        )
        for sub in ring.sub_rings
    ]


def _only(blocks: Mapping[int, list[Tensor]], keep: Set[int]) -> dict[int, list[Tensor]]:
    return {source: block for source, block in blocks.items() if source in keep}


def _receives(
    ring: Ring, blocks: Mapping[int, list[Tensor]], transfers: Sequence[Transfer], tag: int = 0
) -> list[Message]:
    return [
        Message(blocks[transfer.source][i], sub.ranks[transfer.sender], tag + sub.tag)
        for transfer in transfers
        for i, sub in enumerate(ring.sub_rings)
    ]


def _sends(
    ring: Ring, blocks: Mapping[int, list[Tensor]], transfers: Sequence[Transfer], tag: int = 0
) -> list[Message]:
    return [
        Message(blocks[transfer.source][i], sub.ranks[transfer.receiver], tag + sub.tag)
        for transfer in transfers
        for i, sub in enumerate(ring.sub_rings)
    ]
