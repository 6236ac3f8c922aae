"""From units and tokens of every document to the lanes of a `Placement`.

Documents over the same units are one lane; of those over several nodes the ones that need proxies are another. Lanes
between nodes come first, then those inside a node, then what one unit holds alone: Zeppelin's three queues (EuroSys
2026, section 3.2).
"""

from __future__ import annotations

from collections.abc import Sequence

from ds_hetero.planner.documents.costs.crossing import crossing_of
from ds_hetero.planner.documents.costs.units import UnitCosts
from ds_hetero.planner.documents.search.candidates import PlacedLengths
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
        schedule: the replica's schedule.
        documents: intervals of the row, ascending and disjoint.
        length: tokens of the row.
        placed: units of every document with their tokens.
        costs: of the units.
        heads: of every node, where documents over all units exchange heads between nodes.
    """
    cut: dict[tuple[tuple[int, ...], bool], list[tuple[Range, tuple[int, ...]]]] = {}
    local: list[list[Range]] = [[] for _ in costs.token_s]
    node = costs.node
    for document, ring in zip(documents, placed.pieces, strict=True):
        if len(ring) == 1:
            local[ring[0][0]].append(document)
            continue
        ring = sorted(ring, key=lambda piece: (node[piece[0]], piece[0])) if costs.num_nodes > 1 else sorted(ring)
        members, tokens = zip(*ring, strict=True)
        proxies = (
            node[members[0]] != node[members[-1]]
            and not (heads and len(members) == len(node))
            and crossing_of(ring, costs).proxies
        )
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
            by_heads=heads if len(members) == len(costs.node) else (),
        )
        for (members, proxies), spans in cut.items()
    ]
    lanes.sort(
        key=lambda lane: (
            lane.nodes[0] == lane.nodes[-1],
            not lane.by_heads,
            -_longest(lane),
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
        schedule=schedule, length=length, rank_tokens=_rank_tokens(schedule, placed.loads.tokens), lanes=tuple(lanes)
    )


def _longest(lane: Lane) -> int:
    return max(stop - start for start, stop in lane.spans)


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


def _rank_tokens(schedule: Schedule, held: Sequence[int]) -> tuple[int, ...]:
    """Tokens of every rank, in the order of the schedule's ranks: a unit's tokens by its ranks' weights."""
    tokens: dict[int, int] = {}
    for group, count in zip(schedule.ring_groups, held, strict=True):
        weights = group.tokens if group.weight else (1.0,) * len(group.ranks)
        shares = (count,) if len(weights) == 1 else share(count, weights)
        tokens |= dict(zip(group.ranks, shares, strict=True))
    return tuple(tokens[rank] for rank in schedule.ranks)
