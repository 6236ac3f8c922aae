"""Simple placements of documents: every one over all units, and every one over the units of one node.

The planner is never predicted to be slower than these two and the stream.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import fsum
from operator import mul

from ds_hetero.planner.document_search.bins import LEAST_FRAGMENT_TOKENS, Bins, DocumentPart, deal
from ds_hetero.planner.document_search.unit_costs import Pieces, UnitCosts
from ds_hetero.values.splits import share


def over_all_units(lengths: Sequence[int], costs: UnitCosts) -> list[Pieces]:
    """Every document over all units in proportion to their speed: context parallelism as usual, but by speed."""
    return [_over(range(len(costs.token_s)), length, costs) for length in lengths]


def over_all_units_s(lengths: Sequence[int], costs: UnitCosts) -> float:
    """Predicted time of `over_all_units`, without its rounding to whole tokens."""
    return _shared_s(range(len(costs.token_s)), lengths, costs, crossing=costs.num_nodes > 1)


def over_all_alike(lengths: Sequence[int], costs: UnitCosts) -> list[Pieces]:
    """Every document over all units in equal parts, the shortest ones whole: the best where receiving decides."""
    count = len(costs.token_s)
    held, placed = [0] * count, list[Pieces]()
    for length in lengths:
        least = min(range(count), key=held.__getitem__)
        is_short = length < count * LEAST_FRAGMENT_TOKENS
        tokens = [length * (unit == least) for unit in range(count)] if is_short else share(length, [1.0] * count)
        held = [before + more for before, more in zip(held, tokens, strict=True)]
        placed.append([(unit, more) for unit, more in enumerate(tokens) if more])
    return placed


def over_all_alike_at_least_s(lengths: Sequence[int], costs: UnitCosts) -> float:
    """A bound below `over_all_alike`: its documents that are cut, links between nodes free, less their rounding."""
    part = 1 / len(costs.token_s)
    cut = [length for length in lengths if length * part >= LEAST_FRAGMENT_TOKENS]
    tokens, squares = sum(cut), sum(map(mul, cut, cut))
    own_squares = squares * part + (costs.fragment_rows * tokens if part < 1 else 0)
    slowest_s: float = max(
        tokens * part * token_s + max(own_squares * square_s, tokens * (1 - part) * costs.receive_s[node])
        for token_s, square_s, node in zip(costs.token_s, costs.square_s, costs.node, strict=True)
    )
    return slowest_s * (1 - 1 / LEAST_FRAGMENT_TOKENS)


def whole(lengths: Sequence[int], costs: UnitCosts) -> tuple[float, list[Pieces]]:
    """Every document on one unit, longest first on the one that ends first with it; infinity where none has room."""
    bins = Bins(list(costs.token_s), list(costs.square_s), list(costs.most_tokens))
    units = _dealt_whole(lengths, bins)
    if units is None:
        return float("inf"), []
    return max(bins.load_s), [[(unit, length)] for unit, length in zip(units, lengths, strict=True)]


def _dealt_whole(lengths: Sequence[int], bins: Bins) -> list[int] | None:
    """The bin of every document, dealt whole, longest first; None where that is not possible."""
    order = sorted(range(len(lengths)), key=lengths.__getitem__, reverse=True)  # stable: ties by index
    dealt = deal([DocumentPart(j, lengths[j], lengths[j]) for j in order], bins, float("inf"))
    if dealt is None or any(len(pieces) > 1 for pieces in dealt):
        return None
    bin_of = {j: pieces[0][0] for j, pieces in zip(order, dealt, strict=True)}
    return [bin_of[j] for j in range(len(lengths))]


def over_one_node(lengths: Sequence[int], by_node: Sequence[Sequence[int]], costs: UnitCosts) -> list[Pieces]:
    """Every document, by its length, over all units of its node."""
    placed: list[Pieces] = [[] for _ in lengths]
    for units, documents in zip(costs.units_by_node, by_node, strict=True):
        for j in documents:
            placed[j] = _over(units, lengths[j], costs)
    return placed


def over_one_node_s(lengths: Sequence[int], nodes: Bins, costs: UnitCosts) -> tuple[float, list[list[int]]]:
    """Documents dealt whole to nodes, longest first: the time of `over_one_node` (or infinity), and who holds what.

    Args:
        nodes: empty bins, one per node, with the speed of all its units.
    """
    node_of = _dealt_whole(lengths, nodes)
    if node_of is None:
        return float("inf"), []
    by_node: list[list[int]] = [[] for _ in range(costs.num_nodes)]
    for j, node in enumerate(node_of):
        by_node[node].append(j)
    times = (
        _shared_s(units, [lengths[j] for j in documents], costs, crossing=False)
        for units, documents in zip(costs.units_by_node, by_node, strict=True)
    )
    return max(times), by_node


def over_one_node_at_least_s(lengths: Sequence[int], costs: UnitCosts) -> float:
    """A bound below every `over_one_node_s`: perfect balance, and what cutting every document adds on average."""
    tokens, squares = sum(lengths), sum(map(mul, lengths, lengths))
    speed, added = 0.0, float("inf")
    for units in costs.units_by_node:
        speeds = [1 / (tokens * costs.token_s[unit] + squares * costs.square_s[unit]) for unit in units]
        cut_s = (v * costs.square_s[unit] for v, unit in zip(speeds, units, strict=True))
        added = min(added, costs.fragment_rows * tokens * fsum(cut_s) if len(units) > 1 else 0.0)
        speed += fsum(speeds)
    return (1 + added) / speed


def _shares(units: Sequence[int], costs: UnitCosts) -> list[float]:
    """Share of every unit in a document: in proportion to its speed outside attention, 0 without memory."""
    speeds = [1 / costs.token_s[unit] if costs.most_tokens[unit] else 0.0 for unit in units]
    whole = fsum(speeds)
    return [speed / whole for speed in speeds]


def _over(units: Sequence[int], length: int, costs: UnitCosts) -> Pieces:
    tokens = share(length, _shares(units, costs))
    return [(unit, count) for unit, count in zip(units, tokens, strict=True) if count]


def _shared_s(units: Sequence[int], lengths: Sequence[int], costs: UnitCosts, *, crossing: bool) -> float:
    """Predicted time if ``units`` share all of these documents; infinity where a unit's memory does not suffice."""
    if not any(costs.most_tokens[unit] for unit in units):
        return float("inf") if lengths else 0.0
    tokens, squares = sum(lengths), sum(map(mul, lengths, lengths))
    shares = _shares(units, costs)
    of_node = [0.0] * costs.num_nodes
    for unit, part in zip(units, shares, strict=True):
        of_node[costs.node[unit]] += part
    slowest_s = 0.0
    for unit, part in zip(units, shares, strict=True):
        node = costs.node[unit]
        if part and tokens * part + len(lengths) > costs.most_tokens[unit]:  # every document is rounded by itself
            return float("inf")
        attention_s = (squares * part + (costs.fragment_rows * tokens if 0 < part < 1 else 0)) * costs.square_s[unit]
        received_s = tokens * (1 - part) * costs.receive_s[node] if part else 0.0
        if crossing:
            received_s = max(received_s, tokens * (1 - of_node[node]) * costs.cross_s[node])
        block_s = tokens * part * costs.token_s[unit] + (attention_s if attention_s > received_s else received_s)
        if block_s > slowest_s:
            slowest_s = block_s
    return slowest_s
