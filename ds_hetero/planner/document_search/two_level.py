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
    units = costs.units_by_node
    nodes = node_bins(costs)
    longest_first = [lengths[j] for j in order]
    parts = list(map(DocumentPart, order, longest_first, longest_first))
    if len(units) == 1:
        by_node: list[Pieces] | None = [[(0, tokens)] for tokens in longest_first]
    else:
        fragment = max(least_tokens, min(4 * least_tokens, sum(lengths) // len(units) // 64))
        by_node = deal(parts, nodes, bound_s * (1 + effort.node_slack), fragment)
    if by_node is None:
        return None
    if len(units) > 1:
        # Attention of a node is that of its units together, so what it receives counts per unit.
        rebalance(parts, by_node, nodes, costs.cross_s, bound_s * GOOD)
    inside, across = _parts_by_node(parts, by_node, len(units))
    placed: list[Pieces] = [[] for _ in lengths]
    for node, of_node in enumerate(units):
        bins = Bins(
            token_s=[costs.token_s[unit] for unit in of_node],
            square_s=[costs.square_s[unit] for unit in of_node],
            room=[costs.most_tokens[unit] for unit in of_node],
        )
        budget_s = bound_s * (1 + effort.unit_slack)
        of_parts = _inside(bins, across[node], inside[node], budget_s, least_tokens, effort.widen)
        if of_parts is None:
            return None
        for (document, _, _), pieces in zip((*across[node], *inside[node]), of_parts, strict=True):
            of_document = placed[document]
            for i, tokens in pieces:
                of_document.append((of_node[i], tokens))
    return placed


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
    ring = range(len(bins.token_s))
    placed = []
    for _, length, tokens in across:
        pieces = bins.fill(ring, length, tokens)
        if pieces is None:
            return None
        placed.append(pieces)
    per_token, per_square = 1 / fsum(1 / s for s in bins.token_s), 1 / fsum(1 / s for s in bins.square_s)
    tokens, squares = 0, 0
    for _, length, held in (*across, *inside):
        tokens += held
        squares += held * length
    work_s = tokens * per_token + squares * per_square
    dealt = deal(inside, bins, max(budget_s, work_s), least_tokens, widen)
    return None if dealt is None else placed + dealt


def _together(seconds: Sequence[float], units: Sequence[int]) -> float:
    """Seconds of one unit of work if all units share it by speed."""
    return 1 / fsum(1 / seconds[unit] for unit in units)
