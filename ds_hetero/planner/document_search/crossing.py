"""Crossing of a document: how its keys and values get from node to node, and what that costs.

Rank i of a node sends to rank i of the next one, so that all links work. Where nodes do not pair up, a block of a rank
without a partner enters the next node over the link of its first rank, or over proxies in three hops, whichever is
predicted to be faster (Zeppelin, EuroSys 2026, section 3.3 and Eq. 1). Units of the same nodes that hold nothing of a
document are proxies too where that is faster still. The messages themselves are made by `ds_hetero.batch.routes`;
exchanging heads in the place of all this is `ds_hetero.planner.document_search.by_heads`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import chain
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
    holders = list(by_node.values())
    direct = _direct(holders)
    if not costs.link_s:
        return Crossing(direct, False)
    largest = max(tokens for _, tokens in ring)
    # Proxies cost two hops more, inside the node that sends and inside the one that receives.
    inside_s = max(largest * costs.receive_s[node] for node in by_node) * 2

    def slowest_link_s(entering: dict[int, float]) -> float:
        return max(tokens * costs.link_s[costs.node[unit]] for unit, tokens in entering.items())

    fastest, fastest_s = Crossing(direct, False), slowest_link_s(direct)
    over_holders = _proxied(holders)
    over_holders_s = slowest_link_s(over_holders) + inside_s
    if over_holders_s < WORTH_PROXIES * fastest_s:
        fastest, fastest_s = Crossing(over_holders, True), over_holders_s
    outsiders = _outsiders(ring, by_node, costs) if fastest_s > WORTH_OUTSIDERS_S else {}
    if not outsiders:
        return fastest
    over_all = _proxied([sorted(by_node[node] + outsiders[node]) for node in by_node])
    if slowest_link_s(over_all) + inside_s < WORTH_PROXIES * fastest_s:
        proxies = chain.from_iterable(outsiders.values())
        return Crossing(over_all, True, tuple(unit for unit, _ in proxies))
    return fastest


def _outsiders(ring: Pieces, nodes: Iterable[int], costs: UnitCosts) -> dict[int, Pieces]:
    """By node of a document, the node's units that hold none of it, with 0 tokens; empty where all hold some."""
    units_by_node = {node: costs.units_by_node[node] for node in nodes}
    if sum(map(len, units_by_node.values())) == len(ring):
        return {}
    holders = {unit for unit, _ in ring}
    outsiders: dict[int, Pieces] = {}
    for node, units in units_by_node.items():
        outsiders[node] = [(unit, 0) for unit in units if unit not in holders]
    return outsiders


def _direct(pieces_by_node: Sequence[Pieces]) -> dict[int, float]:
    """Tokens that enter over every unit's link if the i-th unit of a node sends to the i-th of the next one.

    Blocks go round over all nodes, so a unit receives what its i-th partners hold. The first unit of a node also
    receives for partners that the node lacks. Of units A (60 tokens) and B (40) of one node and C (100) of another,
    A receives 100 from C, B nothing, and C 60 from A and 40 from B.
    """
    tokens_by_place = [0] * max(map(len, pieces_by_node))
    for pieces in pieces_by_node:
        for place, (_, tokens) in enumerate(pieces):
            tokens_by_place[place] += tokens
    entering: dict[int, float] = {}
    for pieces in pieces_by_node:
        for (unit, tokens), total in zip(pieces, tokens_by_place, strict=False):
            entering[unit] = total - tokens
        first_unit, _ = pieces[0]
        entering[first_unit] += sum(tokens_by_place[len(pieces) :])
    return entering


def _proxied(pieces_by_node: Sequence[Pieces]) -> dict[int, float]:
    """Tokens that enter over every unit's link with proxies: equal parts over as many links as both nodes have.

    Of units A (60 tokens) and B (40) of one node and C (100) of another, one link joins the nodes: A receives 100, C
    receives 100, and B nothing.
    """
    length = sum(tokens for _, tokens in chain.from_iterable(pieces_by_node))
    entering: dict[int, float] = {}
    last = pieces_by_node[-1]  # nodes form a ring: the last one sends to the first
    for sender, pieces in zip((last, *pieces_by_node), pieces_by_node, strict=False):
        links = min(len(sender), len(pieces))
        local_tokens = sum(tokens for _, tokens in pieces)
        for number, (unit, _) in enumerate(pieces):
            entering[unit] = (length - local_tokens) / links if number < links else 0.0
    return entering
