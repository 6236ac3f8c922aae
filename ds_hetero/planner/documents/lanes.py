"""From units and tokens of every document to the lanes of a `Placement`.

Documents over the same units are one lane. Lanes between nodes come first, then those inside a node, then what one unit
holds alone: Zeppelin's three queues (EuroSys 2026, section 3.2).
"""

from __future__ import annotations

from collections.abc import Sequence

from ds_hetero.placement import Lane, Placement, Range
from ds_hetero.planner.documents.bins import Pieces, water_fill
from ds_hetero.planner.documents.costs import UnitCosts
from ds_hetero.schedule import Schedule
from ds_hetero.splits import share

__all__ = ["make_placement"]

ZONES = ("cluster", "node", "local")


def make_placement(
    schedule: Schedule, documents: Sequence[Range], length: int, pieces: Sequence[Pieces], costs: UnitCosts
) -> Placement:
    """The placement of one batch row.

    Args:
        schedule: the replica's schedule.
        documents: intervals of the row, ascending and disjoint.
        length: tokens of the row.
        pieces: units of every document with their tokens.
        costs: of the units.
    """
    cut: dict[tuple[int, ...], list[tuple[Range, tuple[int, ...]]]] = {}
    local: list[list[Range]] = [[] for _ in costs.token_s]
    for document, ring in zip(documents, pieces, strict=True):
        if len(ring) == 1:
            local[ring[0][0]].append(document)
        else:
            ring = sorted(ring, key=lambda piece: (costs.node[piece[0]], piece[0]))
            members = tuple(unit for unit, _ in ring)
            cut.setdefault(members, []).append((document, tuple(tokens for _, tokens in ring)))
    held = [sum(stop - start for start, stop in spans) for spans in local]
    for members, spans in cut.items():
        for _, tokens in spans:
            for unit, count in zip(members, tokens, strict=True):
                held[unit] += count
    for unit, gaps in enumerate(_padding(documents, length, held, costs)):
        local[unit] = sorted(local[unit] + gaps)
        held[unit] += sum(stop - start for start, stop in gaps)
    lanes = [
        Lane(
            members=members,
            spans=tuple(span for span, _ in spans),
            tokens=tuple(tokens for _, tokens in spans),
            layout="zigzag",
        )
        for members, spans in cut.items()
    ]
    lanes.sort(key=lambda lane: (lane.zone(costs.node) != "cluster", -_longest(lane), lane.members))
    lanes += [
        Lane(
            members=(unit,),
            spans=tuple(spans),
            tokens=tuple((stop - start,) for start, stop in spans),
            layout="contiguous",
        )
        for unit, spans in enumerate(local)
        if spans
    ]
    return Placement(schedule=schedule, length=length, rank_tokens=_rank_tokens(schedule, held), lanes=tuple(lanes))


def _longest(lane: Lane) -> int:
    return max(stop - start for start, stop in lane.spans)


def _padding(documents: Sequence[Range], length: int, held: Sequence[int], costs: UnitCosts) -> list[list[Range]]:
    """Positions outside every document, shared so that units hold tokens in proportion to their speed; by unit."""
    shares: list[list[Range]] = [[] for _ in held]
    gaps, end = [], 0
    for start, stop in (*documents, (length, length)):
        if end < start:
            gaps.append((end, start))
        end = stop
    if not gaps:
        return shares
    load_s = [count * token_s for count, token_s in zip(held, costs.token_s, strict=True)]
    room = [most - count for most, count in zip(costs.most_tokens, held, strict=True)]
    counts = water_fill(load_s, costs.token_s, room, sum(stop - start for start, stop in gaps))
    assert counts is not None, "the row fits into all units together"
    unit = 0
    for start, stop in gaps:
        while start < stop:
            while not counts[unit]:
                unit += 1
            count = min(counts[unit], stop - start)
            shares[unit].append((start, start + count))
            counts[unit] -= count
            start += count
    return shares


def _rank_tokens(schedule: Schedule, held: Sequence[int]) -> tuple[int, ...]:
    """Tokens of every rank, in the order of the schedule's ranks: a unit's tokens by its ranks' weights."""
    tokens: dict[int, int] = {}
    for group, count in zip(schedule.ring_groups, held, strict=True):
        weights = group.tokens if group.weight else (1.0,) * len(group.ranks)
        shares = (count,) if len(weights) == 1 else share(count, weights)
        tokens |= dict(zip(group.ranks, shares, strict=True))
    return tuple(tokens[rank] for rank in schedule.ranks)
