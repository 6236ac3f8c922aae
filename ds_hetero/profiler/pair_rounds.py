"""Divide pairs of ranks into rounds, in which links are measured.

A round is a set of disjoint pairs that exchange at the same moment, both ways, as neighbours in a ring do.
"""

from __future__ import annotations

from collections.abc import Sequence

MAX_ROUNDS = 8  # between nodes; links that are not measured count as the median. Chosen, never measured

Pairs = tuple[tuple[int, int], ...]


def rounds_inside(nodes: Sequence[Sequence[int]]) -> dict[str, Pairs]:
    """Return the rounds inside nodes, by name: one pair of each node; then all pairs of nodes with several.

    For nodes (0, 1, 2, 3) and (4, 5) these are ((0, 1), (4, 5)) and ((0, 1), (2, 3)). Rounds without pairs are left
    out.
    """
    first_pairs = tuple((ranks[0], ranks[1]) for ranks in nodes if len(ranks) > 1)
    all_pairs: list[tuple[int, int]] = []  # of nodes with several pairs
    for ranks in nodes:
        if len(ranks) > 3:
            all_pairs += zip(ranks[0::2], ranks[1::2], strict=False)
    rounds = {"inside": first_pairs, "inside, all at once": tuple(all_pairs)}
    return {name: pairs for name, pairs in rounds.items() if pairs}


def rounds_between(nodes: Sequence[Sequence[int]]) -> dict[str, Pairs]:
    """Return the rounds between nodes, by name: the first ranks of any two nodes exchange once, in `MAX_ROUNDS`.

    In a further round all ranks of the first round's nodes exchange at once, to measure the bandwidth of shared NICs.
    Source: the circle method of round-robin tournaments. Nodes stand in two rows, and opposite ones are paired; for the
    next round the first node stays, and all others move on by one place.

    Example: with 4 nodes the rounds pair 0-3 and 1-2, then 0-2 and 3-1, then 0-1 and 2-3.
    """
    order: list[int | None] = list(range(len(nodes)))
    if len(order) < 2:
        return {}
    if len(order) % 2:
        order.append(None)  # the rank that is paired with it pauses in this round
    half = len(order) // 2
    rounds: dict[str, Pairs] = {}
    for number in range(min(len(order) - 1, MAX_ROUNDS)):
        opposite = zip(order[:half], reversed(order[half:]), strict=True)
        node_pairs = [(a, b) for a, b in opposite if a is not None and b is not None]
        rounds[f"between {number}"] = tuple((nodes[a][0], nodes[b][0]) for a, b in node_pairs)
        if number == 0:
            all_pairs: list[tuple[int, int]] = []
            for a, b in node_pairs:
                all_pairs += zip(nodes[a], nodes[b], strict=False)
            if len(all_pairs) > len(node_pairs):
                rounds["between, all at once"] = tuple(all_pairs)
        order = [order[0], order[-1], *order[1:-1]]
    return rounds
