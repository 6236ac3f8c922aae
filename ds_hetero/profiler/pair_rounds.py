"""Rounds of pairs of ranks that exchange while links are measured.

A round is a set of disjoint pairs that exchange at the same moment, both ways, as neighbours in a ring do.
"""

from __future__ import annotations

from collections.abc import Sequence

MOST_ROUNDS = 8  # of pairs of nodes; links beyond these count as the median. Chosen, never measured

Pairs = tuple[tuple[int, int], ...]


def rounds_inside(nodes: Sequence[Sequence[int]]) -> dict[str, Pairs]:
    """Rounds inside nodes, by name: one pair of each node; then all pairs of the nodes that have several.

    Of nodes (0, 1, 2, 3) and (4, 5) these are ((0, 1), (4, 5)) and ((0, 1), (2, 3)). Rounds without pairs are left out.
    """
    one_of_each = tuple((ranks[0], ranks[1]) for ranks in nodes if len(ranks) > 1)
    crowded: list[tuple[int, int]] = []
    for ranks in nodes:
        if len(ranks) > 3:
            crowded += zip(ranks[0::2], ranks[1::2], strict=False)
    rounds = {"inside": one_of_each, "inside, all at once": tuple(crowded)}
    return {name: pairs for name, pairs in rounds.items() if pairs}


def rounds_between(nodes: Sequence[Sequence[int]]) -> dict[str, Pairs]:
    """Rounds between nodes, by name: every two nodes meet once, by their first ranks, as far as `MOST_ROUNDS` go.

    A further round holds all ranks of the first round's pairs of nodes, to see what they get of a shared port.
    Source: the circle method of round-robin tournaments; the first place stays and all others move on by one.
    """
    order: list[int | None] = list(range(len(nodes)))
    if len(order) < 2:
        return {}
    if len(order) % 2:
        order.append(None)  # the rank that is paired with it pauses in this round
    half = len(order) // 2
    rounds: dict[str, Pairs] = {}
    for number in range(min(len(order) - 1, MOST_ROUNDS)):
        opposite = zip(order[:half], reversed(order[half:]), strict=True)
        node_pairs = [(a, b) for a, b in opposite if a is not None and b is not None]
        rounds[f"between {number}"] = tuple((nodes[a][0], nodes[b][0]) for a, b in node_pairs)
        if number == 0:
            crowded: list[tuple[int, int]] = []
            for a, b in node_pairs:
                crowded += zip(nodes[a], nodes[b], strict=False)
            if len(crowded) > len(node_pairs):
                rounds["between, all at once"] = tuple(crowded)
        order = [order[0], order[-1], *order[1:-1]]
    return rounds
