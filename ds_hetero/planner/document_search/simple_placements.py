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


def split_evenly_over_all(lengths: Sequence[int], costs: UnitCosts) -> list[Pieces]:
    """Every document over all units in equal parts: the best placement where receiving decides.

    Documents too short for parts of `LEAST_FRAGMENT_TOKENS` stay whole, each on the unit with the fewest tokens.
    """
    num_units = len(costs.token_s)
    tokens_by_unit = [0] * num_units
    placed: list[Pieces] = []
    for length in lengths:
        if length < num_units * LEAST_FRAGMENT_TOKENS:
            pieces = [(min(range(num_units), key=tokens_by_unit.__getitem__), length)]
        else:
            pieces = list(enumerate(share(length, [1.0] * num_units)))
        for unit, tokens in pieces:
            tokens_by_unit[unit] += tokens
        placed.append([(unit, tokens) for unit, tokens in pieces if tokens])
    return placed


def split_evenly_at_least_s(lengths: Sequence[int], costs: UnitCosts) -> float:
    """A bound below the time of `split_evenly_over_all`.

    It counts the documents that are cut alone, with links between nodes free, less what rounding to whole tokens may
    take from a fragment.
    """
    part = 1 / len(costs.token_s)
    cut_lengths = [length for length in lengths if length * part >= LEAST_FRAGMENT_TOKENS]
    tokens, squares = sum(cut_lengths), sum(map(mul, cut_lengths, cut_lengths))
    unit_squares = squares * part + (costs.fragment_rows * tokens if part < 1 else 0)
    slowest_s = 0.0
    for token_s, square_s, node in zip(costs.token_s, costs.square_s, costs.node, strict=True):
        attention_s = unit_squares * square_s
        received_s = tokens * (1 - part) * costs.receive_s[node]
        slowest_s = max(slowest_s, tokens * part * token_s + max(attention_s, received_s))
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
    """Deal documents whole to nodes, longest first; return the time of `over_one_node` and documents by node.

    The time is infinite, and no documents are returned, where a node's memory does not suffice.

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
    """A bound below every `over_one_node_s`: perfect balance, and what cutting every document adds on average.

    Speed is batches per second: of one unit, the inverse of the time it would take for all documents alone.
    """
    tokens, squares = sum(lengths), sum(map(mul, lengths, lengths))
    speed, least_added_share = 0.0, float("inf")
    for units in costs.units_by_node:
        speeds = [1 / (tokens * costs.token_s[unit] + squares * costs.square_s[unit]) for unit in units]
        speed += fsum(speeds)
        if len(units) == 1:  # documents stay whole on it
            least_added_share = min(least_added_share, 0.0)
            continue
        cut_s = (unit_speed * costs.square_s[unit] for unit_speed, unit in zip(speeds, units, strict=True))
        least_added_share = min(least_added_share, costs.fragment_rows * tokens * fsum(cut_s))
    return (1 + least_added_share) / speed


def _shares(units: Sequence[int], costs: UnitCosts) -> list[float]:
    """Share of every unit in a document: in proportion to its speed outside attention, 0 without memory."""
    speeds = [1 / costs.token_s[unit] if costs.most_tokens[unit] else 0.0 for unit in units]
    total = fsum(speeds)
    return [speed / total for speed in speeds]


def _over(units: Sequence[int], length: int, costs: UnitCosts) -> Pieces:
    tokens = share(length, _shares(units, costs))
    return [(unit, count) for unit, count in zip(units, tokens, strict=True) if count]


def _shared_s(units: Sequence[int], lengths: Sequence[int], costs: UnitCosts, *, crossing: bool) -> float:
    """Predicted time if ``units`` share all of these documents; infinity where a unit's memory does not suffice."""
    if not any(costs.most_tokens[unit] for unit in units):
        return float("inf") if lengths else 0.0
    tokens, squares = sum(lengths), sum(map(mul, lengths, lengths))
    shares = _shares(units, costs)
    share_of_node = [0.0] * costs.num_nodes
    for unit, part in zip(units, shares, strict=True):
        share_of_node[costs.node[unit]] += part
    slowest_s = 0.0
    for unit, part in zip(units, shares, strict=True):
        node = costs.node[unit]
        if part and tokens * part + len(lengths) > costs.most_tokens[unit]:  # every document is rounded by itself
            return float("inf")
        fragment_squares = costs.fragment_rows * tokens if 0 < part < 1 else 0
        attention_s = (squares * part + fragment_squares) * costs.square_s[unit]
        received_s = tokens * (1 - part) * costs.receive_s[node] if part else 0.0
        if crossing:
            received_s = max(received_s, tokens * (1 - share_of_node[node]) * costs.cross_s[node])
        # What is received hides under attention, as far as attention lasts.
        block_s = tokens * part * costs.token_s[unit] + max(attention_s, received_s)
        slowest_s = max(slowest_s, block_s)
    return slowest_s
