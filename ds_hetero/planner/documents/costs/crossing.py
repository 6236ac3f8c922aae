"""How keys and values get from node to node, and what that costs; `ds_hetero.batch.routes` says how it is done.

Rank i of a node sends to rank i of the next one, so that all links work. Where nodes do not pair up, a block of a rank
without a partner enters the next node over the link of its first rank, or over proxies in three hops, whichever is
predicted to be faster (Zeppelin, EuroSys 2026, section 3.3 and Eq. 1).

`ds_hetero.planner.documents.search.by_heads` is another way.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from ds_hetero.planner.documents.costs.units import Pieces, UnitCosts

WORTH_PROXIES = 0.9  # three hops are more messages than one


def routed_s_per_byte(inside_s: float, between_s: float, senders: int, receivers: int) -> float:
    """Seconds per byte from one node to another over the links of many ranks with equal blocks.

    Directly, where each link carries at most ``senders / receivers`` blocks, rounded up; or by Eq. 1 of the paper, with
    as many proxies on both sides as the smaller node has ranks.

    Args:
        inside_s: seconds per byte between two ranks of a node.
        between_s: the same of two nodes.
        senders: ranks of the sending node.
        receivers: ranks of the receiving node.
    """
    proxies = min(senders, receivers)
    hop_s = inside_s * (proxies - 1) / proxies
    direct_s = between_s * -(-senders // receivers) / senders
    return min(hop_s + between_s / proxies + hop_s, direct_s)


class Crossing(NamedTuple):
    """How a document that is cut over several nodes gets into them.

    Args:
        entering: tokens whose keys and values enter its node over a unit's link, by unit.
        proxies: whether they travel in three hops over proxies.
    """

    entering: dict[int, float]
    proxies: bool


def crossing_of(ring: Pieces, costs: UnitCosts) -> Crossing:
    """How a document gets from node to node, the faster of the two ways.

    Args:
        ring: its units, by ascending node, on more than one of these, and their tokens.
        costs: of the units.
    """
    by_node: dict[int, list[tuple[int, int]]] = {}
    for piece in ring:
        by_node.setdefault(costs.node[piece[0]], []).append(piece)
    direct = _direct(list(by_node.values()))
    if not costs.link_s:
        return Crossing(direct, False)
    of_nodes = list(by_node.values())
    proxied = _proxied(of_nodes)
    largest = max(tokens for _, tokens in ring)
    hop_s = max(largest * costs.receive_s[node] for node in by_node) * 2
    direct_s, proxied_s = (
        max(tokens * costs.link_s[costs.node[unit]] for unit, tokens in entering.items())
        for entering in (direct, proxied)
    )
    proxies = proxied_s + hop_s < WORTH_PROXIES * direct_s
    return Crossing(proxied if proxies else direct, proxies)


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
