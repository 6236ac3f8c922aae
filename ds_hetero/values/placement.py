"""The placement: which positions of one batch every rank holds.

A schedule holds for a whole job, a placement for one batch. A `Placer` makes it once, before the batch is cut; the
shards, the exchange of heads and the ring's tables follow from it, and nothing derives it a second time.

    unit    an all-to-all group of the schedule, by its ring position
    span    an interval of the batch's positions that is cut over units
    lane    spans that are cut over the same units; KV travels round these and no others

That of `stream_placement` has one lane, in which the whole sequence is one span, cut over all units.

Where tokens move, attention and everything else have placements of their own: a rank holds some tokens that another
rank attends to, see `TokenMove`.

Plain integers; nothing here imports torch.
"""

from __future__ import annotations

import hashlib
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property, lru_cache
from itertools import accumulate, chain, groupby, pairwise
from math import inf
from typing import Literal, NamedTuple, Protocol

from ds_hetero.errors import ScheduleError
from ds_hetero.values.schedule import Group, Schedule, cut_span

Range = tuple[int, int]

RemapWish = Literal["where_faster", "always", "never"]
"""Whether tokens change ranks between attention and what is outside it."""


class TokenMove(NamedTuple):
    """Tokens that are in one rank's attention, and with another rank everywhere else; the last that the first has."""

    attends: int  # the rank whose attention they are in
    holds: int  # the rank that has them outside attention
    tokens: int


class Rows(NamedTuple):
    """Batch rows ``[start, stop)`` with the same documents; positions outside every document are padding."""

    start: int
    stop: int
    documents: tuple[Range, ...]


@dataclass(frozen=True, kw_only=True)
class Lane:
    """Spans of the batch that are cut over the same units.

    Args:
        by_heads: heads of every node, in the order of ``nodes``; the i-th members of all nodes exchange heads, and KV
            stays inside nodes. Empty: KV goes from node to node. Members are then all units, each a rank, as many in
            every node; a rank holds the same number of tokens of the lanes by heads, but others than ``tokens`` says.
    """

    members: tuple[int, ...]  # ring positions of the units, in the order in which KV travels
    spans: tuple[Range, ...]  # position intervals, ascending and disjoint
    tokens: tuple[tuple[int, ...], ...]  # whole tokens ``[span][member]``; zero is allowed
    layout: str  # how a span is cut, one of `ds_hetero.values.schedule.LAYOUTS`
    nodes: tuple[int, ...] = ()  # node of every member, if KV goes round nodes and inside; empty: one ring over all
    proxies: bool = False  # members of nodes that do not pair up send for one another; see `ds_hetero.batch.routes`
    by_heads: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        assert len(self.nodes) in (0, len(self.members)), (self.nodes, self.members)
        assert set(map(len, self.tokens)) <= {len(self.members)}, (self.members, self.tokens)
        span_lengths = [stop - start for start, stop in self.spans]
        assert list(map(sum, self.tokens)) == span_lengths, (self.spans, self.tokens)

    @cached_property
    def intervals(self) -> tuple[tuple[Range, ...], ...]:
        """Position intervals that each member holds, ascending; some may be empty."""
        intervals: list[tuple[Range, ...]] = [()] * len(self.members)
        for (first, _), tokens in zip(self.spans, self.tokens, strict=True):
            for member, chunks in enumerate(cut_span(tokens, self.layout)):
                intervals[member] += tuple((first + start, first + stop) for start, stop in chunks)
        return tuple(intervals)

    @cached_property
    def member_tokens(self) -> tuple[int, ...]:
        """Tokens of every member, of all spans."""
        by_member = zip(*self.tokens, strict=True)
        return tuple(map(sum, by_member))

    def zone(self, node: Sequence[int]) -> str:
        """Return Zeppelin's zone of the lane: ``"local"`` for one unit, ``"node"`` or ``"cluster"``.

        Args:
            node: of every unit, by ring position.
        """
        if len(self.members) == 1:
            return "local"
        nodes = {node[unit] for unit in self.members}
        return "node" if len(nodes) == 1 else "cluster"


@dataclass(frozen=True, kw_only=True)
class Placement:
    """Which position intervals of one batch every rank of a replica holds; the same in every row of the batch.

    A unit's tokens are ordered by lane, span and position. Its ranks hold consecutive parts of that order, by
    ascending rank; that is `in_attention`. Of these a rank holds all but the last, which are in ``moves``, and behind
    them what it takes over from others, by ascending rank.
    """

    schedule: Schedule  # the replica's schedule
    length: int  # tokens of the whole sequence
    rank_tokens: tuple[int, ...]  # whole tokens that every rank holds, in the order of ``schedule.ranks``
    lanes: tuple[Lane, ...]  # in the order in which the forward works on them; together they hold every position once
    rows: tuple[Rows, ...] = ()  # rows with their documents, covering the batch in order; empty while not known
    moves: tuple[TokenMove, ...] = ()  # tokens that change ranks for attention, ascending; a rank takes over or gives

    def __post_init__(self) -> None:
        if self.moves:
            assert list(self.moves) == sorted(self.moves) and min(move.tokens for move in self.moves) > 0, self.moves
            assert not {move.attends for move in self.moves} & {move.holds for move in self.moves}, self.moves
            assert min(self.rank_tokens) >= 0, (self.rank_tokens, self.moves)
            assert self.in_attention.length == self.length  # the tokens of its units are checked
            return
        unit_tokens = _unit_tokens(self.schedule, self.lanes)
        of_ranks = [self.group_tokens(position) for position in range(self.schedule.ring_size)]
        assert unit_tokens == of_ranks, (unit_tokens, self.rank_tokens)
        assert sum(unit_tokens) == self.length, (unit_tokens, self.length)

    @cached_property
    def in_attention(self) -> Placement:
        """The placement that attention works on: itself where no tokens move."""
        if not self.moves:
            return self
        tokens = dict(self._tokens)
        for move in self.moves:
            tokens[move.attends] += move.tokens
            tokens[move.holds] -= move.tokens
        return replace(self, rank_tokens=tuple(tokens[rank] for rank in self.schedule.ranks), moves=())

    def with_moves(self, moves: Sequence[TokenMove]) -> Placement:
        """Return the placement with tokens that other ranks hold outside attention; it must have no moves yet."""
        assert not self.moves, self.moves
        tokens = dict(self._tokens)
        for move in moves:
            tokens[move.attends] -= move.tokens
            tokens[move.holds] += move.tokens
        rank_tokens = tuple(tokens[rank] for rank in self.schedule.ranks)
        return replace(self, rank_tokens=rank_tokens, moves=tuple(sorted(moves)))

    def tokens(self, rank: int) -> int:
        """Tokens of one row that ``rank`` holds."""
        return self._tokens[rank]

    def group_tokens(self, position: int) -> int:
        """Tokens of one row that the unit at ring position ``position`` holds."""
        return sum(map(self.tokens, self.schedule.ring_groups[position].ranks))

    def intervals(self, rank: int) -> tuple[Range, ...]:
        """Position intervals of ``rank`` in its tokens' order, none empty. Raises `ScheduleError`: an unknown rank."""
        if rank not in self._intervals:
            raise ScheduleError(f"rank {rank} is not in the schedule, whose ranks are {self.schedule.ranks}.")
        return self._intervals[rank]

    def positions(self, rank: int) -> list[int]:
        """Every position that ``rank`` holds, in the order of its tokens."""
        return list(chain.from_iterable(range(start, stop) for start, stop in self.intervals(rank)))

    @property
    def is_stream(self) -> bool:
        """Whether the sequence was cut by its length alone, over all units."""
        lane = self.lanes[0]
        return len(self.lanes) == 1 and len(lane.members) == self.schedule.ring_size and len(lane.spans) == 1

    def with_rows(self, rows: tuple[Rows, ...]) -> Placement:
        """Return the placement for a batch whose documents are known."""
        return replace(self, rows=rows)

    @cached_property
    def fingerprint(self) -> int:
        """63-bit hash, compared between ranks before the first collective that depends on the placement."""
        lanes = [tuple(getattr(lane, field.name) for field in fields(lane)) for lane in self.lanes]
        text = repr((self.schedule.fingerprint, self.length, self.rank_tokens, lanes, self.rows, self.moves))
        return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1

    @cached_property
    def _tokens(self) -> dict[int, int]:
        return dict(zip(self.schedule.ranks, self.rank_tokens, strict=True))

    @cached_property
    def parts(self) -> tuple[PlacementPart, ...]:
        """Runs of lanes that exchange heads over the same groups, as attention has them; one where all do as usual."""
        if self.moves:
            return self.in_attention.parts
        if not any(lane.by_heads for lane in self.lanes):
            return (PlacementPart(self, ((0, 0),)),)

        def exchange(lane: Lane) -> tuple[tuple[int, ...], tuple[int, ...]]:
            """Properties of a lane that decide which groups exchange heads."""
            return lane.by_heads, lane.nodes if lane.by_heads else ()

        return tuple(_part_of(self, tuple(run)) for _, run in groupby(self.lanes, key=exchange))

    @cached_property
    def _intervals(self) -> dict[int, tuple[Range, ...]]:
        if self.moves:
            return self._moved_intervals()
        intervals: dict[int, tuple[Range, ...]] = {}
        if any(lane.by_heads for lane in self.lanes):
            for rank in self.schedule.ranks:
                of_parts = (map(part.outer, part.placement.intervals(rank)) for part in self.parts)
                intervals[rank] = tuple(chain.from_iterable(of_parts))
            return intervals
        unit_intervals: list[list[Range]] = [[] for _ in range(self.schedule.ring_size)]
        for lane in self.lanes:
            for position, of_member in zip(lane.members, lane.intervals, strict=True):
                unit_intervals[position] += of_member
        for group, of_unit in zip(self.schedule.ring_groups, unit_intervals, strict=True):
            ranks = sorted(group.ranks)
            cuts = accumulate(map(self.tokens, ranks), initial=0)
            for rank, part in zip(ranks, pairwise(cuts), strict=True):
                intervals[rank] = _part(of_unit, part)
        return intervals

    def _moved_intervals(self) -> dict[int, tuple[Range, ...]]:
        """Intervals of every rank: the tokens of its attention that it keeps, then those that it takes over.

        A rank with 10 tokens in attention that gives 3 and then 1 away keeps the first 6 of them; [6, 9) and [9, 10)
        go.
        """
        in_attention = self.in_attention.intervals
        intervals = {rank: _part(in_attention(rank), (0, self.tokens(rank))) for rank in self.schedule.ranks}
        next_to_give = dict(self._tokens)  # the first of a rank's tokens in attention that has no holder yet
        for move in self.moves:
            start = next_to_give[move.attends]
            stop = start + move.tokens
            intervals[move.holds] += _part(in_attention(move.attends), (start, stop))
            next_to_give[move.attends] = stop
        return intervals


def _unit_tokens(schedule: Schedule, lanes: Sequence[Lane]) -> list[int]:
    """Tokens of every unit, by ring position."""
    tokens = [0] * schedule.ring_size
    for lane in lanes:
        for position, more in zip(lane.members, lane.member_tokens, strict=True):
            tokens[position] += more
    return tokens


class PlacementPart(NamedTuple):
    """Some lanes of a placement as one of their own, whose positions are those of their spans one behind the other."""

    placement: Placement  # of these lanes; its schedule has the groups that exchange heads
    shifts: tuple[Range, ...]  # where spans begin in ``placement``, ascending, with what to add for own positions

    def outer(self, interval: Range) -> Range:
        """The positions of an interval of ``placement`` that lies in one span."""
        shift = self.shifts[bisect_right(self.shifts, (interval[0], inf)) - 1][1]
        return interval[0] + shift, interval[1] + shift


def _part_of(whole: Placement, lanes: Sequence[Lane]) -> PlacementPart:
    """Return a placement of some lanes, whose units are single ranks, in which their spans follow one another.

    Spans [10, 14) and [20, 25) become [0, 4) and [4, 9); a document [21, 24) becomes [5, 8), and one that lies in no
    span of these lanes is left out.
    """
    spans = sorted(chain.from_iterable(lane.spans for lane in lanes))
    *starts, length = accumulate((stop - start for start, stop in spans), initial=0)
    moved_spans = {span: (at, at + span[1] - span[0]) for span, at in zip(spans, starts, strict=True)}

    def moved_documents(row: Rows) -> Rows:
        documents = []
        for start, stop in row.documents:
            index = bisect_right(spans, (start, inf)) - 1
            if index >= 0 and stop <= spans[index][1]:
                shift = starts[index] - spans[index][0]
                documents.append((start + shift, stop + shift))
        return row._replace(documents=tuple(documents))

    schedule = whole.schedule
    moved_lanes = [replace(lane, spans=tuple(moved_spans[span] for span in lane.spans)) for lane in lanes]
    tokens_of_rank = {}
    for group, tokens in zip(schedule.ring_groups, _unit_tokens(schedule, lanes), strict=True):
        tokens_of_rank[group.ranks[0]] = tokens
    if lanes[0].by_heads:
        schedule = _schedule_by_heads(schedule, lanes[0])
        moved_lanes = [_lane_by_heads(lane) for lane in moved_lanes]
    placement = Placement(
        schedule=schedule,
        length=length,
        rank_tokens=tuple(tokens_of_rank[rank] for rank in schedule.ranks),
        lanes=tuple(moved_lanes),
        rows=tuple(map(moved_documents, whole.rows)),
    )
    shifts = [(at, span[0] - at) for span, at in zip(spans, starts, strict=True)]
    return PlacementPart(placement, tuple(shifts))


def _slots(lane: Lane) -> list[list[int]]:
    """Indices of the members of a lane by heads: the i-th of every node, in the order of ``by_heads``."""
    by_node: dict[int, list[int]] = {}
    for index, node in enumerate(lane.nodes):
        by_node.setdefault(node, []).append(index)
    return [list(slot) for slot in zip(*by_node.values(), strict=True)]


def _schedule_by_heads(schedule: Schedule, lane: Lane) -> Schedule:
    """The i-th ranks of all nodes are a group; all groups cut the heads alike, so that rings stay inside nodes."""
    groups = []
    for slot in _slots(lane):
        ranks = tuple(schedule.ring_groups[lane.members[index]].ranks[0] for index in slot)
        groups.append(Group(ranks=ranks, tokens=(1,) * len(ranks), heads=lane.by_heads))
    ring = tuple(range(len(groups)))
    return replace(schedule, groups=tuple(groups), ring=ring)


def _lane_by_heads(lane: Lane) -> Lane:
    """The lane over the groups of `_schedule_by_heads`."""
    slots = _slots(lane)

    def by_slot(span_tokens: Sequence[int]) -> tuple[int, ...]:
        return tuple(sum(span_tokens[index] for index in slot) for slot in slots)

    tokens = tuple(map(by_slot, lane.tokens))
    return Lane(members=tuple(range(len(slots))), spans=lane.spans, tokens=tokens, layout=lane.layout)


class Placer(Protocol):
    """Decides the placement of every batch: a pure function, so that all ranks come to the same one."""

    def __call__(self, schedule: Schedule, length: int, rows: tuple[Rows, ...] = ()) -> Placement:
        """Place one batch. Raises `ScheduleError`: the batch does not fit the schedule."""
        ...


@lru_cache(maxsize=64)
def stream_placement(schedule: Schedule, length: int, rows: tuple[Rows, ...] = ()) -> Placement:
    """Cut the sequence by its length; equal arguments give the same object. Raises `ScheduleError`: too short."""
    lane = Lane(
        members=tuple(range(schedule.ring_size)),
        spans=((0, length),),
        tokens=(schedule.group_tokens(length),),
        layout=schedule.layout,
    )
    rank_tokens = tuple(schedule.tokens(length).values())
    return Placement(schedule=schedule, length=length, rank_tokens=rank_tokens, lanes=(lane,), rows=rows)


def _part(intervals: Sequence[Range], part: Range) -> tuple[Range, ...]:
    """Tokens ``part`` of those in ``intervals``, counted in their order.

    Tokens [3, 6) of [10, 14) and [20, 25) are [13, 14) and [20, 22).
    """
    part_start, part_stop = part
    ranges, counted = [], 0
    for start, stop in intervals:
        first = start + max(part_start - counted, 0)
        last = min(start + part_stop - counted, stop)
        if first < last:
            ranges.append((first, last))
        counted += stop - start
    return tuple(ranges)
