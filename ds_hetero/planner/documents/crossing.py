"""Other ways for keys and values to get from node to node than round a lane's ring, and what they would cost.

In a ring a node's traffic enters over the link of one of its ranks. `routed_s_per_byte` is what all links together
allow: where nodes have as many ranks, rank i sends to rank i of the next node; elsewhere Zeppelin's three hops over
proxies (EuroSys 2026, Eq. 1). `by_heads_s` is HexiSeq's way: groups "rank i of every node" exchange heads, and rings
stay inside nodes (arXiv:2605.07569).

The engine runs rings. These costs say what the others would bring.
"""

from __future__ import annotations

from collections.abc import Sequence

from ds_hetero.planner.documents.bins import Pieces
from ds_hetero.planner.documents.costs import UnitCosts
from ds_hetero.planner.documents.score import FRAGMENT_ROWS

__all__ = ["by_heads_s", "routed_s_per_byte"]


def routed_s_per_byte(inside_s: float, between_s: float, senders: int, receivers: int) -> float:
    """Seconds per byte from one node to another over the links of many ranks; never more than over one.

    Nodes of as many ranks need no dispatch, as rank i has what rank i of the other node is to get. Else Eq. 1 of the
    paper, with as many proxies on both sides as the smaller node has ranks.

    Args:
        inside_s: seconds per byte between two ranks of a node.
        between_s: the same of two nodes.
        senders: ranks of the sending node.
        receivers: ranks of the receiving node.
    """
    proxies = min(senders, receivers)
    if senders == receivers:
        return between_s / proxies
    hop_s = inside_s * (proxies - 1) / proxies
    return min(hop_s + between_s / proxies + hop_s, between_s)


def by_heads_s(lengths: Sequence[int], pieces: Sequence[Pieces], costs: UnitCosts) -> float | None:
    """Predicted time of a placement whose documents over several nodes exchange heads between these.

    Of a document on N nodes every unit then computes 1/N of the heads for N times its tokens, and receives the rest of
    them from its own node. The exchange hides behind nothing. It sends less than a ring where H + G < 2 G N, with
    H query and G key-value heads.

    Args:
        lengths: of the documents.
        pieces: units of every document, with their tokens.
        costs: of the units, of which ``cross_s`` is that of all interfaces of a node.

    Returns:
        None where a document lies on nodes with different numbers of its units, which do not pair up.
    """
    work_s, attention_s, inside_s = [0.0] * len(costs.node), [0.0] * len(costs.node), [0.0] * len(costs.node)
    exchange_s = [0.0] * costs.num_nodes
    for length, ring in zip(lengths, pieces, strict=True):
        nodes = [costs.node[unit] for unit, _ in ring]
        split = len(set(nodes))
        if len({nodes.count(node) for node in nodes}) > 1:
            return None
        for (unit, tokens), node in zip(ring, nodes, strict=True):
            work_s[unit] += tokens * costs.token_s[unit]
            attention_s[unit] += tokens * length * costs.square_s[unit]
            if len(ring) > 1:
                attention_s[unit] += FRAGMENT_ROWS * length * costs.square_s[unit]
                inside_s[unit] += max(length - split * tokens, 0) / split * costs.receive_s[node]
            exchange_s[node] += tokens * (split - 1) / split * costs.exchange_per_receive * costs.cross_s[node]
    units = zip(work_s, attention_s, inside_s, strict=True)
    return max(exchange_s) + max(work + max(attention, inside) for work, attention, inside in units)
