"""One candidate: documents to nodes, then to the units of every node.

It is Zeppelin's two-level partitioner (EuroSys 2026, section 3.1) in seconds: its zones come out of what fits whole. A
document stays whole on a node if the node ends within the budget, and whole on a unit likewise; a document that does
not fit is cut over as few nodes, or units, as can hold it.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import fsum
from typing import NamedTuple

from ds_hetero.planner.document_search.bins import Bins, DocumentPart, deal
from ds_hetero.planner.document_search.rebalance import rebalance
from ds_hetero.planner.document_search.unit_costs import Pieces, UnitCosts

GOOD = 1.02  # over the ideal time: a placement within it is not made better; chosen, never measured


class Effort(NamedTuple):
    """How far a candidate goes for balance."""

    unit_slack: float  # share by which the budget of a unit exceeds the ideal time
    node_slack: float  # the same of a node
    widen: int = 1  # rings have so many times the units that they need


def two_level(
    lengths: Sequence[int], order: Sequence[int], costs: UnitCosts, bound_s: float, effort: Effort, least_tokens: int
) -> list[Pieces] | None:
    """Units of every document with their tokens; None if the memory of a node or a unit does not suffice.

    Args:
        order: their indices, longest first.
        effort: how much more than the ideal time a unit and a node may take.
        least_tokens: fragments are this long where possible.
    """
    units_by_node = costs.units_by_node
    parts = [DocumentPart(document, lengths[document], lengths[document]) for document in order]
    pieces_by_part = _on_nodes(parts, costs, bound_s, effort, least_tokens)
    if pieces_by_part is None:
        return None
    inside, across = _parts_by_node(parts, pieces_by_part, len(units_by_node))
    placed: list[Pieces] = [[] for _ in lengths]
    for node, units in enumerate(units_by_node):
        bins = Bins(
            token_s=[costs.token_s[unit] for unit in units],
            square_s=[costs.square_s[unit] for unit in units],
            room=[costs.most_tokens[unit] for unit in units],
        )
        budget_s = bound_s * (1 + effort.unit_slack)
        pieces_in_node = _inside(bins, across[node], inside[node], budget_s, least_tokens, effort.widen)
        if pieces_in_node is None:
            return None
        for part, pieces in zip((*across[node], *inside[node]), pieces_in_node, strict=True):
            placed[part.document] += [(units[i], tokens) for i, tokens in pieces]
    return placed


def _on_nodes(
    parts: Sequence[DocumentPart], costs: UnitCosts, bound_s: float, effort: Effort, least_tokens: int
) -> list[Pieces] | None:
    """Nodes of every document with their tokens; None if their memory does not suffice."""
    num_nodes = costs.num_nodes
    if num_nodes == 1:
        return [[(0, part.tokens)] for part in parts]
    nodes = node_bins(costs)
    total_tokens = sum(part.tokens for part in parts)
    # Fragments on nodes are cut again over units: longer ones where the batch allows, up to four times as long, and at
    # most a 64th of what a node gets on average. Chosen, never measured alone.
    least_on_node = max(least_tokens, min(4 * least_tokens, total_tokens // num_nodes // 64))
    by_node = deal(parts, nodes, bound_s * (1 + effort.node_slack), least_on_node)
    if by_node is not None:
        # Attention of a node is that of its units together, so what it receives counts per unit.
        rebalance(parts, by_node, nodes, costs.cross_s, bound_s * GOOD)
    return by_node


def _parts_by_node(
    parts: Sequence[DocumentPart], by_node: Sequence[Pieces], num_nodes: int
) -> tuple[list[list[DocumentPart]], list[list[DocumentPart]]]:
    """Documents that lie in one node, and parts of those that lie in several, by node."""
    inside: list[list[DocumentPart]] = [[] for _ in range(num_nodes)]
    across: list[list[DocumentPart]] = [[] for _ in range(num_nodes)]
    for part, pieces in zip(parts, by_node, strict=True):
        if len(pieces) == 1:
            inside[pieces[0][0]].append(part)
        else:
            for node, tokens in pieces:
                across[node].append(DocumentPart(part.document, part.length, tokens))
    return inside, across


def node_bins(costs: UnitCosts) -> Bins:
    """One empty bin per node, with the speed and the room of all its units."""
    units = costs.units_by_node
    return Bins(
        token_s=[_together(costs.token_s, of_node) for of_node in units],
        square_s=[_together(costs.square_s, of_node) for of_node in units],
        room=[sum(costs.most_tokens[unit] for unit in of_node) for of_node in units],
    )


def _inside(
    bins: Bins,
    across: Sequence[DocumentPart],
    inside: Sequence[DocumentPart],
    budget_s: float,
    least_tokens: int,
    widen: int,
) -> list[Pieces] | None:
    """Place what one node holds on its units.

    Shares of documents over several nodes come first and go over all units, so that every network interface works.

    Args:
        bins: the units of the node, empty.
        across: shares of documents over several nodes.
        inside: whole documents, longest first.
        budget_s: time that a unit may take; more where the node has more to do.
        least_tokens: fragments are this long where possible.
        widen: rings have so many times the units that they need.
    """
    units = range(len(bins.token_s))
    placed = []
    for part in across:
        pieces = bins.fill(units, part.length, part.tokens)
        if pieces is None:
            return None
        placed.append(pieces)
    # The node's work at perfect balance: a budget below it would cut documents that have to be computed anyway.
    tokens, squares = 0, 0
    for part in (*across, *inside):
        tokens += part.tokens
        squares += part.tokens * part.length
    work_s = tokens * _together(bins.token_s, units) + squares * _together(bins.square_s, units)
    dealt = deal(inside, bins, max(budget_s, work_s), least_tokens, widen)
    return None if dealt is None else placed + dealt


def _together(seconds: Sequence[float], units: Sequence[int]) -> float:
    """Seconds of one unit of work if all units share it by speed."""
    return 1 / fsum(1 / seconds[unit] for unit in units)
