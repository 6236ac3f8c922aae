"""Sub-ring attention: groups trade KV in a ring, each sub-ring over one contiguous range of heads.

Forward step t attends to the KV of the group t positions back, while the KV of step t + 1 travels. Backward walks the
ring the other way round: the last remote KV of the forward is still held, and partial dK/dV come home under the local
block. There is no barrier: a rank waits for what it receives and, at the end, for what it sent.

Partial results are merged by log-sum-exp in fp32, and partial dK/dV travel in fp32.

Dimension key: B batch, S tokens of this group, h query heads of this rank, g its KV heads, n travelling tokens,
D head size.
Source: Ring Attention (arXiv:2310.01889); sub-rings, HexiSeq (arXiv:2605.07569) section 3.3.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from ds_hetero.runtime.attention.channel import Channel, Message, Round
from ds_hetero.runtime.attention.kernels import AttentionKernel, Band, merge_
from ds_hetero.runtime.attention.ring_table import RingTable, Transfer
from ds_hetero.runtime.step_clock import ATTENTION, RING_WAIT, UNTIMED, Clock

__all__ = ["Call", "Ring", "SubRing", "make_ring", "ring_backward", "ring_forward"]

_GRAD_TAG = 1 << 16  # tags below carry KV, tags above carry its gradient
# Operations a pair of query and key and element of a head: QK^T and PV forward; the scores again, dV, dP, dQ and dK
# backward (FlashAttention-2, arXiv:2307.08691, section 3.1.2).
_FORWARD_FLOPS, _BACKWARD_FLOPS = 4, 10


class Call(NamedTuple):
    """One kernel call: slices into this rank's queries and into one sub-ring's KV."""

    rows: slice
    q_heads: slice
    q: slice
    kv_heads: slice
    k: slice
    band: Band
    first: bool  # no earlier call of the forward touches these queries


@dataclass(frozen=True)
class SubRing:
    """This rank's part in one sub-ring task.

    Args:
        index: of the task in `Schedule.sub_rings`; the same on all its ranks.
        ranks: global rank at every ring position.
        kv: this task's KV heads among those of this rank.
        segments: (query heads of this rank, KV heads of this task) with a uniform number of queries per KV head.
    """

    index: int
    ranks: tuple[int, ...]
    kv: tuple[int, int]
    segments: tuple[tuple[tuple[int, int], tuple[int, int]], ...]


@dataclass(frozen=True, eq=False)
class Ring:
    """What one rank does for one batch layout and one kind of mask."""

    table: RingTable
    position: int
    num_q: int
    num_kv: int
    sub_rings: tuple[SubRing, ...]

    @property
    def size(self) -> int:
        """Number of groups K."""
        return self.table.schedule.ring_size

    def source(self, step: int) -> int:
        """Ring position whose KV forward step ``step`` works on."""
        return (self.position - step) % self.size

    @cached_property
    def columns(self) -> tuple[tuple[int, int], ...]:
        """Travelling tokens of every group."""
        return tuple(self.table.columns(source) for source in range(self.size))

    @cached_property
    def calls(self) -> tuple[tuple[tuple[Call, ...], ...], ...]:
        """Kernel calls ``[source][sub-ring]``, in the order of the forward steps."""
        covered: dict[tuple[int, int], list[tuple[int, int]]] = defaultdict(list)  # queries by first head and first row
        found: dict[int, tuple[tuple[Call, ...], ...]] = {}
        for step in range(self.size):
            source = self.source(step)
            offset = self.columns[source][0] if step else 0
            found[source] = tuple(tuple(self._calls(source, sub, offset, covered)) for sub in self.sub_rings)
        return tuple(found[source] for source in range(self.size))

    def _calls(
        self, source: int, sub: SubRing, offset: int, covered: dict[tuple[int, int], list[tuple[int, int]]]
    ) -> list[Call]:
        calls = []
        for (h0, h1), kv_heads in sub.segments:
            for rows, blocks in self.table.blocks(self.position, source):
                for block in blocks:
                    first = _claim(covered[h0, rows.start], block.q)
                    k = slice(block.k[0] - offset, block.k[1] - offset)
                    band = Band(block.lo, block.hi)
                    calls.append(
                        Call(slice(*rows[:2]), slice(h0, h1), slice(*block.q), slice(*kv_heads), k, band, first)
                    )
        return calls

    @cached_property
    def undivided(self) -> Call | None:
        """The one call that computes everything, where there is just one."""
        calls = [call for by_sub_ring in self.calls for calls in by_sub_ring for call in calls]
        return calls[0] if len(calls) == 1 and self.size == 1 and _covers(calls[0], self) else None

    @cached_property
    def pairs(self) -> int:
        """Pairs of query and key that this rank computes, over heads and rows."""
        return sum(
            (call.rows.stop - call.rows.start)
            * (call.q_heads.stop - call.q_heads.start)
            * call.band.pairs(call.q.stop - call.q.start, call.k.stop - call.k.start)
            for by_sub_ring in self.calls
            for calls in by_sub_ring
            for call in calls
        )

    def forward_round(self, step: int) -> tuple[list[Transfer], list[Transfer]]:
        """(receives, sends) of this position in forward round ``step``."""
        return self._mine(self.table.forward_rounds, step)

    def backward_kv_round(self, step: int) -> tuple[list[Transfer], list[Transfer]]:
        """(receives, sends) of KV in backward round ``step``."""
        return self._mine(self.table.backward_kv_rounds, step)

    def backward_grad_round(self, step: int) -> tuple[list[Transfer], list[Transfer]]:
        """(receives, sends) of dK/dV in backward round ``step``."""
        return self._mine(self.table.backward_grad_rounds, step)

    def _mine(self, rounds: Sequence[Sequence[Transfer]], step: int) -> tuple[list[Transfer], list[Transfer]]:
        if step >= len(rounds):
            return [], []
        receives = [t for t in rounds[step] if t.receiver == self.position]
        return receives, [t for t in rounds[step] if t.sender == self.position]


def make_ring(table: RingTable, rank: int) -> Ring:
    """The part of ``rank`` in the ring."""
    schedule = table.schedule
    position = schedule.ring_position(rank)
    first_q, last_q = schedule.ring_groups[position].head_range(rank)
    first_kv, last_kv = schedule.kv_heads(first_q, last_q)
    sub_rings = []
    for index, piece in enumerate(schedule.sub_rings):
        if piece.owners[position] != rank:
            continue
        kv0, kv1 = schedule.kv_heads(piece.start, piece.stop)
        segments = []
        for start, stop in _uniform_segments(piece.start, piece.stop, schedule.queries_per_kv_head):
            a, b = schedule.kv_heads(start, stop)
            segments.append(((start - first_q, stop - first_q), (a - kv0, b - kv0)))
        sub_rings.append(SubRing(index, piece.owners, (kv0 - first_kv, kv1 - first_kv), tuple(segments)))
    return Ring(table, position, last_q - first_q, last_kv - first_kv, tuple(sub_rings))


def _uniform_segments(start: int, stop: int, per_kv: int) -> list[tuple[int, int]]:
    """Cut query heads into at most three pieces, each with as many queries on each of its KV heads."""
    low, high = -(-start // per_kv) * per_kv, stop // per_kv * per_kv
    if low >= high:  # no whole KV head inside: at most two parts of neighbouring ones
        low = high = low if start < low < stop else stop
    return [piece for piece in ((start, low), (low, high), (high, stop)) if piece[0] < piece[1]]


def _claim(covered: list[tuple[int, int]], new: tuple[int, int]) -> bool:
    """Add a range to sorted disjoint ranges; whether it met none of them."""
    low = bisect_left(covered, new)
    if low > 0 and covered[low - 1][1] > new[0]:
        low -= 1
    high = low
    while high < len(covered) and covered[high][0] < new[1]:
        high += 1
    met = covered[low:high]
    covered[low:high] = [(min(new[0], met[0][0]), max(new[1], met[-1][1]))] if met else [new]
    return not met


def _covers(call: Call, ring: Ring) -> bool:
    tokens = ring.table.schedule.group_tokens(ring.table.length)[ring.position]
    return (
        call.rows == slice(0, ring.table.rows[-1].stop)
        and call.q_heads == slice(0, ring.num_q)
        and call.q == call.k == slice(0, tokens)
    )


# --- forward ---------------------------------------------------------------------------------------


def ring_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    ring: Ring,
    group: ProcessGroup,
    kernel: AttentionKernel,
    scale: float,
    softcap: float | None,
    clock: Clock = UNTIMED,
) -> tuple[Tensor, Tensor, list[Tensor]]:
    """Attention of this group's tokens to the whole sequence, for this rank's heads.

        q [B, h, S, D], k and v [B, g, S, D]
        out [B, h, S, D], laid out token-major; lse [B, h, S] in fp32 (fp64 for fp64), -inf where nothing is visible
        kept: the remote KV of the last step, one [2, B, heads, n, D] per sub-ring, for `ring_backward`; may be empty

    Caller: every rank of the replica, in the forward of `attention`.
    Messages: one KV block per sub-ring and round to the next group that needs it.
    """
    clock.computed_attention(_FORWARD_FLOPS * ring.pairs * q.shape[-1], backward=False)
    if call := ring.undivided:
        with clock.phase(ATTENTION, "attention"):
            out, lse = kernel.forward(q, k, v, call.band, scale, softcap)
        return out, lse, []
    with clock.phase(ATTENTION, "attention_begin"):
        out, lse = _empty_result(q)
        held = {ring.position: _pack(k, v, ring)}
        own = _own_kv(k, v, held[ring.position], ring)
    channel = Channel(group)
    for step in range(ring.size):
        source = ring.source(step)
        with clock.phase(ATTENTION, "attention"):
            receives, sends = ring.forward_round(step)
            arriving = {t.source: _buffers(q, ring, t.source, q.dtype) for t in receives}
            round_ = channel.post(
                _messages(ring, arriving, receives, "sender"), _messages(ring, held, sends, "receiver")
            )
            for i, calls in enumerate(ring.calls[source]):
                for call in calls:
                    keys, values = own[i] if step == 0 else held[source][i]
                    part = kernel.forward(*_operands(call, q, keys, values), call.band, scale, softcap)
                    _accumulate(out, lse, call, *part)
        _wait(round_, receives, clock)
        if step + 1 < ring.size:  # what the last step worked on is kept for the backward
            later = {t.source for s in range(step + 1, ring.size) for t in ring.forward_round(s)[1]}
            held = {source: kv for source, kv in held.items() if source in later} | arriving
    _finish(channel, ring, clock)
    return out.to(q.dtype), lse, held.get(ring.source(ring.size - 1), []) if ring.size > 1 else []


def _wait(round_: Round, receives: Sequence[Transfer], clock: Clock) -> None:
    if receives:
        with clock.phase(RING_WAIT, "ring_wait"):
            round_.wait()


def _finish(channel: Channel, ring: Ring, clock: Clock) -> None:
    if ring.size > 1:
        with clock.phase(RING_WAIT, "ring_finish"):
            channel.finish()


def _empty_result(q: Tensor) -> tuple[Tensor, Tensor]:
    batch_size, heads, tokens, head_dim = q.shape
    wide = torch.promote_types(q.dtype, torch.float32)
    out = q.new_zeros(tokens, batch_size, heads, head_dim, dtype=wide).permute(1, 2, 0, 3)
    return out, q.new_full((batch_size, heads, tokens), -torch.inf, dtype=wide)


def _operands(call: Call, q: Tensor, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return (
        q[call.rows, call.q_heads, call.q],
        keys[call.rows, call.kv_heads, call.k],
        values[call.rows, call.kv_heads, call.k],
    )


def _accumulate(out: Tensor, lse: Tensor, call: Call, out_part: Tensor, lse_part: Tensor) -> None:
    at = (call.rows, call.q_heads, call.q)
    if call.first:
        out[at], lse[at] = out_part, lse_part
    else:
        merge_(out[at], lse[at], out_part, lse_part)


def _pack(k: Tensor, v: Tensor, ring: Ring) -> list[Tensor]:
    """This rank's KV as it travels, one [2, B, heads, n, D] per sub-ring; nothing if nobody needs it."""
    start, stop = ring.columns[ring.position]
    if start == stop:
        return []
    return [torch.stack((k[:, a:b, start:stop], v[:, a:b, start:stop])) for a, b in (sub.kv for sub in ring.sub_rings)]


def _own_kv(k: Tensor, v: Tensor, packed: list[Tensor], ring: Ring) -> list[tuple[Tensor, Tensor]]:
    """Keys and values of the local block, per sub-ring: the packed ones, being contiguous, where they are whole."""
    if packed and packed[0].shape[3] == k.shape[2]:
        return [(kv[0], kv[1]) for kv in packed]
    return [(k[:, slice(*sub.kv)], v[:, slice(*sub.kv)]) for sub in ring.sub_rings]


def _buffers(like: Tensor, ring: Ring, source: int, dtype: torch.dtype) -> list[Tensor]:
    start, stop = ring.columns[source]
    batch_size, _, _, head_dim = like.shape
    return [
        like.new_empty(2, batch_size, sub.kv[1] - sub.kv[0], stop - start, head_dim, dtype=dtype)
        for sub in ring.sub_rings
    ]


def _messages(
    ring: Ring, buffers: dict[int, list[Tensor]], transfers: Sequence[Transfer], peer: str, tag: int = 0
) -> list[Message]:
    return [
        Message(buffers[transfer.source][i], sub.ranks[getattr(transfer, peer)], tag + sub.index)
        for transfer in transfers
        for i, sub in enumerate(ring.sub_rings)
    ]


# --- backward --------------------------------------------------------------------------------------


def ring_backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    kept: list[Tensor],
    ring: Ring,
    group: ProcessGroup,
    kernel: AttentionKernel,
    scale: float,
    softcap: float | None,
    clock: Clock = UNTIMED,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients (dq, dk, dv) of `ring_forward`, shaped like q, k, v; in fp32 where they are sums of several parts.

    ``out`` and ``lse`` are the merged ones, so that every block's backward is exact by itself.

    Caller: every rank of the replica, in the backward of `attention`.
    Messages: per sub-ring and round one KV block, and one fp32 dK/dV block the other way round the ring.
    """
    clock.computed_attention(_BACKWARD_FLOPS * ring.pairs * q.shape[-1], backward=True)
    if call := ring.undivided:
        with clock.phase(ATTENTION, "attention_backward"):
            return kernel.backward(dout, q, k, v, out, lse, call.band, scale, softcap)
    with clock.phase(ATTENTION, "attention_backward_begin"):
        wide = torch.promote_types(q.dtype, torch.float32)
        dq, dk, dv = (torch.zeros_like(x, dtype=wide) for x in (q, k, v))
        held = {ring.position: _pack(k, v, ring)}
        if kept:
            held[(ring.position + 1) % ring.size] = kept
        own = _own_kv(k, v, held[ring.position], ring)
    channel = Channel(group)
    partial: dict[int, list[Tensor]] = {}  # dK/dV of visiting blocks, until the next group takes them over
    for step in range(ring.size):
        source = (ring.position + 1 + step) % ring.size
        local = source == ring.position
        kv_receives, kv_sends = ring.backward_kv_round(step)
        grad_receives, grad_sends = ring.backward_grad_round(step)
        with clock.phase(ATTENTION, "attention_backward"):
            arriving = {t.source: _buffers(q, ring, t.source, q.dtype) for t in kv_receives}
            added = {t.source: _buffers(q, ring, t.source, dk.dtype) for t in grad_receives}
            round_ = channel.post(
                _messages(ring, arriving, kv_receives, "sender")
                + _messages(ring, added, grad_receives, "sender", _GRAD_TAG),
                _messages(ring, held, kv_sends, "receiver")
                + _messages(ring, partial, grad_sends, "receiver", _GRAD_TAG),
            )
            partial = {s: x for s, x in partial.items() if s not in {t.source for t in grad_sends}}
            if ring.position in ring.table.paths[source]:
                partial[source] = [x.zero_() for x in _buffers(q, ring, source, dk.dtype)]
            for i, (sub, calls) in enumerate(zip(ring.sub_rings, ring.calls[source], strict=True)):
                for call in calls:
                    keys, values = own[i] if local else held[source][i]
                    dkeys, dvalues = (x[:, slice(*sub.kv)] for x in (dk, dv)) if local else partial[source][i]
                    at_q, at_k = (call.rows, call.q_heads, call.q), (call.rows, call.kv_heads, call.k)
                    part = kernel.backward(
                        dout[at_q], *_operands(call, q, keys, values), out[at_q], lse[at_q], call.band, scale, softcap
                    )
                    dq[at_q] += part[0]
                    dkeys[at_k] += part[1]
                    dvalues[at_k] += part[2]
        _wait(round_, [*kv_receives, *grad_receives], clock)
        for buffers in added.values():
            for i, sub in enumerate(ring.sub_rings):
                columns = slice(*ring.columns[source])
                mine = (x[:, slice(*sub.kv), columns] for x in (dk, dv)) if local else partial[source][i]
                for whole, part_ in zip(mine, buffers[i], strict=True):
                    whole += part_
        later = {t.source for s in range(step + 1, ring.size) for t in ring.backward_kv_round(s)[1]}
        held = {s: kv for s, kv in held.items() if s in later} | arriving
    _finish(channel, ring, clock)
    return dq, dk, dv
