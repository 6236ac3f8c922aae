"""Compute the loads of the units under a given placement, of documents or of the stream.

The stream is a row that is cut by length, whatever its documents. An interval of the row needs keys of other units only
for its first document, from the start of that document on. So its loads follow from the documents at the ends of
intervals.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

from ds_hetero.planner.document_search.by_heads import loads_by_heads
from ds_hetero.planner.document_search.crossing import crossing_of, in_order
from ds_hetero.planner.document_search.loads import Loads, crossing_s, loads_of
from ds_hetero.planner.document_search.remapping import loads_with_moves
from ds_hetero.planner.document_search.unit_costs import Pieces, UnitCosts
from ds_hetero.values.placement import Lane, Placement, Range


def placement_loads(placement: Placement, documents: Sequence[Range], costs: UnitCosts) -> Loads:
    """Return the loads of a placement of documents, or of the stream that they are packed into.

    Args:
        documents: intervals of the row, ascending and disjoint.
    """
    if placement.moves:
        return loads_with_moves(placement_loads(placement.in_attention, documents, costs), placement, costs)
    first, *more = placement.lanes
    if not more and first.spans == ((0, placement.length),) and len(first.members) > 1 and not first.by_heads:
        return stream_loads(first, documents, costs)
    pieces: dict[Range, Pieces] = {}
    for lane in placement.lanes:
        for span, tokens in zip(lane.spans, lane.tokens, strict=True):
            pieces[span] = [piece for piece in zip(lane.members, tokens, strict=True) if piece[1]]
    # Spans that are not documents are padding; each is on one unit.
    document_set = set(documents)
    padding = [0] * len(costs.token_s)  # tokens, by unit
    for span, ((unit, count), *_) in pieces.items():
        if span not in document_set:
            padding[unit] += count
    lengths = [stop - start for start, stop in documents]
    rings = [pieces[document] for document in documents]
    heads = next((lane.by_heads for lane in placement.lanes if lane.by_heads), ())
    loads = loads_by_heads(lengths, rings, costs, heads) if heads else loads_of(lengths, rings, costs)
    return loads.with_padding(padding, costs)


class _UnitInterval(NamedTuple):
    """An interval of the row on one unit."""

    start: int
    stop: int
    unit: int


class _DocumentAt(NamedTuple):
    """The last document that begins at or before a position, and the query-key pairs of all earlier positions."""

    start: int  # first position of the document
    stop: int  # position after its last one
    pairs_before: int  # twice the causal query-key pairs of all positions before; a document of n tokens has n * n


def stream_loads(lane: Lane, documents: Sequence[Range], costs: UnitCosts) -> Loads:
    """Return the loads of a row that is cut by length, whatever its documents.

    Args:
        lane: the only lane of the stream, over all units.
        documents: intervals of the row, ascending and disjoint.
    """
    intervals: list[_UnitInterval] = []
    for unit, unit_intervals in zip(lane.members, lane.intervals, strict=True):
        intervals += (_UnitInterval(start, stop, unit) for start, stop in unit_intervals if start < stop)
    intervals.sort()
    num_units, node_of = len(costs.token_s), costs.node
    tokens, squares, received, cut_lengths = ([0] * num_units for _ in range(4))
    crossed = [0] * costs.num_nodes  # tokens that enter a node
    # Ends of the last interval of every unit and node. Keys of a document before this position are not received again.
    unit_end, node_end = [0] * num_units, [0] * costs.num_nodes
    boundaries = [*(interval.start for interval in intervals), intervals[-1].stop]
    documents_at = _documents_at(boundaries, documents)
    for interval, first, last in zip(intervals, documents_at, documents_at[1:], strict=False):
        start, stop, unit = interval
        node = node_of[unit]
        tokens[unit] += stop - start
        squares[unit] += last.pairs_before - first.pairs_before
        if first.start < start < first.stop:  # needs the keys of this document that come before the interval
            received[unit] += start - max(first.start, unit_end[unit])
            crossed[node] += start - max(first.start, node_end[node])
            cut_lengths[unit] += first.stop - first.start
        is_last_document_cut = last.start < stop < last.stop
        if first.start != last.start and is_last_document_cut:
            cut_lengths[unit] += last.stop - last.start
        unit_end[unit] = node_end[node] = stop
    inside_s = (count * costs.receive_s[node] for count, node in zip(received, node_of, strict=True))
    entered_s = crossing_s(crossed, _entering(lane, crossed, costs), costs)
    return Loads(
        tokens=tuple(tokens),
        linear_s=tuple(count * s for count, s in zip(tokens, costs.token_s, strict=True)),
        attention_s=tuple(square * s for square, s in zip(squares, costs.square_s, strict=True)),
        fragments_s=tuple(costs.fragment_rows / 2 * n * s for n, s in zip(cut_lengths, costs.square_s, strict=True)),
        received_s=tuple(max(s, entered_s[node]) for s, node in zip(inside_s, node_of, strict=True)),
    )


def _entering(lane: Lane, crossed: Sequence[int], costs: UnitCosts) -> list[float]:
    """Return the tokens that enter a node over each unit's link, in the ratios of a document over the whole lane.

    Args:
        crossed: tokens that enter every node.
    """
    entering = [0.0] * len(costs.node)
    if costs.num_nodes == 1:
        return entering
    ring = in_order(list(zip(lane.members, lane.tokens[0], strict=True)), costs)
    entering_by_unit = crossing_of(ring, costs).entering
    entering_by_node = [0.0] * costs.num_nodes
    for unit, tokens in entering_by_unit.items():
        entering_by_node[costs.node[unit]] += tokens
    for unit, tokens in entering_by_unit.items():
        node = costs.node[unit]
        entering[unit] = tokens * crossed[node] / entering_by_node[node] if entering_by_node[node] else 0.0
    return entering


def _documents_at(positions: Sequence[int], documents: Sequence[Range]) -> list[_DocumentAt]:
    """Return the document at every position, of ascending and disjoint documents.

    Example: documents (0, 4) and (4, 10). Position 7 is in the second one, and the pairs before it are 4 * 4 of the
    first document and 3 * 3 of the second.
    """
    pairs_before = list(accumulate(((stop - start) * (stop - start) for start, stop in documents), initial=0))
    starts = [start for start, _ in documents]
    documents_at = []
    for position in positions:
        index = bisect_right(starts, position) - 1
        start, stop = documents[index] if index >= 0 else (0, 0)
        num_earlier = position - start  # positions of the document before this one
        pairs = pairs_before[index] + num_earlier * num_earlier if position < stop else pairs_before[index + 1]
        documents_at.append(_DocumentAt(start, stop, pairs))
    return documents_at
