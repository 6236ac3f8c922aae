"""Place documents on nodes first, then on the units of every node.

This is Zeppelin's two-level partitioner (EuroSys 2026, section 3.1), with seconds in place of tokens. A document stays
whole on a node if the node then ends within its budget, and whole on a unit likewise. A document that does not fit is
cut over as few nodes, or units, as possible. Zeppelin's zones (local, inside a node, between nodes) follow from this.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import fsum
from typing import NamedTuple

from ds_hetero.planner.document_search.bins import Bins, DocumentPart, deal
from ds_hetero.planner.document_search.rebalance import rebalance
from ds_hetero.planner.document_search.unit_costs import Pieces, UnitCosts

GOOD_ENOUGH = 1.02  # ratio to the ideal time up to which a placement is not improved; chosen, never measured


class Effort(NamedTuple):
    """Budgets of time within which documents stay whole; with less slack more documents are cut."""

    unit_slack: float  # the budget of a unit is ``1 + unit_slack`` times the ideal time
    node_slack: float  # the budget of a node is ``1 + node_slack`` times the ideal time
    widen: int = 1  # factor by which a document is cut over more units than necessary


def two_level(
    lengths: Sequence[int], order: Sequence[int], costs: UnitCosts, bound_s: float, effort: Effort, least_tokens: int
) -> list[Pieces] | None:
    """Return the units of every document with their tokens; None if a node or a unit has too little memory.

    Args:
        lengths: tokens of every document.
        order: indices of the documents, longest first.
        bound_s: ideal time.
        effort: how much more than the ideal time a unit and a node may take.
        least_tokens: fragments are at least this long where possible.
    """
    units_by_node = costs.units_by_node
    parts = [DocumentPart(document, lengths[document], lengths[document]) for document in order]
    node_pieces = _on_nodes(parts, costs, bound_s, effort, least_tokens)
    if node_pieces is None:
        return None
    inside, across = _parts_by_node(parts, node_pieces, len(units_by_node))
    pieces_by_document: list[Pieces] = [[] for _ in lengths]
    for node, units in enumerate(units_by_node):
        bins = Bins(
            token_s=[costs.token_s[unit] for unit in units],
            square_s=[costs.square_s[unit] for unit in units],
            room=[costs.most_tokens[unit] for unit in units],
        )
        budget_s = bound_s * (1 + effort.unit_slack)
        pieces_in_node = _place_in_node(bins, across[node], inside[node], budget_s, least_tokens, effort.widen)
        if pieces_in_node is None:
            return None
        for part, pieces in zip((*across[node], *inside[node]), pieces_in_node, strict=True):
            pieces_by_document[part.document] += [(units[i], tokens) for i, tokens in pieces]
    return pieces_by_document


def _on_nodes(
    parts: Sequence[DocumentPart], costs: UnitCosts, bound_s: float, effort: Effort, least_tokens: int
) -> list[Pieces] | None:
    """Return the nodes of every document with their tokens; None if they have too little memory."""
    num_nodes = costs.num_nodes
    if num_nodes == 1:
        return [[(0, part.tokens)] for part in parts]
    nodes = node_bins(costs)
    total_tokens = sum(part.tokens for part in parts)
    # Fragments on nodes are cut again over units, so they should be longer: up to four times as long, but at most a
    # 64th of the mean tokens of a node. Chosen, never measured alone.
    least_on_node = max(least_tokens, min(4 * least_tokens, total_tokens // num_nodes // 64))
    node_pieces = deal(parts, nodes, bound_s * (1 + effort.node_slack), least_on_node)
    if node_pieces is not None:
        # A node is a bin that computes with all its units and receives at its NICs, `cross_s`, meanwhile.
        rebalance(parts, node_pieces, nodes, costs.cross_s, bound_s * GOOD_ENOUGH)
    return node_pieces


def _parts_by_node(
    parts: Sequence[DocumentPart], node_pieces: Sequence[Pieces], num_nodes: int
) -> tuple[list[list[DocumentPart]], list[list[DocumentPart]]]:
    """Return by node the documents that are on this node alone, and its parts of documents on several nodes.

    Args:
        node_pieces: nodes of every document, with their tokens.
    """
    inside: list[list[DocumentPart]] = [[] for _ in range(num_nodes)]
    across: list[list[DocumentPart]] = [[] for _ in range(num_nodes)]
    for part, pieces in zip(parts, node_pieces, strict=True):
        if len(pieces) == 1:
            ((only_node, _),) = pieces
            inside[only_node].append(part)
        else:
            for node, tokens in pieces:
                across[node].append(DocumentPart(part.document, part.length, tokens))
    return inside, across


def node_bins(costs: UnitCosts) -> Bins:
    """Return one empty bin for every node, with the speed and the memory of all its units."""
    return Bins(
        token_s=[_shared_s(costs.token_s, units) for units in costs.units_by_node],
        square_s=[_shared_s(costs.square_s, units) for units in costs.units_by_node],
        room=[sum(costs.most_tokens[unit] for unit in units) for units in costs.units_by_node],
    )


def _place_in_node(
    bins: Bins,
    across: Sequence[DocumentPart],
    inside: Sequence[DocumentPart],
    budget_s: float,
    least_tokens: int,
    widen: int,
) -> list[Pieces] | None:
    """Place the documents of one node on its units; None if the units have too little memory.

    Shares of documents over several nodes come first. They are cut over all units, so that every NIC works.

    Returns:
        Units of every document with their tokens, first of those in ``across``, then of those in ``inside``.

    Args:
        bins: the units of the node, empty.
        across: shares of documents over several nodes.
        inside: whole documents, longest first.
        budget_s: time that a unit may take; raised if the node has more work.
        least_tokens: fragments are at least this long where possible.
        widen: factor by which a document is cut over more units than necessary.
    """
    units = range(len(bins.token_s))
    across_pieces = []
    for part in across:
        pieces = bins.fill(units, part.length, part.tokens)
        if pieces is None:
            return None
        across_pieces.append(pieces)
    # Time of the node at perfect balance. With a budget below it, documents would be cut without any gain.
    tokens, squares = 0, 0
    for part in (*across, *inside):
        tokens += part.tokens
        squares += part.tokens * part.length
    balanced_s = tokens * _shared_s(bins.token_s, units) + squares * _shared_s(bins.square_s, units)
    inside_pieces = deal(inside, bins, max(budget_s, balanced_s), least_tokens, widen)
    return None if inside_pieces is None else across_pieces + inside_pieces


def _shared_s(seconds: Sequence[float], units: Sequence[int]) -> float:
    """Return the seconds per token, or per square of a length, if all units share it: 1 s and 1 s give 0.5 s."""
    return 1 / fsum(1 / seconds[unit] for unit in units)
