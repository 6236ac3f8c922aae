"""Crossing of a document: how its keys and values get from node to node, and what that costs.

Rank i of a node sends to rank i of the next one, so that all links work. Where nodes do not pair up, a block of a rank
without a partner enters the next node over the link of its first rank, or over proxies in three hops, whichever is
predicted to be faster (Zeppelin, EuroSys 2026, section 3.3 and Eq. 1). Units of the same nodes that hold nothing of a
document are proxies too where that is faster still. The messages themselves are made by `ds_hetero.batch.routes`;
exchanging heads in the place of all this is `ds_hetero.planner.document_search.by_heads`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from ds_hetero.planner.document_search.unit_costs import Pieces, UnitCosts

# Share of the predicted time of crossing that is left with proxies, at most: three hops are more messages than one.
# Chosen; with half a document's blocks passed on, proxies brought 1.96 times the bytes per second
# (benchmarks/results/documents_routes_proxies.json).
WORTH_PROXIES = 0.9
# Seconds of crossing in a block, below which messages of ranks that compute nothing for the document cost more than
# they save. Chosen, never measured.
WORTH_OUTSIDERS_S = 1e-3


def routed_s_per_byte(inside_s: float, between_s: float, senders: int, receivers: int) -> float:
    """Seconds per byte from one node to another over the links of many ranks with equal blocks.

    Directly, where each link carries at most ``senders / receivers`` blocks, rounded up; or by Eq. 1 of the paper, with
    as many proxies on both sides as the smaller node has ranks.

    Args:
        inside_s: seconds per byte between two ranks of a node.
        between_s: the same of two nodes.
    """
    proxies = min(senders, receivers)
    hop_s = inside_s * (proxies - 1) / proxies
    direct_s = between_s * -(-senders // receivers) / senders
    return min(hop_s + between_s / proxies + hop_s, direct_s)


def in_order(ring: Pieces, costs: UnitCosts) -> Pieces:
    """The units of a document in the order in which its keys and values travel: by node, then by number."""
    return sorted(ring, key=lambda piece: (costs.node[piece[0]], piece[0])) if costs.num_nodes > 1 else sorted(ring)


class Crossing(NamedTuple):
    """How a document that is cut over several nodes gets into them."""

    entering: dict[int, float]  # tokens whose keys and values enter its node over a unit's link, by unit
    proxies: bool  # whether they travel in three hops over proxies
    outside: tuple[int, ...] = ()  # proxies that hold no token of the document


def crossing_of(ring: Pieces, costs: UnitCosts) -> Crossing:
    """How a document gets from node to node fastest; ``ring``: its units, by ascending node, and their tokens."""
    by_node: dict[int, list[tuple[int, int]]] = {}
    for piece in ring:
        by_node.setdefault(costs.node[piece[0]], []).append(piece)
    direct = _direct(list(by_node.values()))
    if not costs.link_s:
        return Crossing(direct, False)
    largest = max(tokens for _, tokens in ring)
    hop_s = max(largest * costs.receive_s[node] for node in by_node) * 2

    def slowest_s(entering: dict[int, float]) -> float:
        return max(tokens * costs.link_s[costs.node[unit]] for unit, tokens in entering.items())

    best, best_s = Crossing(direct, False), slowest_s(direct)
    proxied = _proxied(list(by_node.values()))
    if slowest_s(proxied) + hop_s < WORTH_PROXIES * best_s:
        best, best_s = Crossing(proxied, True), slowest_s(proxied) + hop_s
    outside = _outside(ring, by_node, costs) if best_s > WORTH_OUTSIDERS_S else {}
    if outside:
        everyone = [sorted([*by_node[node], *((unit, 0) for unit in outside[node])]) for node in by_node]
        proxied = _proxied(everyone)
        if slowest_s(proxied) + hop_s < WORTH_PROXIES * best_s:
            best = Crossing(proxied, True, tuple(unit for node in by_node for unit in outside[node]))
    return best


def _outside(ring: Pieces, nodes: Iterable[int], costs: UnitCosts) -> dict[int, list[int]]:
    """By node of a document, the node's units that hold no token of it; empty where they all do."""
    by_node = {node: costs.units_by_node[node] for node in nodes}
    if sum(map(len, by_node.values())) == len(ring):
        return {}
    held = {unit for unit, _ in ring}
    return {node: [unit for unit in units if unit not in held] for node, units in by_node.items()}


def _direct(of_nodes: Sequence[Pieces]) -> dict[int, float]:
    """Tokens that enter over every unit's link if the i-th unit of a node sends to the i-th of the next one."""
    slots = max(map(len, of_nodes))
    of_slot = [sum(pieces[i][1] for pieces in of_nodes if i < len(pieces)) for i in range(slots)]
    entering: dict[int, float] = {}
    for pieces in of_nodes:
        for (unit, tokens), total in zip(pieces, of_slot, strict=False):
            entering[unit] = total - tokens
        entering[pieces[0][0]] += sum(of_slot[len(pieces) :])
    return entering


def _proxied(of_nodes: Sequence[Pieces]) -> dict[int, float]:
    """The same over proxies: in equal parts over as many links as the smaller of a node and the one before it has."""
    length = sum(tokens for pieces in of_nodes for _, tokens in pieces)
    entering: dict[int, float] = {}
    for before, pieces in zip((of_nodes[-1], *of_nodes), of_nodes, strict=False):
        proxies = min(len(before), len(pieces))
        own = sum(tokens for _, tokens in pieces)
        for number, (unit, _) in enumerate(pieces):
            entering[unit] = (length - own) / proxies if number < proxies else 0.0
    return entering
