"""The forward and the backward of attention in one lane, ring step by ring step.

In every step a lane posts a round of messages and computes the attention to the KV block that it has, while the next
block travels. Between steps it yields the messages that must arrive before it goes on, see
`ds_hetero.runtime.attention.round_order`.

Dimension key: B batch, S tokens of this group in the lane, h query heads of this rank, g its KV heads, D head size.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from ds_hetero.batch.ring_steps import KernelCall, Ring
from ds_hetero.runtime.attention.channel import NOTHING, Channel
from ds_hetero.runtime.attention.kernel_calls import BlockCall, Call, packed_calls
from ds_hetero.runtime.attention.kernels import AttentionKernel, SavedForward, Scores, beside_messages
from ds_hetero.runtime.attention.lane_mail import GradientBlocks, KVBlocks, LaneMail
from ds_hetero.runtime.attention.round_order import Rounds
from ds_hetero.runtime.attention.travelling_kv import local_kv, pack_kv
from ds_hetero.runtime.ring_groups import RingGroups
from ds_hetero.runtime.step_clock import ATTENTION, UNTIMED, Clock


@dataclass(frozen=True, slots=True)
class RingContext:
    """Arguments that the forward and the backward of one attention layer share.

    Attributes:
        rings: this rank's part in the ring of each of its lanes, in the placement's order.
        groups: process groups of the replica, for the messages.
        clock: times the phases and counts FLOPs.
        gradient_dtype: in which partial dK/dV travel; None for that in which they add up, which loses nothing.
    """

    rings: Sequence[Ring]
    groups: RingGroups
    kernel: AttentionKernel
    scores: Scores
    clock: Clock = UNTIMED
    gradient_dtype: torch.dtype | None = None

    @property
    def undivided(self) -> KernelCall | None:
        """The only kernel call of the layer on this rank; None if there are several."""
        return self.rings[0].single_call if len(self.rings) == 1 else None

    @property
    def pairs(self) -> int:
        """Number of pairs of query and key that this rank computes, over all heads and batch rows."""
        return sum(ring.pairs for ring in self.rings)

    def writes_each_query(self, num_tokens: int) -> bool:
        """Whether the calls of the forward write every query's result, of ``num_tokens`` tokens of the group."""
        return self._has_all(num_tokens) and all(ring.first_calls_cover_queries for ring in self.rings)

    def writes_own_key_gradients(self, num_tokens: int) -> bool:
        """Whether the calls of the backward write every gradient of the group's own KV, of ``num_tokens`` tokens."""
        return self._has_all(num_tokens) and all(ring.stores_own_key_gradients for ring in self.rings)

    def _has_all(self, num_tokens: int) -> bool:
        """Whether all tokens of the group are in its lanes."""
        in_lanes: int = sum(ring.tokens.stop - ring.tokens.start for ring in self.rings)
        return in_lanes == num_tokens

    def kernel_beside(self, mail: LaneMail, channel: Channel) -> AttentionKernel:
        """Return the kernel for the blocks of a step, beside which messages of the lane may travel."""
        overlaps = channel.keeps_order and mail.is_under_way
        return beside_messages(self.kernel) if overlaps else self.kernel

    def packs(self, q: Tensor) -> bool:
        """Whether one call of the kernel computes many blocks of queries like these."""
        return q.shape[0] == 1 and self.kernel.packs(q, self.scores)


class LaneForward:
    """The forward of one lane.

    Args:
        tensors: q, k, v, out and lse of the lane's tokens; the last two are filled.

    Attributes:
        last_remote_block: after the last step, the remote KV block that came last; it saves the backward a message.
    """

    def __init__(self, tensors: Sequence[Tensor], ring: Ring, context: RingContext, channel: Channel) -> None:
        self._q, k, v, self._out, self._lse = tensors
        self._ring, self._context, self._channel = ring, context, channel
        packed = pack_kv(k, v, ring)
        self._local = local_kv(k, v, packed, ring)
        self._kv = KVBlocks(ring, self._q, packed)
        self.last_remote_block: list[Tensor] = []

    def rounds(self) -> Rounds:
        """Run the steps; yield between them the receives to wait for, see `ds_hetero.runtime.attention.round_order`."""
        ring, clock = self._ring, self._context.clock
        mail = LaneMail(ring, self._channel)
        for step in range(ring.steps):
            with clock.phase(ATTENTION, "attention"):
                mail.post(step, (ring.forward_rounds[step], self._kv))
            if step == 0:
                yield NOTHING  # let every lane post its first messages before any of them computes
            kernel = self._context.kernel_beside(mail, self._channel)
            for calls in _portions(ring, ring.forward_source(step), self._channel, self._context.packs(self._q)):
                with clock.phase(ATTENTION, "attention"):
                    self._compute(step, calls, kernel)
                yield NOTHING
            yield mail.pending(step + 1)
            with clock.phase(ATTENTION, "attention"):
                mail.put_away(step + 1)
                self._kv.keep_only(ring.needed_after_forward_step[step])
        if ring.kept_source is not None:
            self.last_remote_block = self._kv.complete[ring.kept_source]

    def _compute(self, step: int, calls: Sequence[_Call], kernel: AttentionKernel) -> None:
        """Merge the attention of this rank's queries to the KV block of a step into ``out`` and ``lse``."""
        source, context = self._ring.forward_source(step), self._context
        assert source is not None
        for sub_ring, call in calls:
            keys, values = self._local[sub_ring] if step == 0 else self._kv.complete[source][sub_ring]
            part = call.forward(kernel, (self._q, keys, values), context.scores)
            call.store(self._out, self._lse, part)


class LaneBackward:
    """The backward of one lane: KV blocks travel to this rank, and partial dK/dV back to the ranks of the KV.

    Args:
        dout: gradient of the output, of the lane's tokens.
        saved: results of the forward, of the lane's tokens.
        last_remote_block: `LaneForward.last_remote_block`.
        grads: dq, dk and dv of the lane's tokens, to which the gradients are added.
        own_is_empty: dk and dv have no values yet, see `Ring.stores_own_key_gradients`.
    """

    def __init__(
        self,
        dout: Tensor,
        saved: SavedForward,
        last_remote_block: list[Tensor],
        grads: Sequence[Tensor],
        ring: Ring,
        context: RingContext,
        channel: Channel,
        *,
        own_is_empty: bool,
    ) -> None:
        self._own_is_empty = own_is_empty
        self._dout, self._saved, self._ring, self._context, self._channel = dout, saved, ring, context, channel
        self._dq, dk, dv = grads
        packed = pack_kv(saved.k, saved.v, ring)
        self._local = local_kv(saved.k, saved.v, packed, ring)
        self._kv = KVBlocks(ring, saved.q, packed)
        if ring.kept_source is not None:
            self._kv.complete[ring.kept_source] = last_remote_block
        self._local_grads = [(dk[:, sub.kv_heads], dv[:, sub.kv_heads]) for sub in ring.sub_rings]
        self._partial = GradientBlocks(ring, saved.q, self._dq.dtype, self._local_grads, context.gradient_dtype)
        self._lse_by_sub_ring = [_LastLse(saved.lse) for _ in ring.sub_rings]

    def rounds(self) -> Rounds:
        """Run the steps; yield between them the receives to wait for, see `ds_hetero.runtime.attention.round_order`."""
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
            kernel = self._context.kernel_beside(mail, self._channel)
            for calls in _portions(ring, source, self._channel, self._context.packs(self._saved.q)):
                with clock.phase(ATTENTION, "attention_backward"):
                    self._compute(source, calls, kernel)
                yield NOTHING
            yield mail.pending(step + 1)
            with clock.phase(ATTENTION, "attention_backward"):
                mail.put_away(step + 1)
                self._kv.keep_only(ring.needed_after_backward_step[step])

    def _compute(self, source: int | None, calls: Sequence[_Call], kernel: AttentionKernel) -> None:
        """Add the gradients of this rank's queries to dq, and put those of ``source``'s KV block into its dK/dV."""
        assert source is not None
        saved, context, is_local = self._saved, self._context, source == self._ring.position
        is_empty = self._own_is_empty if is_local else source in self._ring.sources_with_each_key_once
        for sub_ring, call in calls:
            keys, values = self._local[sub_ring] if is_local else self._kv.complete[source][sub_ring]
            dkeys, dvalues = self._local_grads[sub_ring] if is_local else self._partial.complete[source][sub_ring]
            block = SavedForward(saved.q, keys, values, saved.out, saved.lse)
            lse = self._lse_by_sub_ring[sub_ring].of(call)
            dq, dk, dv = call.backward(kernel, self._dout, block, lse, context.scores)
            call.add_to_queries_(self._dq, dq)
            put_keys = call.store_keys_ if is_empty else call.add_to_keys_
            put_keys(dkeys, dk)
            put_keys(dvalues, dv)


class _LastLse:
    """The log-sum-exp of the last call's queries, dense as kernels read it.

    Blocks of neighbouring steps often meet the same queries: half of them, of ranks that have more tokens behind.

    Args:
        lse: [B, h, S], of the lane.
    """

    def __init__(self, lse: Tensor) -> None:
        self._lse = lse
        self._ranges: Hashable = None
        self._dense = lse

    def of(self, call: Call) -> Tensor:
        """Return the lse of the call's queries, [B, heads, Q]."""
        if call.query_ranges != self._ranges:
            self._ranges, self._dense = call.query_ranges, call.queries_of(self._lse).contiguous()
        return self._dense


class _Call(NamedTuple):
    """A kernel call of one sub-ring."""

    sub_ring: int  # index of the sub-ring
    call: Call


def _portions(ring: Ring, source: int | None, channel: Channel, is_packed: bool) -> Iterator[Sequence[_Call]]:
    """Yield the kernel calls of one ring step in portions, between which other lanes may run.

    All calls are one portion if the lane has a ring, or all ranks must post messages in the same order. Otherwise the
    lane is a single group, which posts no messages, and every call is a portion.
    """
    if source is None:
        return
    calls = _calls(ring, source, is_packed)
    if ring.size > 1 or channel.keeps_order:
        yield calls
    else:
        yield from ([call] for call in calls)


def _calls(ring: Ring, source: int, is_packed: bool) -> Sequence[_Call]:
    """Return the calls of all sub-rings for the KV block of ``source``.

    They are made once and stored in the ring, which all layers share.
    """
    if (source, is_packed) not in ring.call_cache:
        prepared: list[_Call] = []
        for sub_ring, kernel_calls in enumerate(ring.calls[source]):
            calls_of_sub_ring = packed_calls(kernel_calls) if is_packed else map(BlockCall, kernel_calls)
            prepared += [_Call(sub_ring, call) for call in calls_of_sub_ring]
        ring.call_cache[source, is_packed] = prepared
    calls: Sequence[_Call] = ring.call_cache[source, is_packed]
    return calls
