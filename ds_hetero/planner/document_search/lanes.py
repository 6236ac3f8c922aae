"""From units and tokens of every document to the lanes of a `Placement`.

Documents over the same units are one lane; of those over several nodes the ones that need proxies are another. Lanes
between nodes come first, then those inside a node, then the lane of each single unit: Zeppelin's three queues (EuroSys
2026, section 3.2).
"""

from __future__ import annotations

from collections.abc import Sequence

from ds_hetero.planner.document_search.candidates import PlacedLengths
from ds_hetero.planner.document_search.crossing import crossing_of, in_order
from ds_hetero.planner.document_search.unit_costs import UnitCosts
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
    """The placement of one batch row.

    Args:
        documents: intervals of the row, ascending and disjoint.
        placed: units of every document with their tokens.
        heads: of every node, where documents over all units exchange heads between nodes.
    """
    cut: dict[tuple[tuple[int, ...], bool], list[tuple[Range, tuple[int, ...]]]] = {}
    local: list[list[Range]] = [[] for _ in costs.token_s]
    node = costs.node
    for document, ring in zip(documents, placed.pieces, strict=True):
        if len(ring) == 1:
            local[ring[0][0]].append(document)
            continue
        ring = in_order(ring, costs)
        proxies = False
        if node[ring[0][0]] != node[ring[-1][0]] and not (heads and len(ring) == len(node)):
            crossing = crossing_of(ring, costs)
            proxies, ring = crossing.proxies, in_order([*ring, *((unit, 0) for unit in crossing.outside)], costs)
        members, tokens = zip(*ring, strict=True)
        cut.setdefault((members, proxies), []).append((document, tokens))
    for spans, gaps in zip(local, _padding(documents, length, placed.padding), strict=True):
        if gaps:
            spans += gaps
            spans.sort()
    lanes = [
        Lane(
            members=members,
            spans=tuple(span for span, _ in spans),
            tokens=tuple(tokens for _, tokens in spans),
            layout="zigzag",
            nodes=tuple(node[unit] for unit in members),
            proxies=proxies,
            by_heads=heads if len(members) == len(costs.node) and not proxies else (),
        )
        for (members, proxies), spans in cut.items()
    ]
    lanes.sort(
        key=lambda lane: (
            lane.nodes[0] == lane.nodes[-1],
            not lane.by_heads,
            min(start - stop for start, stop in lane.spans),  # longest first
            lane.members,
            lane.proxies,
        )
    )
    lanes += [
        Lane(
            members=(unit,),
            spans=tuple(spans),
            tokens=tuple([(stop - start,) for start, stop in spans]),
            layout="contiguous",
        )
        for unit, spans in enumerate(local)
        if spans
    ]
    return Placement(
        schedule=schedule, length=length, rank_tokens=rank_tokens(schedule, placed.loads.tokens), lanes=tuple(lanes)
    )


def _padding(documents: Sequence[Range], length: int, shares: Sequence[int]) -> list[list[Range]]:
    """Positions outside every document by unit, ``shares[unit]`` of them."""
    by_unit: list[list[Range]] = [[] for _ in shares]
    if not any(shares):
        return by_unit
    unit, left, end = -1, 0, 0
    for start, stop in (*documents, (length, length)):
        while end < start:
            while not left:
                unit += 1
                left = shares[unit]
            count = min(left, start - end)
            by_unit[unit].append((end, end + count))
            end += count
            left -= count
        end = stop
    return by_unit


def rank_tokens(schedule: Schedule, held: Sequence[int]) -> tuple[int, ...]:
    """Tokens of every rank, in the order of the schedule's ranks: a unit's tokens by its ranks' weights."""
    tokens: dict[int, int] = {}
    for group, count in zip(schedule.ring_groups, held, strict=True):
        weights = group.tokens if group.weight else (1.0,) * len(group.ranks)
        shares = (count,) if len(weights) == 1 else share(count, weights)
        tokens |= dict(zip(group.ranks, shares, strict=True))
    return tuple(tokens[rank] for rank in schedule.ranks)
