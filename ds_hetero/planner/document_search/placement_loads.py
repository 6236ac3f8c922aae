"""Loads of units and nodes in a given placement, of documents or of the stream.

In the stream an interval needs the keys of its first document from that document's start, and of all others only its
own; so loads follow from the ends of the intervals, however many documents there are.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate

from ds_hetero.planner.document_search.by_heads import loads_by_heads
from ds_hetero.planner.document_search.crossing import crossing_of, in_order
from ds_hetero.planner.document_search.loads import Loads, crossing_s, loads_of
from ds_hetero.planner.document_search.remapping import loads_with_moves
from ds_hetero.planner.document_search.unit_costs import Pieces, UnitCosts
from ds_hetero.values.placement import Lane, Placement, Range


def placement_loads(placement: Placement, documents: Sequence[Range], costs: UnitCosts) -> Loads:
    """The loads of a placement of these documents, ascending and disjoint, or of the stream they are packed into."""
    if placement.moves:
        return loads_with_moves(placement_loads(placement.in_attention, documents, costs), placement, costs)
    first, *more = placement.lanes
    if not more and first.spans == ((0, placement.length),) and len(first.members) > 1 and not first.by_heads:
        return stream_loads(first, documents, costs)
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
    rings = [pieces[document] for document in documents]
    heads = next((lane.by_heads for lane in placement.lanes if lane.by_heads), ())
    loads = loads_by_heads(lengths, rings, costs, heads) if heads else loads_of(lengths, rings, costs)
    return loads.with_padding(padding, costs)


def stream_loads(lane: Lane, documents: Sequence[Range], costs: UnitCosts) -> Loads:
    """The loads of the one lane, over all units, of a stream placement of a row with these documents."""
    held: list[tuple[int, int, int]] = []
    for unit, intervals in zip(lane.members, lane.intervals, strict=True):
        held += ((start, stop, unit) for start, stop in intervals if start < stop)
    held.sort()
    units, node_of = len(costs.token_s), costs.node
    tokens, squares, received, cut_lengths = ([0] * units for _ in range(4))
    crossed, unit_end, node_end = [0] * costs.num_nodes, [0] * units, [0] * costs.num_nodes
    around = _documents_at(held, documents)
    for (first, stop, unit), (start_a, stop_a, before), (start_z, stop_z, after) in zip(
        held, around, around[1:], strict=False
    ):
        node = node_of[unit]
        tokens[unit] += stop - first
        squares[unit] += after - before
        if start_a < first < stop_a:  # needs the keys of this document that come before the interval
            received[unit] += first - max(start_a, unit_end[unit])
            crossed[node] += first - max(start_a, node_end[node])
            cut_lengths[unit] += stop_a - start_a
        if start_a != start_z < stop < stop_z:
            cut_lengths[unit] += stop_z - start_z
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
    """Tokens that enter over the link of every unit: the same share of a node's tokens as of all tokens."""
    entering = [0.0] * len(costs.node)
    if costs.num_nodes == 1:
        return entering
    ring = in_order(list(zip(lane.members, lane.tokens[0], strict=True)), costs)
    of_unit = crossing_of(ring, costs).entering
    of_node = [0.0] * costs.num_nodes
    for unit, tokens in of_unit.items():
        of_node[costs.node[unit]] += tokens
    for unit, tokens in of_unit.items():
        node = costs.node[unit]
        entering[unit] = tokens * crossed[node] / of_node[node] if of_node[node] else 0.0
    return entering


def _documents_at(held: Sequence[tuple[int, int, int]], documents: Sequence[Range]) -> list[tuple[int, int, int]]:
    """The documents at the first positions of ascending intervals that cover a row, and at the end of the last one.

    Returns:
        Of the last document that begins at or before a position: its first position, the position after its last, and
        twice the query-key pairs of all positions before this one, the square of the length for a document.
    """
    before = list(accumulate(((stop - start) * (stop - start) for start, stop in documents), initial=0))
    starts = [start for start, _ in documents]
    around = []
    for position in (*(first for first, _, _ in held), held[-1][1]):
        index = bisect_right(starts, position) - 1
        start, stop = documents[index] if index >= 0 else (0, 0)
        done = position - start
        around.append((start, stop, before[index] + done * done if position < stop else before[index + 1]))
    return around
