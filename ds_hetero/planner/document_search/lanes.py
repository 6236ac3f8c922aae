"""From units and tokens of every document to the lanes of a `Placement`.

Documents over the same units are one lane; of those over several nodes the ones that need proxies are another. Lanes
between nodes come first, then those inside a node, then what one unit holds alone: Zeppelin's three queues (EuroSys
2026, section 3.2).

Documents over all units whose nodes share the heads instead of passing keys and values on.

HexiSeq's groups "rank i of every node" (arXiv:2605.07569): they trade tokens for heads by all-to-all, keys and values
then stay inside nodes, each with its own heads, and the output comes back. With N nodes, H query and G key-value heads
that is (H + G) / (2 G N) of what passing on sends, but it hides behind nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from ds_hetero.planner.document_search.candidates import PlacedLengths, place_everywhere
from ds_hetero.planner.document_search.loads import Loads, loads_of
from ds_hetero.planner.document_search.unit_costs import Pieces, UnitCosts, crossing_of, in_order
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


MOST_FRAGMENTS = 3072  # of documents over all units: planning takes milliseconds with thousands of documents too
WORTH_EXCHANGING = 0.98  # of the predicted time: less gain is not worth the waiting


class ByHeads(NamedTuple):
    """A placement whose documents over all units exchange heads between nodes."""

    placed: PlacedLengths  # with the loads that follow
    heads: tuple[int, ...]  # of every node


def place_by_heads(
    lengths: Sequence[int], best: PlacedLengths, costs: UnitCosts, num_heads: int, padding: int
) -> ByHeads | None:
    """The faster of ``best`` and every document over all units, if heads are exchanged; None if neither is possible.

    Of thousands of documents only ``best`` is looked at.

    Args:
        best: the placement whose keys and values are passed on.
        padding: tokens outside every document.
    """
    counts = set(map(len, costs.units_by_node))
    if costs.num_nodes == 1 or len(counts) > 1 or not costs.exchange_per_receive:
        return None
    placements = [best]
    if lengths and len(lengths) * len(costs.node) <= MOST_FRAGMENTS:
        everywhere = place_everywhere(lengths, costs, sum(lengths) + padding)
        if everywhere.loads.fits(costs):
            placements.append(everywhere)
    found = []
    for placed in placements:
        heads = _heads(placed.pieces, costs, num_heads)
        if heads is not None:
            loads = loads_by_heads(lengths, placed.pieces, costs, heads).with_padding(placed.padding, costs)
            found.append(ByHeads(replace(placed, loads=loads), heads))
    return min(found, key=lambda each: each.placed.predicted_s, default=None)


def _heads(pieces: Sequence[Pieces], costs: UnitCosts, num_heads: int) -> tuple[int, ...] | None:
    """Heads of every node, by its share of the tokens of documents over all units; None where there is none."""
    held = [0] * costs.num_nodes
    for ring in pieces:
        if len(ring) == len(costs.node):
            for unit, tokens in ring:
                held[costs.node[unit]] += tokens
    return share(num_heads, held) if any(held) else None


def loads_by_heads(lengths: Sequence[int], pieces: Sequence[Pieces], costs: UnitCosts, heads: Sequence[int]) -> Loads:
    """The loads of a placement whose documents over all units exchange heads.

    The i-th unit of a node computes its node's share of the heads for the tokens of the i-th units of all nodes.
    """
    units = range(len(costs.node))
    slots = list(zip(*costs.units_by_node, strict=True))
    others = [(n, ring) for n, ring in zip(lengths, pieces, strict=True) if len(ring) < len(costs.node)]
    loads = loads_of([n for n, _ in others], [ring for _, ring in others], costs)
    tokens, attention_s, fragments_s = list(loads.tokens), list(loads.attention_s), list(loads.fragments_s)
    inside_s, sent, received = [0.0] * len(units), [0.0] * len(units), [0.0] * len(units)
    shares = [of_node / sum(heads) for of_node in heads]
    for length, ring in zip(lengths, pieces, strict=True):
        if len(ring) < len(costs.node):
            continue
        held = dict(ring)
        for slot in slots:
            together = sum(held[unit] for unit in slot)
            for unit in slot:
                node, of_heads = costs.node[unit], shares[costs.node[unit]]
                tokens[unit] += held[unit]
                attention_s[unit] += together * of_heads * length * costs.square_s[unit]
                fragments_s[unit] += costs.fragment_rows * of_heads * length * costs.square_s[unit]
                inside_s[unit] += (length - together) * of_heads * costs.receive_s[node]
                sent[unit] += held[unit] * (1 - of_heads)
                received[unit] += (together - held[unit]) * of_heads
    return replace(
        loads,
        tokens=tuple(tokens),
        linear_s=tuple(count * s for count, s in zip(tokens, costs.token_s, strict=True)),
        attention_s=tuple(attention_s),
        fragments_s=tuple(fragments_s),
        received_s=tuple(a + b for a, b in zip(loads.received_s, inside_s, strict=True)),
        exchange_s=max(_exchange_s(sent, costs), _exchange_s(received, costs)),
    )


def _exchange_s(tokens: Sequence[float], costs: UnitCosts) -> float:
    """Time of all-to-alls in which units send, or receive, all heads of so many tokens."""
    slowest_s = 0.0
    for node, units in enumerate(costs.units_by_node):
        slowest_s = max(slowest_s, sum(tokens[unit] for unit in units) * costs.cross_s[node])
        if costs.link_s:
            slowest_s = max(slowest_s, max(tokens[unit] for unit in units) * costs.link_s[node])
    return slowest_s * costs.exchange_per_receive
