"""Make the lanes of a `Placement` from the units and tokens of every document.

A lane is a set of documents that are cut over the same units; keys and values of a document travel round the units of
its lane. Documents that travel over proxies form a separate lane from those over the same units that do not. Lanes over
several nodes come first, then lanes inside a node, then the lane of each single unit, as in Zeppelin's three queues
(EuroSys 2026, section 3.2).

Example: units 0 and 1 are on one node, unit 2 is on another. Documents A and C are cut over units 0 and 2, B over 0 and
1; D and the padding are on unit 1. The lanes are (A, C) over 0 and 2, then (B) over 0 and 1, then (D, padding) on 1.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from ds_hetero.planner.document_search.candidates import PlacedLengths
from ds_hetero.planner.document_search.crossing import crossing_of, in_order
from ds_hetero.planner.document_search.unit_costs import Pieces, UnitCosts
from ds_hetero.values.placement import Lane, Placement, Range
from ds_hetero.values.schedule import Schedule
from ds_hetero.values.splits import share


def make_placement(
    schedule: Schedule,
    documents: Sequence[Range],
    length: int,
    placed: PlacedLengths,
    costs: UnitCosts,
    heads: tuple[int, ...] = (),
) -> Placement:
    """Return the placement of one batch row.

    Args:
        documents: intervals of the row, ascending and disjoint.
        length: tokens of the row.
        placed: units of every document with their tokens.
        heads: heads of every node, if documents over all units exchange heads between nodes; empty if they do not.
    """
    documents_by_lane: dict[_LaneKey, list[_CutDocument]] = {}
    spans_by_unit: list[list[Range]] = [[] for _ in costs.token_s]  # documents that one unit has whole, and padding
    for document, ring in zip(documents, placed.pieces, strict=True):
        if len(ring) == 1:
            ((unit, _),) = ring
            spans_by_unit[unit].append(document)
            continue
        exchanges_heads = bool(heads) and len(ring) == len(costs.node)
        ring, has_proxies = _travel_order(ring, costs, exchanges_heads)
        members, tokens = zip(*ring, strict=True)
        documents_by_lane.setdefault(_LaneKey(members, has_proxies), []).append(_CutDocument(document, tokens))
    for spans, gaps in zip(spans_by_unit, _padding(documents, length, placed.padding), strict=True):
        if gaps:
            spans += gaps
            spans.sort()
    shared_lanes = [_shared_lane(key, cut, costs, heads) for key, cut in documents_by_lane.items()]
    shared_lanes.sort(key=_lane_order)
    single_lanes = [_single_lane(unit, spans) for unit, spans in enumerate(spans_by_unit) if spans]
    return Placement(
        schedule=schedule,
        length=length,
        rank_tokens=rank_tokens(schedule, placed.loads.tokens),
        lanes=(*shared_lanes, *single_lanes),
    )


class _LaneKey(NamedTuple):
    """Units and route of a cut document; documents with equal units and routes are in one lane."""

    members: tuple[int, ...]  # units, in the order of the ring
    has_proxies: bool  # whether keys and values travel over proxies


class _CutDocument(NamedTuple):
    """A document that is cut over the units of a lane."""

    span: Range
    tokens: tuple[int, ...]  # tokens on every unit, in the order of the ring; 0 on proxies without a part of it


def _travel_order(ring: Pieces, costs: UnitCosts, exchanges_heads: bool) -> tuple[Pieces, bool]:
    """Return a document's units in ring order, and whether its keys and values travel over proxies.

    Proxies that have no part of the document are in the ring with 0 tokens.
    """
    ring = in_order(ring, costs)
    (first, _), (last, _) = ring[0], ring[-1]
    if costs.node[first] == costs.node[last] or exchanges_heads:
        return ring, False
    crossing = crossing_of(ring, costs)
    outside = [(unit, 0) for unit in crossing.outside]
    return in_order([*ring, *outside], costs), crossing.proxies


def _padding(documents: Sequence[Range], length: int, num_tokens: Sequence[int]) -> list[list[Range]]:
    """Divide the positions outside every document over units; unit u gets ``num_tokens[u]`` of them.

    Units get positions in ascending order. Example: a row of 10 tokens with one document (2, 6), and 3 tokens for each
    of two units. Unit 0 gets (0, 2) and (6, 7), unit 1 gets (7, 10).
    """
    gaps_by_unit: list[list[Range]] = [[] for _ in num_tokens]
    if not any(num_tokens):
        return gaps_by_unit
    unit, unit_needs = -1, 0  # the unit that gets positions, and how many it still gets
    position = 0  # all positions before are in documents, or divided
    for start, stop in (*documents, (length, length)):
        while position < start:
            while not unit_needs:
                unit += 1
                unit_needs = num_tokens[unit]
            count = min(unit_needs, start - position)
            gaps_by_unit[unit].append((position, position + count))
            position += count
            unit_needs -= count
        position = stop
    return gaps_by_unit


def _shared_lane(key: _LaneKey, documents: Sequence[_CutDocument], costs: UnitCosts, heads: tuple[int, ...]) -> Lane:
    """Make the lane of documents that are cut over the same units.

    Its layout is zigzag, in which a unit's causal work is proportional to its tokens.
    """
    exchanges_heads = len(key.members) == len(costs.node) and not key.has_proxies
    return Lane(
        members=key.members,
        spans=tuple(document.span for document in documents),
        tokens=tuple(document.tokens for document in documents),
        layout="zigzag",
        nodes=tuple(costs.node[unit] for unit in key.members),
        proxies=key.has_proxies,
        by_heads=heads if exchanges_heads else (),
    )


def _lane_order(lane: Lane) -> tuple[object, ...]:
    """Sort key: lanes over several nodes first, of these the ones that exchange heads; then by longest document."""
    is_inside_node = lane.nodes[0] == lane.nodes[-1]
    negative_longest = min(start - stop for start, stop in lane.spans)
    return is_inside_node, not lane.by_heads, negative_longest, lane.members, lane.proxies


def _single_lane(unit: int, spans: Sequence[Range]) -> Lane:
    """Make the lane of the documents, and the padding, on one unit."""
    tokens = tuple([(stop - start,) for start, stop in spans])
    return Lane(members=(unit,), spans=tuple(spans), tokens=tokens, layout="contiguous")


def rank_tokens(schedule: Schedule, unit_tokens: Sequence[int]) -> tuple[int, ...]:
    """Share the tokens of every unit over its ranks by their weights; return tokens in the order of the ranks."""
    tokens_of_rank: dict[int, int] = {}
    for group, count in zip(schedule.ring_groups, unit_tokens, strict=True):
        weights = group.tokens if group.weight else (1.0,) * len(group.ranks)
        shares = (count,) if len(weights) == 1 else share(count, weights)
        tokens_of_rank |= dict(zip(group.ranks, shares, strict=True))
    return tuple(tokens_of_rank[rank] for rank in schedule.ranks)
