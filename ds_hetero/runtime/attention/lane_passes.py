"""The forward and the backward of one lane, round by round; see `ds_hetero.runtime.attention.ring`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from torch import Tensor
from torch.distributed import ProcessGroup

from ds_hetero.runtime.attention.channel import NOTHING, Channel, PendingReceives
from ds_hetero.runtime.attention.kernel_calls import BlockCall, Call, packed_calls
from ds_hetero.runtime.attention.kernels import AttentionKernel, SavedForward, Scores
from ds_hetero.runtime.attention.kv_blocks import (
    add_columns_,
    block_like,
    local_kv,
    only,
    pack_kv,
    receives_of,
    sends_of,
)
from ds_hetero.runtime.attention.lane_order import Rounds
from ds_hetero.runtime.attention.ring_steps import KernelCall, Ring
from ds_hetero.runtime.step_clock import ATTENTION, UNTIMED, Clock

__all__ = ["LaneBackward", "LaneForward", "RingContext"]

_GRAD_TAG = 1 << 30  # tags below carry KV, tags above carry its gradient


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

    def packs(self, q: Tensor) -> bool:
        """Whether the kernel is given many blocks of queries like these in one call."""
        return q.shape[0] == 1 and self.kernel.packs(q, self.scores)


class LaneForward:
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
        self._held = {ring.position: pack_kv(k, v, ring)}
        self._local = local_kv(k, v, self._held[ring.position], ring)
        self._arriving: dict[int, list[Tensor]] = {}
        self.kept: list[Tensor] = []

    def rounds(self) -> Rounds:
        """See `ds_hetero.runtime.attention.lane_order`."""
        ring, context, clock = self._ring, self._context, self._context.clock
        for step in range(ring.size):
            with clock.phase(ATTENTION, "attention"):
                pending = self._start_round(step)
            if step == 0:
                yield NOTHING
            for calls in _portions(ring, ring.forward_source(step), self._channel, context.packs(self._q)):
                with clock.phase(ATTENTION, "attention"):
                    self._compute(step, calls)
                yield NOTHING
            yield pending
            if step + 1 < ring.size:  # the KV of the last step is kept for the backward
                self._held = only(self._held, keep=ring.sent_after_forward_step[step]) | self._arriving
        self.kept = self._held.get(ring.forward_source(ring.size - 1), []) if ring.size > 1 else []

    def _start_round(self, step: int) -> PendingReceives:
        ring, q, transfers = self._ring, self._q, self._ring.forward_rounds[step]
        self._arriving = {t.source: block_like(q, ring, t.source, q.dtype) for t in transfers.receives}
        pending = self._channel.post(
            receives_of(ring, self._arriving, transfers.receives), sends_of(ring, self._held, transfers.sends)
        )
        return pending if transfers.receives else NOTHING

    def _compute(self, step: int, calls: Sequence[_Call]) -> None:
        source, context = self._ring.forward_source(step), self._context
        for i, call in calls:
            keys, values = self._local[i] if step == 0 else self._held[source][i]
            part = call.forward(context.kernel, (self._q, keys, values), context.scores)
            call.store(self._out, self._lse, part)


class LaneBackward:
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
        self._held = {ring.position: pack_kv(saved.k, saved.v, ring)}
        if kept:
            self._held[(ring.position + 1) % ring.size] = kept
        self._local = local_kv(saved.k, saved.v, self._held[ring.position], ring)
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
            for calls in _portions(ring, source, self._channel, self._context.packs(self._saved.q)):
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
        self._arriving_kv = {t.source: block_like(like, ring, t.source, like.dtype) for t in kv.receives}
        self._arriving_grads = {t.source: block_like(like, ring, t.source, self._dq.dtype) for t in grads.receives}
        pending = self._channel.post(
            receives_of(ring, self._arriving_kv, kv.receives)
            + receives_of(ring, self._arriving_grads, grads.receives, _GRAD_TAG),
            sends_of(ring, self._held, kv.sends) + sends_of(ring, self._partial, grads.sends, _GRAD_TAG),
        )
        for transfer in grads.sends:
            del self._partial[transfer.source]
        return pending if kv.receives or grads.receives else NOTHING

    def _begin_partial(self, source: int) -> None:
        """Zero dK/dV for the KV of another group."""
        if self._ring.table.reads(self._ring.position, source):
            block = block_like(self._saved.q, self._ring, source, self._dq.dtype)
            self._partial[source] = [x.zero_() for x in block]

    def _compute(self, source: int, calls: Sequence[_Call]) -> None:
        """Add what the queries of this rank give to dq, and to dK/dV of the block of ``source``."""
        saved, context, is_local = self._saved, self._context, source == self._ring.position
        for i, call in calls:
            keys, values = self._local[i] if is_local else self._held[source][i]
            dkeys, dvalues = self._local_grads[i] if is_local else self._partial[source][i]
            block = SavedForward(saved.q, keys, values, saved.out, saved.lse)
            dq, dk, dv = call.backward(context.kernel, self._dout, block, context.scores)
            call.add_to_queries_(self._dq, dq)
            call.add_to_keys_(dkeys, dk)
            call.add_to_keys_(dvalues, dv)

    def _finish_round(self, step: int) -> None:
        """Add the dK/dV that have arrived, and let go of the KV that is not sent any more."""
        ring = self._ring
        for source, arrived in self._arriving_grads.items():
            for i, parts in enumerate(arrived):
                if source == ring.position:
                    for grad, part in zip(self._local_grads[i], parts, strict=True):
                        add_columns_(grad, part, ring.table.columns(source))
                else:
                    self._partial[source][i] += parts
        self._arriving_grads = {}
        self._held = only(self._held, keep=ring.sent_after_backward_step[step]) | self._arriving_kv


_Call = tuple[int, Call]  # with the index of its sub-ring


def _portions(ring: Ring, source: int, channel: Channel, is_packed: bool) -> Iterator[Sequence[_Call]]:
    """The calls of one step: together, but one by one in a lane without a ring, during which others may go on."""
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
