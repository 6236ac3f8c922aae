"""One rank in the ring, in integers: which kernel calls it makes and what it sends and receives, step by step.

Made once per batch layout and kind of mask, and used by every layer. Slices and bands; nothing here touches a tensor.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from ds_hetero.runtime.attention.kernels import Band
from ds_hetero.runtime.attention.ring_table import RingTable, Transfer

__all__ = ["KernelCall", "Ring", "Round", "SubRing", "make_ring", "sent_after"]


class KernelCall(NamedTuple):
    """One kernel call.

    Args:
        queries: index into this rank's [B, h, S, ...] tensors: rows, heads, tokens.
        keys: index into one sub-ring's [B, heads, tokens, D] keys and values.
        band: which of these keys the queries see.
        first: whether no earlier call of the forward has any of these queries.
    """

    queries: tuple[slice, slice, slice]
    keys: tuple[slice, slice, slice]
    band: Band
    first: bool


class Round(NamedTuple):
    """What one rank receives and sends while it computes one step."""

    receives: tuple[Transfer, ...]
    sends: tuple[Transfer, ...]


@dataclass(frozen=True)
class SubRing:
    """This rank's part in one sub-ring task.

    Args:
        index: number of the task in `Schedule.sub_rings`; the same on all its ranks.
        ranks: global rank at every ring position.
        kv_heads: this task's KV heads among those of this rank.
        segments: (query heads of this rank, KV heads of this task) with a uniform number of queries per KV head.
    """

    index: int
    ranks: tuple[int, ...]
    kv_heads: slice
    segments: tuple[tuple[slice, slice], ...]


@dataclass(frozen=True, eq=False)
class Ring:
    """What one rank does for one batch layout and one kind of mask.

    Args:
        table: blocks and transfers of all groups.
        position: of this rank's group in the ring.
        num_q: query heads of this rank.
        sub_rings: in which this rank takes part.
    """

    table: RingTable
    position: int
    num_q: int
    sub_rings: tuple[SubRing, ...]

    @property
    def size(self) -> int:
        """Number of groups K."""
        return self.table.size

    def forward_source(self, step: int) -> int:
        """Ring position whose KV forward step ``step`` works on: its own first."""
        return (self.position - step) % self.size

    def backward_source(self, step: int) -> int:
        """Ring position whose KV backward step ``step`` works on: its own last."""
        return (self.position + 1 + step) % self.size

    @cached_property
    def columns(self) -> tuple[slice, ...]:
        """Travelling tokens of every group."""
        return tuple(slice(*self.table.columns(source)) for source in range(self.size))

    @cached_property
    def calls(self) -> tuple[tuple[tuple[KernelCall, ...], ...], ...]:
        """Kernel calls ``[source][sub-ring]``, in the order of the forward steps."""
        covered: dict[tuple[int, int], list[tuple[int, int]]] = defaultdict(list)  # queries by first head and first row
        by_source: dict[int, tuple[tuple[KernelCall, ...], ...]] = {}
        for step in range(self.size):
            source = self.forward_source(step)
            by_source[source] = tuple(tuple(self._calls_of(source, sub, covered)) for sub in self.sub_rings)
        return tuple(by_source[source] for source in range(self.size))

    def _calls_of(
        self, source: int, sub: SubRing, covered: dict[tuple[int, int], list[tuple[int, int]]]
    ) -> Iterator[KernelCall]:
        first_column = 0 if source == self.position else self.columns[source].start
        for q_heads, kv_heads in sub.segments:
            for rows, blocks in self.table.blocks(self.position, source):
                batch = slice(rows.start, rows.stop)
                for block in blocks:
                    columns = slice(block.k[0] - first_column, block.k[1] - first_column)
                    yield KernelCall(
                        queries=(batch, q_heads, slice(*block.q)),
                        keys=(batch, kv_heads, columns),
                        band=Band(block.lo, block.hi),
                        first=_claim(covered[q_heads.start, rows.start], block.q),
                    )

    @cached_property
    def undivided(self) -> KernelCall | None:
        """The one call that computes everything, or None if there are more."""
        if self.size > 1 or len(all_calls := self._all_calls()) != 1:
            return None
        (call,) = all_calls
        tokens = slice(0, self.table.placement.group_tokens(self.position))
        everything = (slice(0, self.table.placement.rows[-1].stop), slice(0, self.num_q), tokens)
        return call if call.queries == everything and call.keys[2] == tokens else None

    @cached_property
    def pairs(self) -> int:
        """Pairs of query and key that this rank computes, over heads and rows."""
        return sum(
            _size(call.queries[0])
            * _size(call.queries[1])
            * call.band.pairs(_size(call.queries[2]), _size(call.keys[2]))
            for call in self._all_calls()
        )

    def _all_calls(self) -> list[KernelCall]:
        return [call for by_sub_ring in self.calls for calls in by_sub_ring for call in calls]

    @cached_property
    def forward_rounds(self) -> tuple[Round, ...]:
        """KV that this rank receives and sends during each forward step."""
        return self._own_rounds(self.table.forward_rounds)

    @cached_property
    def backward_kv_rounds(self) -> tuple[Round, ...]:
        """KV that this rank receives and sends during each backward step."""
        return self._own_rounds(self.table.backward_kv_rounds)

    @cached_property
    def backward_grad_rounds(self) -> tuple[Round, ...]:
        """Gradients dK/dV that this rank receives and sends during each backward step."""
        return self._own_rounds(self.table.backward_grad_rounds)

    def _own_rounds(self, rounds: Sequence[Sequence[Transfer]]) -> tuple[Round, ...]:
        padded = [*rounds, *[()] * (self.size - len(rounds))]
        return tuple(
            Round(
                receives=tuple(transfer for transfer in transfers if transfer.receiver == self.position),
                sends=tuple(transfer for transfer in transfers if transfer.sender == self.position),
            )
            for transfers in padded
        )


def sent_after(rounds: Sequence[Round], step: int) -> set[int]:
    """Sources of the blocks that are sent in the rounds after ``step``."""
    return {transfer.source for later in rounds[step + 1 :] for transfer in later.sends}


def make_ring(table: RingTable, rank: int) -> Ring:
    """The part of ``rank`` in the ring."""
    schedule = table.placement.schedule
    position = schedule.ring_position(rank)
    first_q, last_q = schedule.ring_groups[position].head_range(rank)
    first_kv, _ = schedule.kv_heads(first_q, last_q)
    sub_rings = []
    for index, piece in enumerate(schedule.sub_rings):
        if piece.owners[position] != rank:
            continue
        kv0, kv1 = schedule.kv_heads(piece.start, piece.stop)
        segments = []
        for start, stop in _uniform_segments(piece.start, piece.stop, schedule.queries_per_kv_head):
            a, b = schedule.kv_heads(start, stop)
            segments.append((slice(start - first_q, stop - first_q), slice(a - kv0, b - kv0)))
        sub_rings.append(SubRing(index, piece.owners, slice(kv0 - first_kv, kv1 - first_kv), tuple(segments)))
    return Ring(table, position, last_q - first_q, tuple(sub_rings))


def _uniform_segments(start: int, stop: int, per_kv: int) -> list[tuple[int, int]]:
    """Cut query heads into at most three pieces, each with as many queries on each of its KV heads."""
    low, high = -(-start // per_kv) * per_kv, stop // per_kv * per_kv
    if low >= high:  # no whole KV head inside: at most two parts of neighbouring ones
        low = high = low if start < low < stop else stop
    return [piece for piece in ((start, low), (low, high), (high, stop)) if piece[0] < piece[1]]


def _claim(covered: list[tuple[int, int]], new: tuple[int, int]) -> bool:
    """Add a range to sorted disjoint ranges; return whether it overlaps none of them."""
    low = bisect_left(covered, new)
    if low > 0 and covered[low - 1][1] > new[0]:
        low -= 1
    high = low
    while high < len(covered) and covered[high][0] < new[1]:
        high += 1
    overlapped = covered[low:high]
    covered[low:high] = [(min(new[0], overlapped[0][0]), max(new[1], overlapped[-1][1]))] if overlapped else [new]
    return not overlapped


def _size(part: slice) -> int:
    size: int = part.stop - part.start
    return size
