"""Simple placements: every document over all units, over the units of one node, or uncut on one unit.

The planner's placement is never predicted to be slower than these placements and the stream. Each of them has a cheap
prediction or lower bound; only placements whose bound is below the best time so far are made.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import fsum
from operator import mul

from ds_hetero.planner.document_search.bins import LEAST_FRAGMENT_TOKENS, Bins, DocumentPart, deal
from ds_hetero.planner.document_search.unit_costs import Pieces, UnitCosts
from ds_hetero.values.splits import share


def over_all_units(lengths: Sequence[int], costs: UnitCosts) -> list[Pieces]:
    """Cut every document over all units in proportion to their speed, where usual context parallelism cuts evenly."""
    return [_over_units(range(len(costs.token_s)), length, costs) for length in lengths]


def over_all_units_s(lengths: Sequence[int], costs: UnitCosts) -> float:
    """Predict the time of `over_all_units`, without its rounding to whole tokens."""
    return _shared_s(range(len(costs.token_s)), lengths, costs, crossing=costs.num_nodes > 1)


def split_evenly_over_all(lengths: Sequence[int], costs: UnitCosts) -> list[Pieces]:
    """Cut every document over all units in equal parts, which is best if receiving keys and values limits the time.

    Documents too short for parts of `LEAST_FRAGMENT_TOKENS` stay whole, each on the unit with the fewest tokens.
    """
    num_units = len(costs.token_s)
    tokens_by_unit = [0] * num_units
    pieces_by_document: list[Pieces] = []
    for length in lengths:
        if length < num_units * LEAST_FRAGMENT_TOKENS:
            pieces = [(min(range(num_units), key=tokens_by_unit.__getitem__), length)]
        else:
            pieces = list(enumerate(share(length, [1.0] * num_units)))
        for unit, tokens in pieces:
            tokens_by_unit[unit] += tokens
        pieces_by_document.append([(unit, tokens) for unit, tokens in pieces if tokens])
    return pieces_by_document


def split_evenly_at_least_s(lengths: Sequence[int], costs: UnitCosts) -> float:
    """Return a lower bound of the time of `split_evenly_over_all`.

    It counts only the documents that are cut, and treats links between nodes as free. The last factor allows for
    rounding to whole tokens: a fragment has at least `LEAST_FRAGMENT_TOKENS`, and may have one token less than its
    equal part.
    """
    unit_share = 1 / len(costs.token_s)
    cut_lengths = [length for length in lengths if length * unit_share >= LEAST_FRAGMENT_TOKENS]
    tokens, squares = sum(cut_lengths), sum(map(mul, cut_lengths, cut_lengths))
    unit_squares = squares * unit_share + (costs.fragment_rows * tokens if unit_share < 1 else 0)
    slowest_s = 0.0
    for token_s, square_s, node in zip(costs.token_s, costs.square_s, costs.node, strict=True):
        attention_s = unit_squares * square_s
        received_s = tokens * (1 - unit_share) * costs.receive_s[node]
        slowest_s = max(slowest_s, tokens * unit_share * token_s + max(attention_s, received_s))
    return slowest_s * (1 - 1 / LEAST_FRAGMENT_TOKENS)


def place_whole(lengths: Sequence[int], costs: UnitCosts) -> tuple[float, list[Pieces]]:
    """Place every document uncut, longest first, on the unit that ends first with it; return the time and the units.

    If a document fits on no unit, the time is infinite, and no units are returned.
    """
    bins = Bins(list(costs.token_s), list(costs.square_s), list(costs.most_tokens))
    units = _deal_uncut(lengths, bins)
    if units is None:
        return float("inf"), []
    return max(bins.load_s), [[(unit, length)] for unit, length in zip(units, lengths, strict=True)]


def _deal_uncut(lengths: Sequence[int], bins: Bins) -> list[int] | None:
    """Deal documents uncut, longest first; return the bin of every document, or None if one fits into no bin."""
    order = sorted(range(len(lengths)), key=lengths.__getitem__, reverse=True)  # stable: ties by index
    pieces_by_part = deal([DocumentPart(j, lengths[j], lengths[j]) for j in order], bins, float("inf"))
    if pieces_by_part is None or any(len(pieces) > 1 for pieces in pieces_by_part):
        return None
    bin_of_document: dict[int, int] = {}
    for j, ((index, _),) in zip(order, pieces_by_part, strict=True):
        bin_of_document[j] = index
    return [bin_of_document[j] for j in range(len(lengths))]


def over_one_node(lengths: Sequence[int], by_node: Sequence[Sequence[int]], costs: UnitCosts) -> list[Pieces]:
    """Cut every document over all units of its node.

    Args:
        by_node: indices of the documents of every node.
    """
    pieces_by_document: list[Pieces] = [[] for _ in lengths]
    for units, documents in zip(costs.units_by_node, by_node, strict=True):
        for j in documents:
            pieces_by_document[j] = _over_units(units, lengths[j], costs)
    return pieces_by_document


def over_one_node_s(lengths: Sequence[int], nodes: Bins, costs: UnitCosts) -> tuple[float, list[list[int]]]:
    """Deal documents uncut to nodes, longest first; return the time of `over_one_node` and the documents of every node.

    If a document fits on no node, the time is infinite, and no documents are returned.

    Args:
        nodes: empty bins, one for each node, with the speed of all its units.
    """
    node_of_document = _deal_uncut(lengths, nodes)
    if node_of_document is None:
        return float("inf"), []
    by_node: list[list[int]] = [[] for _ in range(costs.num_nodes)]
    for j, node in enumerate(node_of_document):
        by_node[node].append(j)
    node_s = [
        _shared_s(units, [lengths[j] for j in documents], costs, crossing=False)
        for units, documents in zip(costs.units_by_node, by_node, strict=True)
    ]
    return max(node_s), by_node


def over_one_node_at_least_s(lengths: Sequence[int], costs: UnitCosts) -> float:
    """Return a lower bound of `over_one_node_s`: perfect balance, plus the least cost of cutting every document.

    Speeds are in batches per second: the speed of a unit is the inverse of its time for all documents.
    """
    tokens, squares = sum(lengths), sum(map(mul, lengths, lengths))
    total_speed, least_added_share = 0.0, float("inf")
    for units in costs.units_by_node:
        speeds = [1 / (tokens * costs.token_s[unit] + squares * costs.square_s[unit]) for unit in units]
        total_speed += fsum(speeds)
        if len(units) == 1:  # documents on this node stay uncut
            least_added_share = min(least_added_share, 0.0)
            continue
        cut_s = (unit_speed * costs.square_s[unit] for unit_speed, unit in zip(speeds, units, strict=True))
        least_added_share = min(least_added_share, costs.fragment_rows * tokens * fsum(cut_s))
    return (1 + least_added_share) / total_speed


def _unit_shares(units: Sequence[int], costs: UnitCosts) -> list[float]:
    """Return by unit the share of a document: in proportion to the speed outside attention, 0 without memory."""
    speeds = [1 / costs.token_s[unit] if costs.most_tokens[unit] else 0.0 for unit in units]
    total = fsum(speeds)
    return [speed / total for speed in speeds]


def _over_units(units: Sequence[int], length: int, costs: UnitCosts) -> Pieces:
    """Cut a document of ``length`` tokens over units by speed."""
    tokens = share(length, _unit_shares(units, costs))
    return [(unit, count) for unit, count in zip(units, tokens, strict=True) if count]


def _shared_s(units: Sequence[int], lengths: Sequence[int], costs: UnitCosts, *, crossing: bool) -> float:
    """Predict the time if ``units`` share all documents; infinite if a unit has too little memory.

    Args:
        crossing: whether the units are on several nodes.
    """
    if not any(costs.most_tokens[unit] for unit in units):
        return float("inf") if lengths else 0.0
    tokens, squares = sum(lengths), sum(map(mul, lengths, lengths))
    unit_shares = _unit_shares(units, costs)
    share_of_node = [0.0] * costs.num_nodes
    for unit, unit_share in zip(units, unit_shares, strict=True):
        share_of_node[costs.node[unit]] += unit_share
    slowest_s = 0.0
    for unit, unit_share in zip(units, unit_shares, strict=True):
        node = costs.node[unit]
        most_tokens = tokens * unit_share + len(lengths)  # every document may be rounded up by a token
        if unit_share and most_tokens > costs.most_tokens[unit]:
            return float("inf")
        fragment_squares = costs.fragment_rows * tokens if 0 < unit_share < 1 else 0
        attention_s = (squares * unit_share + fragment_squares) * costs.square_s[unit]
        received_s = tokens * (1 - unit_share) * costs.receive_s[node] if unit_share else 0.0
        if crossing:
            received_s = max(received_s, tokens * (1 - share_of_node[node]) * costs.cross_s[node])
        # Receiving overlaps with attention.
        block_s = tokens * unit_share * costs.token_s[unit] + max(attention_s, received_s)
        slowest_s = max(slowest_s, block_s)
    return slowest_s
