"""What units and nodes do in a given placement: of documents, or of the stream.

In the stream an interval needs the keys of its first document from that document's start, and of all others only its
own; so loads follow from the ends of the intervals, however many documents there are.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate

from ds_hetero.placement import Lane, Placement, Range
from ds_hetero.planner.documents.bins import Pieces
from ds_hetero.planner.documents.costs import UnitCosts
from ds_hetero.planner.documents.score import FRAGMENT_ROWS, Loads, loads_of

__all__ = ["placement_loads", "stream_loads"]


def placement_loads(placement: Placement, documents: Sequence[Range], costs: UnitCosts) -> Loads:
    """The loads of a placement of these documents, or of the stream that they are packed into.

    Args:
        placement: of one batch row.
        documents: intervals of the row, ascending and disjoint.
        costs: of the units.
    """
    if [lane.spans for lane in placement.lanes] == [((0, placement.length),)] and len(placement.lanes[0].members) > 1:
        return stream_loads(placement.lanes[0], documents, costs)
    pieces: dict[Range, Pieces] = {}
    for lane in placement.lanes:
        for span, tokens in zip(lane.spans, lane.tokens, strict=True):
            pieces[span] = [piece for piece in zip(lane.members, tokens, strict=True) if piece[1]]
    known = set(documents)
    padding = [0] * len(costs.token_s)
    for span, ((unit, count), *_) in pieces.items():
        if span not in known:
            padding[unit] += count
    lengths = [stop - start for start, stop in documents]
    return loads_of(lengths, [pieces[document] for document in documents], costs).with_padding(padding, costs)


def stream_loads(lane: Lane, documents: Sequence[Range], costs: UnitCosts) -> Loads:
    """The loads of the one lane of a stream placement, over all units.

    Args:
        lane: the whole row, cut over all units.
        documents: intervals of the row, ascending and disjoint.
        costs: of the units.
    """
    view = _Documents(documents)
    nodes: list[list[Range]] = [[] for _ in range(costs.num_nodes)]
    tokens, squares, received, cut_lengths = ([0] * len(costs.token_s) for _ in range(4))
    for unit, intervals in zip(lane.members, lane.intervals, strict=True):
        held = [interval for interval in intervals if interval[0] < interval[1]]
        nodes[costs.node[unit]] += held
        tokens[unit] = sum(stop - start for start, stop in held)
        squares[unit] = sum(view.squares(stop) - view.squares(start) for start, stop in held)
        received[unit] = view.missing(held)
        cut_lengths[unit] = sum(view.cut_length(start, stop) for start, stop in held) // 2
    crossed = [view.missing(sorted(intervals)) for intervals in nodes]
    inside_s = (count * costs.receive_s[node] for count, node in zip(received, costs.node, strict=True))
    return Loads(
        tokens=tuple(tokens),
        linear_s=tuple(count * s for count, s in zip(tokens, costs.token_s, strict=True)),
        attention_s=tuple(square * s for square, s in zip(squares, costs.square_s, strict=True)),
        fragments_s=tuple(FRAGMENT_ROWS * n * s for n, s in zip(cut_lengths, costs.square_s, strict=True)),
        received_s=tuple(
            max(s, crossed[node] * costs.cross_s[node]) for s, node in zip(inside_s, costs.node, strict=True)
        ),
        received_tokens=sum(received),
        crossing_tokens=sum(crossed),
    )


class _Documents:
    """Documents of a row, asked by position."""

    def __init__(self, documents: Sequence[Range]) -> None:
        self._documents = documents
        self._starts = [start for start, _ in documents]
        self._squares = list(accumulate(((stop - start) ** 2 for start, stop in documents), initial=0))

    def _around(self, position: int) -> tuple[int, Range]:
        """Index and interval of the last document that begins at or before a position."""
        index = bisect_right(self._starts, position) - 1
        return index, self._documents[index] if index >= 0 else (0, 0)

    def squares(self, position: int) -> int:
        """Twice the query-key pairs of all positions before this one: the square of the length of every document."""
        index, (start, stop) = self._around(position)
        if position >= stop:
            return self._squares[index + 1]
        return self._squares[index] + (position - start) ** 2

    def missing(self, intervals: Sequence[Range]) -> int:
        """Positions whose keys the queries in ascending, disjoint intervals need and that lie in none of them."""
        count = end = 0
        for first, stop in intervals:
            _, (start, last) = self._around(first)
            if first < last:
                count += first - max(start, end)
            end = stop
        return count

    def cut_length(self, first: int, stop: int) -> int:
        """Lengths of the documents, at most two, that the ends of an interval cut."""
        cut = {index: last - start for index, (start, last), at in self._ends(first, stop) if start < at < last}
        return sum(cut.values())

    def _ends(self, *positions: int) -> list[tuple[int, Range, int]]:
        return [(*self._around(position), position) for position in positions]
