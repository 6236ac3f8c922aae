"""One rank in the rings of its lanes, in integers: which kernel calls it makes, what it sends and receives, by step.

A `Ring` is made once per batch layout and kind of mask, and used by every layer. It has slices and bands; nothing here
touches a tensor.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate
from typing import Any, NamedTuple, TypeGuard

from ds_hetero.batch.ring_table import RingTable
from ds_hetero.batch.routes import Round
from ds_hetero.batch.tiles import Band
from ds_hetero.values.schedule import Schedule


class KernelCall(NamedTuple):
    """One kernel call. ``queries``: index into this rank's [B, h, S, ...] tensors of the lane: rows, heads, tokens."""

    queries: tuple[slice, slice, slice]
    keys: tuple[slice, slice, slice]  # index into one sub-ring's [B, heads, tokens, D] keys and values
    band: Band  # which of these keys the queries see
    first: bool  # whether no earlier call of the forward has any of these queries


@dataclass(frozen=True)
class SubRing:
    """This rank's part in one sub-ring task."""

    tag: int  # of its messages; the same on all its ranks, and of no other task of the placement
    ranks: tuple[int, ...]  # global rank at every position of the lane's ring
    kv_heads: slice  # this task's KV heads among those of this rank
    segments: tuple[tuple[slice, slice], ...]  # (query heads here, KV heads of the task), evenly many queries each


@dataclass(frozen=True, eq=False)
class Ring:
    """Ring steps of one rank for one lane, of one batch layout and for one kind of mask.

    Args:
        prepared: what `ds_hetero.runtime.attention.ring` makes of ``calls``, kept here for every layer.
    """

    table: RingTable  # blocks and transfers of all members of the lane
    position: int  # of this rank's group among the members
    tokens: slice  # of the group that are of this lane
    num_q: int  # query heads of this rank
    sub_rings: tuple[SubRing, ...]  # in which this rank takes part
    prepared: dict[tuple[int, bool], Any] = field(default_factory=dict, repr=False)

    @property
    def size(self) -> int:
        """Members of the lane: K."""
        return self.table.size

    @property
    def steps(self) -> int:
        """Steps of the forward, and of the backward."""
        return self.table.steps

    def forward_source(self, step: int) -> int | None:
        """Ring position whose KV forward step ``step`` works on: its own first; None where nobody's."""
        return self.table.forward_source(self.position, step)

    def backward_source(self, step: int) -> int | None:
        """Ring position whose KV backward step ``step`` works on: its own last; None where nobody's."""
        return self.table.forward_source(self.position, self.steps - 1 - step)

    @property
    def kept(self) -> int | None:
        """Ring position whose KV stays here from the forward to the backward."""
        return self.table.kept(self.position)

    def num_columns(self, source: int) -> int:
        """Travelling tokens of a group."""
        return sum(stop - start for start, stop in self.table.columns(source))

    @cached_property
    def calls(self) -> tuple[tuple[tuple[KernelCall, ...], ...], ...]:
        """Kernel calls ``[source][sub-ring]``, in the order of the forward steps."""
        covered: dict[tuple[int, int], list[tuple[int, int]]] = defaultdict(list)  # queries by first head and first row
        by_source: dict[int, tuple[tuple[KernelCall, ...], ...]] = {}
        for source in filter(_is_there, map(self.forward_source, range(self.steps))):
            by_source[source] = tuple(tuple(self._calls_of(source, sub, covered)) for sub in self.sub_rings)
        return tuple(by_source[source] for source in range(self.size))

    def _calls_of(
        self, source: int, sub: SubRing, covered: dict[tuple[int, int], list[tuple[int, int]]]
    ) -> Iterator[KernelCall]:
        packed = _Packed(() if source == self.position else self.table.columns(source))
        for q_heads, kv_heads in sub.segments:
            for rows, blocks in self.table.blocks(self.position, source):
                batch = slice(rows.start, rows.stop)
                for block in blocks:
                    yield KernelCall(
                        queries=(batch, q_heads, slice(*block.q)),
                        keys=(batch, kv_heads, packed.place(block.k)),
                        band=Band(block.lo, block.hi),
                        first=_claim(covered[q_heads.start, rows.start], block.q),
                    )

    @cached_property
    def undivided(self) -> KernelCall | None:
        """The one call that computes everything, or None if there are more."""
        if self.size > 1 or len(all_calls := self._all_calls()) != 1:
            return None
        (call,) = all_calls
        tokens = slice(0, self.tokens.stop - self.tokens.start)
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
        return self.table.forward_rounds(self.position)

    @cached_property
    def backward_kv_rounds(self) -> tuple[Round, ...]:
        """KV that this rank receives and sends during each backward step."""
        return self.table.backward_kv_rounds(self.position)

    @cached_property
    def backward_grad_rounds(self) -> tuple[Round, ...]:
        """Gradients dK/dV that this rank receives and sends during each backward step."""
        return self.table.backward_grad_rounds(self.position)

    @cached_property
    def needed_after_forward_step(self) -> tuple[frozenset[int], ...]:
        """Sources whose KV this rank works on, or sends, after each forward step, or keeps for the backward."""
        sources = list(map(self.forward_source, range(self.steps)))
        return self._needed_after(sources, self.forward_rounds, self.kept)

    @cached_property
    def needed_after_backward_step(self) -> tuple[frozenset[int], ...]:
        """Sources whose KV this rank works on, or sends, after each backward step."""
        sources = list(map(self.backward_source, range(self.steps)))
        return self._needed_after(sources, self.backward_kv_rounds, None)

    def _needed_after(
        self, sources: Sequence[int | None], rounds: Sequence[Round], at_the_end: int | None
    ) -> tuple[frozenset[int], ...]:
        """Its own KV is only needed to be sent: it works on that where it lies."""
        later = {at_the_end}
        needed = []
        for source, round_ in zip(reversed(sources), reversed(rounds), strict=True):
            needed.append(frozenset(filter(_is_there, later)))
            later |= {source} - {self.position} | {transfer.source for transfer in round_.sends}
        return tuple(reversed(needed))


def _is_there(source: int | None) -> TypeGuard[int]:
    return source is not None


class _Packed:
    """Where local ranges lie once the ``columns`` are put one behind the other; without columns, where they are."""

    def __init__(self, columns: Sequence[tuple[int, int]]) -> None:
        self._starts = [start for start, _ in columns] or [0]
        sizes = (stop - start for start, stop in columns)
        self._offsets = [at - start for at, start in zip(accumulate(sizes, initial=0), self._starts, strict=False)]

    def place(self, part: tuple[int, int]) -> slice:
        offset = self._offsets[bisect_right(self._starts, part[0]) - 1]
        return slice(part[0] + offset, part[1] + offset)


def make_rings(tables: Sequence[RingTable], rank: int) -> tuple[Ring, ...]:
    """Rings of a global ``rank`` in the lanes that its group has a part in; tables by lane of the placement."""
    schedule = tables[0].placement.schedule
    unit = schedule.ring_position(rank)
    rings, start = [], 0
    for number, table in enumerate(tables):
        if unit in table.lane.members:
            position = table.lane.members.index(unit)
            stop = start + sum(tokens[position] for tokens in table.lane.tokens)
            first_q, last_q = schedule.ring_groups[unit].head_range(rank)
            sub_rings = _sub_rings(schedule, table.lane.members, rank, number)
            rings.append(Ring(table, position, slice(start, stop), last_q - first_q, sub_rings))
            start = stop
    return tuple(rings)


def _sub_rings(schedule: Schedule, members: tuple[int, ...], rank: int, number: int) -> tuple[SubRing, ...]:
    """The tasks of ``rank`` in the lane of that number."""
    groups = [schedule.ring_groups[member] for member in members]
    first_q, last_q = next(group.head_range(rank) for group in groups if rank in group.ranks)
    first_kv, _ = schedule.kv_heads(first_q, last_q)
    sub_rings = []
    for index, piece in enumerate(schedule.sub_ring_tasks(members)):
        if rank not in piece.owners:
            continue
        kv0, kv1 = schedule.kv_heads(piece.start, piece.stop)
        segments = []
        for start, stop in _uniform_segments(piece.start, piece.stop, schedule.queries_per_kv_head):
            a, b = schedule.kv_heads(start, stop)
            segments.append((slice(start - first_q, stop - first_q), slice(a - kv0, b - kv0)))
        tag = number * schedule.num_heads + index  # a lane has at most as many tasks as heads
        sub_rings.append(SubRing(tag, piece.owners, slice(kv0 - first_kv, kv1 - first_kv), tuple(segments)))
    return tuple(sub_rings)


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
