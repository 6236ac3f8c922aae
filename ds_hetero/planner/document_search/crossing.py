"""Choose how keys and values of a document get from node to node, directly or over proxies, and predict the time.

* Directly: rank i of a node sends to rank i of the next node, so that all links work. If a rank has no partner,
  because the next node has fewer ranks of the document, its block enters that node over the link of the first rank.
* Over proxies: blocks travel in three hops. The ranks of a node divide their blocks evenly over as many ranks, the
  proxies, as the smaller of two neighbouring nodes has; the proxies send them to the proxies of the next node, and
  these send them on inside it (Zeppelin, EuroSys 2026, section 3.3 and Eq. 1).

The faster of both is chosen, by prediction. Units of the same nodes that have no tokens of the document also become
proxies if that is faster still. The messages themselves are made by `ds_hetero.batch.routes`. A third way, to exchange
heads, is in `ds_hetero.planner.document_search.by_heads`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import chain
from typing import NamedTuple

from ds_hetero.planner.document_search.unit_costs import Pieces, UnitCosts

# Proxies are used only if they take less than this share of the predicted time without them, since three hops are more
# messages than one. Chosen; with half a document's blocks passed on, proxies brought 1.96 times the bytes per second
# (benchmarks/results/documents_routes_proxies.json).
MAX_PROXIES_RATIO = 0.9
# Seconds of crossing in a layer, below which ranks without tokens of the document do not become proxies: their messages
# would cost more than they save. Chosen, never measured.
LEAST_CROSSING_S = 1e-3


def routed_s_per_byte(inside_s: float, between_s: float, senders: int, receivers: int) -> float:
    """Return the seconds per byte from one node to another, whose ranks all have equal blocks.

    The faster of two ways counts: directly, where each link carries up to ``senders / receivers`` blocks, rounded up;
    or by Eq. 1 of the paper, with as many proxies on both sides as the smaller node has ranks. Example: 4 ranks send to
    2, a byte takes 0.1 ns inside a node and 1 ns between nodes. Directly, a link carries 2 of the 4 blocks: 0.5 ns per
    byte. With 2 proxies on each side: 0.05 + 0.5 + 0.05 = 0.6 ns. The result is 0.5 ns.

    Args:
        inside_s: seconds per byte between two ranks of a node.
        between_s: seconds per byte between two nodes.
        senders: ranks of the sending node.
        receivers: ranks of the receiving node.
    """
    proxies = min(senders, receivers)
    hop_s = inside_s * (proxies - 1) / proxies
    direct_s = between_s * -(-senders // receivers) / senders
    return min(hop_s + between_s / proxies + hop_s, direct_s)


def in_order(ring: Pieces, costs: UnitCosts) -> Pieces:
    """Sort the units of a document in the order in which its keys and values travel: by node, then by index."""
    return sorted(ring, key=lambda piece: (costs.node[piece[0]], piece[0])) if costs.num_nodes > 1 else sorted(ring)


class Crossing(NamedTuple):
    """Route of a document's keys and values from node to node, and the tokens that enter over the link of each unit."""

    entering: dict[int, float]  # by unit: tokens whose keys and values enter the unit's node over the unit's link
    proxies: bool  # whether keys and values travel in three hops over proxies
    outside: tuple[int, ...] = ()  # units that are proxies without a token of the document


def crossing_of(ring: Pieces, costs: UnitCosts) -> Crossing:
    """Choose the fastest way for keys and values of a document from node to node.

    Without costs of single links (``costs.link_s``) they always travel directly.

    Args:
        ring: units of the document with their tokens, by ascending node.
    """
    pieces_by_node: dict[int, list[tuple[int, int]]] = {}
    for piece in ring:
        pieces_by_node.setdefault(costs.node[piece[0]], []).append(piece)
    holders = list(pieces_by_node.values())
    direct = _entering_directly(holders)
    if not costs.link_s:
        return Crossing(direct, False)
    largest = max(tokens for _, tokens in ring)
    # Proxies take two hops more, one inside the sending node and one inside the receiving node.
    inner_hops_s = max(largest * costs.receive_s[node] for node in pieces_by_node) * 2

    def slowest_link_s(entering: dict[int, float]) -> float:
        return max(tokens * costs.link_s[costs.node[unit]] for unit, tokens in entering.items())

    fastest, fastest_s = Crossing(direct, False), slowest_link_s(direct)
    over_holders = _entering_over_proxies(holders)
    over_holders_s = slowest_link_s(over_holders) + inner_hops_s
    if over_holders_s < MAX_PROXIES_RATIO * fastest_s:
        fastest, fastest_s = Crossing(over_holders, True), over_holders_s
    outsiders = _outsiders(ring, pieces_by_node, costs) if fastest_s > LEAST_CROSSING_S else {}
    if not outsiders:
        return fastest
    over_all = _entering_over_proxies([sorted(pieces_by_node[node] + outsiders[node]) for node in pieces_by_node])
    if slowest_link_s(over_all) + inner_hops_s < MAX_PROXIES_RATIO * fastest_s:
        proxies = chain.from_iterable(outsiders.values())
        return Crossing(over_all, True, tuple(unit for unit, _ in proxies))
    return fastest


def _outsiders(ring: Pieces, nodes: Iterable[int], costs: UnitCosts) -> dict[int, Pieces]:
    """Return by node the units without tokens of a document, which may become proxies, each as a piece of 0 tokens.

    The result is empty if all units of these nodes have tokens.

    Args:
        nodes: nodes of the document.
    """
    units_by_node = {node: costs.units_by_node[node] for node in nodes}
    if sum(map(len, units_by_node.values())) == len(ring):
        return {}
    holders = {unit for unit, _ in ring}
    outsiders: dict[int, Pieces] = {}
    for node, units in units_by_node.items():
        outsiders[node] = [(unit, 0) for unit in units if unit not in holders]
    return outsiders


def _entering_directly(pieces_by_node: Sequence[Pieces]) -> dict[int, float]:
    """Return the tokens that enter over each unit's link if the i-th unit of a node sends to the i-th of the next one.

    Blocks travel round all nodes, so a unit receives the blocks of all i-th units. The first unit of a node also
    receives the blocks that have no partner there. Example: units A (60 tokens) and B (40) of one node, C (100) of
    another. A receives 100 from C, B nothing, and C 60 from A and 40 from B.
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


def _entering_over_proxies(pieces_by_node: Sequence[Pieces]) -> dict[int, float]:
    """Return the tokens that enter over each unit's link if blocks travel over proxies: equal parts over all links.

    Two nodes use as many links as the smaller one has units. Example: units A and B of one node with 100 tokens in all,
    C and D of another one with 60. Both links are used in both directions: A and B each receive 30, C and D each 50.
    """
    length = sum(tokens for _, tokens in chain.from_iterable(pieces_by_node))
    entering: dict[int, float] = {}
    last_node = pieces_by_node[-1]  # nodes form a ring: the last one sends to the first
    for sender, receiver in zip((last_node, *pieces_by_node), pieces_by_node, strict=False):
        num_links = min(len(sender), len(receiver))
        tokens_in_node = sum(tokens for _, tokens in receiver)
        for place, (unit, _) in enumerate(receiver):
            entering[unit] = (length - tokens_in_node) / num_links if place < num_links else 0.0
    return entering
