"""Placement: which positions of one batch every rank holds.

A schedule holds for a whole job, a placement for one batch. A `Placer` makes the placement once, before the batch is
sharded; the shards, the Ulysses all-to-alls and the ring's tables are derived from it.

    unit    an all-to-all group of the schedule, numbered by its ring position
    span    an interval of the batch's positions that is sharded over units
    lane    spans that are sharded over the same units; their KV travels between these units alone

The placement of `stream_placement` has one lane: the whole sequence is one span, sharded over all units.

With `TokenMove`, a rank has other tokens in attention than in the rest of a layer: some tokens are in the attention of
one rank, and another rank holds them everywhere else.

Nothing here imports torch.
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
"""When tokens change ranks between attention and the rest of a layer."""


class TokenMove(NamedTuple):
    """Tokens that are in the attention of one rank, and that another rank holds everywhere else.

    They are the last tokens in the attention of the first rank.
    """

    attention_rank: int  # rank whose attention has the tokens
    holder: int  # rank that holds the tokens outside attention
    tokens: int  # number of tokens


class Rows(NamedTuple):
    """Batch rows ``[start, stop)`` with the same documents; positions outside every document are padding."""

    start: int
    stop: int
    documents: tuple[Range, ...]


@dataclass(frozen=True, kw_only=True)
class Lane:
    """Spans of the batch that are sharded over the same units.

    Args:
        by_heads: query heads of every node, in the order of ``nodes``. If given, the i-th members of all nodes exchange
            heads by all-to-all, and KV stays inside nodes. Members are then all units, each a single rank, equally many
            in every node. A rank holds as many tokens as ``tokens`` says, but at other positions. Empty: KV travels
            from node to node.
    """

    members: tuple[int, ...]  # ring positions of the units, in the order in which KV travels
    spans: tuple[Range, ...]  # position intervals, ascending and disjoint
    tokens: tuple[tuple[int, ...], ...]  # whole tokens ``[span][member]``; zero is allowed
    layout: str  # how a span is sharded, one of `ds_hetero.values.schedule.LAYOUTS`
    nodes: tuple[int, ...] = ()  # node of every member, for a ring of nodes with rings inside; empty: one flat ring
    proxies: bool = False  # whether members of a node forward parts of each other's KV; see `ds_hetero.batch.routes`
    by_heads: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        assert len(self.nodes) in (0, len(self.members)), (self.nodes, self.members)
        assert set(map(len, self.tokens)) <= {len(self.members)}, (self.members, self.tokens)
        span_lengths = [stop - start for start, stop in self.spans]
        assert list(map(sum, self.tokens)) == span_lengths, (self.spans, self.tokens)

    @cached_property
    def intervals(self) -> tuple[tuple[Range, ...], ...]:
        """Position intervals of each member, ascending; some may be empty."""
        intervals: list[tuple[Range, ...]] = [()] * len(self.members)
        for (first, _), tokens in zip(self.spans, self.tokens, strict=True):
            for member, chunks in enumerate(cut_span(tokens, self.layout)):
                intervals[member] += tuple((first + start, first + stop) for start, stop in chunks)
        return tuple(intervals)

    @cached_property
    def member_tokens(self) -> tuple[int, ...]:
        """Number of tokens of every member, all spans together."""
        by_member = zip(*self.tokens, strict=True)
        return tuple(map(sum, by_member))

    def zone(self, node: Sequence[int]) -> str:
        """Return Zeppelin's zone of the lane: ``"local"`` for one unit, ``"node"`` or ``"cluster"``.

        Args:
            node: node of every unit, by ring position.
        """
        if len(self.members) == 1:
            return "local"
        nodes = {node[unit] for unit in self.members}
        return "node" if len(nodes) == 1 else "cluster"


@dataclass(frozen=True, kw_only=True)
class Placement:
    """Position intervals of one batch that every rank of a replica holds; all rows of the batch have the same.

    The tokens of a unit are ordered by lane, span and position. The unit's ranks, in ascending order, have consecutive
    parts of them in attention (`in_attention`). Outside attention a rank holds its part without the last tokens, which
    ``moves`` gives to other ranks, followed by the tokens that ``moves`` gives to it, by ascending rank.
    """

    schedule: Schedule  # the replica's schedule
    length: int  # tokens of the whole sequence
    rank_tokens: tuple[int, ...]  # whole tokens that every rank holds, in the order of ``schedule.ranks``
    lanes: tuple[Lane, ...]  # in the order in which the forward works on them; together they have every position once
    rows: tuple[Rows, ...] = ()  # rows with their documents, covering the batch in order; empty while unknown
    moves: tuple[TokenMove, ...] = ()  # tokens that change ranks for attention, ascending; no rank both gives and gets

    def __post_init__(self) -> None:
        if self.moves:
            assert list(self.moves) == sorted(self.moves) and min(move.tokens for move in self.moves) > 0, self.moves
            assert not {move.attention_rank for move in self.moves} & {move.holder for move in self.moves}, self.moves
            assert min(self.rank_tokens) >= 0, (self.rank_tokens, self.moves)
            assert self.in_attention.length == self.length  # its constructor checks the tokens of the units
            return
        unit_tokens = _unit_tokens(self.schedule, self.lanes)
        group_tokens = [self.group_tokens(position) for position in range(self.schedule.ring_size)]
        assert unit_tokens == group_tokens, (unit_tokens, self.rank_tokens)
        assert sum(unit_tokens) == self.length, (unit_tokens, self.length)

    @cached_property
    def in_attention(self) -> Placement:
        """The placement that attention works on; equal to this one if no tokens move."""
        if not self.moves:
            return self
        tokens = dict(self._tokens)
        for move in self.moves:
            tokens[move.attention_rank] += move.tokens
            tokens[move.holder] -= move.tokens
        return replace(self, rank_tokens=tuple(tokens[rank] for rank in self.schedule.ranks), moves=())

    def with_moves(self, moves: Sequence[TokenMove]) -> Placement:
        """Return the placement with ``moves`` outside attention; it must have none yet."""
        assert not self.moves, self.moves
        tokens = dict(self._tokens)
        for move in moves:
            tokens[move.attention_rank] -= move.tokens
            tokens[move.holder] += move.tokens
        rank_tokens = tuple(tokens[rank] for rank in self.schedule.ranks)
        return replace(self, rank_tokens=rank_tokens, moves=tuple(sorted(moves)))

    def tokens(self, rank: int) -> int:
        """Return the number of tokens of one row that ``rank`` holds."""
        return self._tokens[rank]

    def group_tokens(self, position: int) -> int:
        """Return the number of tokens of one row that the unit at ring position ``position`` holds."""
        return sum(map(self.tokens, self.schedule.ring_groups[position].ranks))

    def intervals(self, rank: int) -> tuple[Range, ...]:
        """Return the position intervals of ``rank`` in the order of its tokens; none is empty.

        Raises:
            ScheduleError: the schedule does not have the rank.
        """
        if rank not in self._intervals:
            raise ScheduleError(f"rank {rank} is not in the schedule, whose ranks are {self.schedule.ranks}.")
        return self._intervals[rank]

    def positions(self, rank: int) -> list[int]:
        """List every position that ``rank`` holds, in the order of its tokens."""
        return list(chain.from_iterable(range(start, stop) for start, stop in self.intervals(rank)))

    @property
    def is_stream(self) -> bool:
        """Whether the sequence was sharded by its length alone, over all units."""
        lane = self.lanes[0]
        return len(self.lanes) == 1 and len(lane.members) == self.schedule.ring_size and len(lane.spans) == 1

    def with_rows(self, rows: tuple[Rows, ...]) -> Placement:
        """Return the same placement for a batch whose rows have the documents in ``rows``."""
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
        """Runs of lanes that exchange heads over the same groups in attention; one part if no lane is ``by_heads``."""
        if self.moves:
            return self.in_attention.parts
        if not any(lane.by_heads for lane in self.lanes):
            return (PlacementPart(self, ((0, 0),)),)

        def exchanging_groups(lane: Lane) -> tuple[tuple[int, ...], tuple[int, ...]]:
            """Return the fields of a lane that decide which groups exchange heads."""
            return lane.by_heads, lane.nodes if lane.by_heads else ()

        return tuple(_make_part(self, tuple(run)) for _, run in groupby(self.lanes, key=exchanging_groups))

    @cached_property
    def _intervals(self) -> dict[int, tuple[Range, ...]]:
        """Position intervals by rank."""
        if self.moves:
            return self._moved_intervals()
        intervals: dict[int, tuple[Range, ...]] = {}
        if any(lane.by_heads for lane in self.lanes):
            for rank in self.schedule.ranks:
                intervals_by_part = (map(part.outer, part.placement.intervals(rank)) for part in self.parts)
                intervals[rank] = tuple(chain.from_iterable(intervals_by_part))
            return intervals
        unit_intervals: list[list[Range]] = [[] for _ in range(self.schedule.ring_size)]
        for lane in self.lanes:
            for position, member_intervals in zip(lane.members, lane.intervals, strict=True):
                unit_intervals[position] += member_intervals
        for group, group_intervals in zip(self.schedule.ring_groups, unit_intervals, strict=True):
            ranks = sorted(group.ranks)
            cuts = accumulate(map(self.tokens, ranks), initial=0)
            for rank, part in zip(ranks, pairwise(cuts), strict=True):
                intervals[rank] = select_tokens(group_intervals, part)
        return intervals

    def _moved_intervals(self) -> dict[int, tuple[Range, ...]]:
        """Return the intervals of every rank with moves: the tokens of its attention that it keeps, then those it gets.

        A rank with 10 tokens in attention that gives 3 to one rank and 1 to another keeps tokens 0-5; tokens 6-8 go to
        the first, token 9 to the second.
        """
        in_attention = self.in_attention.intervals
        intervals = {rank: select_tokens(in_attention(rank), (0, self.tokens(rank))) for rank in self.schedule.ranks}
        next_to_give = dict(self._tokens)  # first token of a rank's attention that has no holder yet, by rank
        for move in self.moves:
            start = next_to_give[move.attention_rank]
            stop = start + move.tokens
            intervals[move.holder] += select_tokens(in_attention(move.attention_rank), (start, stop))
            next_to_give[move.attention_rank] = stop
        return intervals


def _unit_tokens(schedule: Schedule, lanes: Sequence[Lane]) -> list[int]:
    """Count the tokens of every unit, by ring position."""
    tokens = [0] * schedule.ring_size
    for lane in lanes:
        for position, lane_tokens in zip(lane.members, lane.member_tokens, strict=True):
            tokens[position] += lane_tokens
    return tokens


class PlacementPart(NamedTuple):
    """Some lanes of a batch as a placement by itself: their spans are moved together, so that they begin at position 0.

    Example: lanes with spans [10, 14) and [20, 25) of the batch become a placement of 9 positions with spans [0, 4) and
    [4, 9).
    """

    placement: Placement  # placement of these lanes; its schedule has the groups that exchange heads
    shifts: tuple[Range, ...]  # start of every span in ``placement``, ascending, and what to add for batch positions

    def outer(self, interval: Range) -> Range:
        """Convert an interval of ``placement``, which must lie in one span, to positions of the batch."""
        shift = self.shifts[bisect_right(self.shifts, (interval[0], inf)) - 1][1]
        return interval[0] + shift, interval[1] + shift


def _make_part(whole: Placement, lanes: Sequence[Lane]) -> PlacementPart:
    """Make the `PlacementPart` of some lanes, whose units are single ranks.

    Spans [10, 14) and [20, 25) become [0, 4) and [4, 9). A document [21, 24) becomes [5, 8); a document in none of
    these spans is left out.
    """
    spans = sorted(chain.from_iterable(lane.spans for lane in lanes))
    *starts, length = accumulate((stop - start for start, stop in spans), initial=0)
    moved_spans = {}
    for (start, stop), new_start in zip(spans, starts, strict=True):
        moved_spans[start, stop] = (new_start, new_start + stop - start)

    def moved_documents(row: Rows) -> Rows:
        """Return the row with its documents at the positions to which their spans were moved."""
        documents = []
        for start, stop in row.documents:
            index = bisect_right(spans, (start, inf)) - 1
            if index >= 0 and stop <= spans[index][1]:
                shift = starts[index] - spans[index][0]
                documents.append((start + shift, stop + shift))
        return row._replace(documents=tuple(documents))

    schedule = whole.schedule
    moved_lanes = [replace(lane, spans=tuple(moved_spans[span] for span in lane.spans)) for lane in lanes]
    tokens_by_rank = {}
    for group, tokens in zip(schedule.ring_groups, _unit_tokens(schedule, lanes), strict=True):
        tokens_by_rank[group.ranks[0]] = tokens
    if lanes[0].by_heads:
        schedule = _schedule_by_heads(schedule, lanes[0])
        moved_lanes = [_lane_by_heads(lane) for lane in moved_lanes]
    placement = Placement(
        schedule=schedule,
        length=length,
        rank_tokens=tuple(tokens_by_rank[rank] for rank in schedule.ranks),
        lanes=tuple(moved_lanes),
        rows=tuple(map(moved_documents, whole.rows)),
    )
    shifts = [(new_start, start - new_start) for (start, _), new_start in zip(spans, starts, strict=True)]
    return PlacementPart(placement, tuple(shifts))


def _slots(lane: Lane) -> list[list[int]]:
    """Group the members of a lane with ``by_heads``: the i-th slot has the index of every node's i-th member."""
    by_node: dict[int, list[int]] = {}
    for index, node in enumerate(lane.nodes):
        by_node.setdefault(node, []).append(index)
    return [list(slot) for slot in zip(*by_node.values(), strict=True)]


def _schedule_by_heads(schedule: Schedule, lane: Lane) -> Schedule:
    """Return the schedule in which the i-th ranks of all nodes are a group.

    All groups split the heads at the same places, so each ring stays inside a node.
    """
    groups = []
    for slot in _slots(lane):
        ranks = tuple(schedule.ring_groups[lane.members[index]].ranks[0] for index in slot)
        groups.append(Group(ranks=ranks, tokens=(1,) * len(ranks), heads=lane.by_heads))
    ring = tuple(range(len(groups)))
    return replace(schedule, groups=tuple(groups), ring=ring)


def _lane_by_heads(lane: Lane) -> Lane:
    """Return the lane whose members are the groups of `_schedule_by_heads`."""
    slots = _slots(lane)

    def tokens_by_slot(span_tokens: Sequence[int]) -> tuple[int, ...]:
        return tuple(sum(span_tokens[index] for index in slot) for slot in slots)

    tokens = tuple(map(tokens_by_slot, lane.tokens))
    return Lane(members=tuple(range(len(slots))), spans=lane.spans, tokens=tokens, layout=lane.layout)


class Placer(Protocol):
    """Decides the placement of every batch. It is a pure function, so all ranks compute the same placement."""

    def __call__(self, schedule: Schedule, length: int, rows: tuple[Rows, ...] = ()) -> Placement:
        """Place one batch. Raises `ScheduleError`: the batch does not fit the schedule."""
        ...


@lru_cache(maxsize=64)
def stream_placement(schedule: Schedule, length: int, rows: tuple[Rows, ...] = ()) -> Placement:
    """Place a sequence by its length alone; equal arguments return the same object.

    Raises:
        ScheduleError: the sequence is too short for the schedule.
    """
    lane = Lane(
        members=tuple(range(schedule.ring_size)),
        spans=((0, length),),
        tokens=(schedule.group_tokens(length),),
        layout=schedule.layout,
    )
    rank_tokens = tuple(schedule.tokens(length).values())
    return Placement(schedule=schedule, length=length, rank_tokens=rank_tokens, lanes=(lane,), rows=rows)


def select_tokens(intervals: Sequence[Range], part: Range) -> tuple[Range, ...]:
    """Return the positions of some of the tokens in ``intervals``, as intervals.

    The positions [10, 14) and [20, 25) have 9 tokens; their tokens 3-5 are at [13, 14) and [20, 22).

    Args:
        part: first token, and token after the last one.
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
