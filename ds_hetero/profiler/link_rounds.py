"""Who exchanges with whom while links are measured.

A round is a set of disjoint pairs that exchange at the same moment, both ways, as neighbours in a ring do.
"""

from __future__ import annotations

from collections.abc import Sequence

MOST_ROUNDS = 8  # of pairs of nodes; what is not measured is taken to be like the median

Pairs = tuple[tuple[int, int], ...]


def rounds_inside(nodes: Sequence[Sequence[int]]) -> dict[str, Pairs]:
    """One pair per node, and, where some node has two pairs, as many as it has at once."""
    rounds = {"inside": tuple((ranks[0], ranks[1]) for ranks in nodes if len(ranks) > 1)}
    crowded = tuple((ranks[i], ranks[i + 1]) for ranks in nodes if len(ranks) > 3 for i in range(0, len(ranks) - 1, 2))
    return {name: pairs for name, pairs in (*rounds.items(), ("inside, all at once", crowded)) if pairs}


def rounds_between(nodes: Sequence[Sequence[int]]) -> dict[str, Pairs]:
    """Every two nodes once, first rank to first rank, in rounds of disjoint pairs; then all ranks of paired nodes."""
    order: list[int | None] = list(range(len(nodes)))
    if len(order) < 2:
        return {}
    if len(order) % 2:
        order.append(None)
    rounds: dict[str, Pairs] = {}
    for number in range(min(len(order) - 1, MOST_ROUNDS)):
        half = len(order) // 2
        pairs = [
            (a, b) for a, b in zip(order[:half], reversed(order[half:]), strict=True) if a is not None and b is not None
        ]
        rounds[f"between {number}"] = tuple((nodes[a][0], nodes[b][0]) for a, b in pairs)
        if number == 0:
            crowded = tuple(pair for a, b in pairs for pair in zip(nodes[a], nodes[b], strict=False))
            if len(crowded) > len(pairs):
                rounds["between, all at once"] = crowded
        order = [order[0], order[-1], *order[1:-1]]
    return rounds
