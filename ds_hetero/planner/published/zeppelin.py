"""Zeppelin's partitioner by its Algorithms 1 and 2 (EuroSys 2026, section 3.1), for comparison with ours.

It takes all ranks as equal, and balances tokens between nodes and squares of document lengths inside a node. Documents
at least as long as a threshold are cut over several nodes, or over several units of a node; shorter documents are
placed uncut. If an uncut document does not fit, the threshold is lowered to the longest uncut document, and the pass
begins again.

Documents that are cut get ceil(length / mean tokens of a node) nodes, or inside a node ceil(length^2 / mean sum of
squares of a unit) units. So a document below the mean stays on one node, or unit, all the same.

The text leaves some choices open. Here a document of exactly the threshold is cut; "empty buckets" are the least loaded
buckets; c_avg counts all documents that stay on the node; the capacity of a unit is at most twice the mean tokens,
since with a larger capacity all documents would stay uncut.

Its remapping (section 3.4) is run for the placements of every planner, see
`ds_hetero.planner.document_search.remapping`.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import NamedTuple

from ds_hetero.errors import PlanError
from ds_hetero.planner.document_search.unit_costs import Pieces, UnitCosts
from ds_hetero.planner.published.interface import PublishedPlanner
from ds_hetero.values.splits import share

CAPACITY_OVER_MEAN = 2.0  # capacity of a unit, as a multiple of the mean tokens; left open by the paper, not measured


class DocumentRing(NamedTuple):
    """A document and the units that share it evenly."""

    document: int  # index of the document
    zone: str  # ``"cluster"``, ``"node"`` or ``"local"``
    units: tuple[int, ...]  # in the order of the ring


class _Fragment(NamedTuple):
    """A node's share of a document, in tokens."""

    document: int  # index of the document
    tokens: float
    is_inter_node: bool  # whether the document reaches the threshold; it may still be on one node only


def zeppelin(lengths: Sequence[int], costs: UnitCosts) -> list[Pieces]:
    """Place documents by Zeppelin's algorithms: return the units of every document, with equal shares of its tokens.

    Raises:
        PlanError: nodes have different numbers of units.
    """
    units_by_node = costs.units_by_node
    if len({len(units) for units in units_by_node}) > 1:
        raise PlanError(
            f"Zeppelin cannot plan this: its Algorithm 1 has equally many devices P on every node, here nodes have "
            f"{[len(units) for units in units_by_node]} units. Leave the planner out for ours."
        )
    pieces_by_document: list[Pieces] = [[] for _ in lengths]
    capacity = min(min(costs.most_tokens), CAPACITY_OVER_MEAN * sum(lengths) / len(costs.token_s))
    for document, _, units in zeppelin_rings(lengths, units_by_node, capacity):
        tokens = share(lengths[document], [1.0] * len(units))
        pieces_by_document[document] = [(unit, count) for unit, count in zip(units, tokens, strict=True) if count]
    return pieces_by_document


def zeppelin_rings(
    lengths: Sequence[int], units_by_node: Sequence[Sequence[int]], capacity: float
) -> list[DocumentRing]:
    """Run both algorithms, and return the ring of every document.

    Args:
        units_by_node: units of every node, equally many.
        capacity: most tokens of a unit, the paper's L.
    """
    buckets = _divide_over_nodes(lengths, len(units_by_node), len(units_by_node[0]) * capacity)
    nodes_of: dict[int, list[int]] = {}
    rings = []
    for node, bucket in enumerate(buckets):
        for fragment in bucket:
            if fragment.is_inter_node:
                nodes_of.setdefault(fragment.document, []).append(node)
        rings += _divide_inside_node(lengths, bucket, units_by_node[node], capacity)
    inter_node_rings = []
    for document, nodes in nodes_of.items():
        units = itertools.chain.from_iterable(units_by_node[node] for node in nodes)
        inter_node_rings.append(DocumentRing(document, "cluster" if len(nodes) > 1 else "node", tuple(units)))
    return inter_node_rings + rings


def _divide_over_nodes(lengths: Sequence[int], num_nodes: int, capacity: float) -> list[list[_Fragment]]:
    """Algorithm 1: return the fragments of every node, its bucket.

    Args:
        capacity: most tokens of a node.
    """
    order = sorted(range(len(lengths)), key=lengths.__getitem__, reverse=True)  # stable: ties by index
    average = sum(lengths) / num_nodes
    threshold = capacity
    while True:
        buckets: list[list[_Fragment]] = [[] for _ in range(num_nodes)]
        node_tokens = [0.0] * num_nodes
        for j in (j for j in order if lengths[j] >= threshold):
            count = min(-int(-lengths[j] // average), num_nodes)
            for node in sorted(range(num_nodes), key=lambda node: (node_tokens[node], node))[:count]:
                buckets[node].append(_Fragment(j, lengths[j] / count, True))
                node_tokens[node] += lengths[j] / count
        uncut = [j for j in order if lengths[j] < threshold]
        for j in uncut:
            node = min(range(num_nodes), key=lambda node: (node_tokens[node], node))
            if node_tokens[node] + lengths[j] > capacity:
                break
            buckets[node].append(_Fragment(j, lengths[j], False))
            node_tokens[node] += lengths[j]
        else:
            return buckets
        threshold = lengths[uncut[0]]


def _divide_inside_node(
    lengths: Sequence[int], bucket: Sequence[_Fragment], units: Sequence[int], capacity: float
) -> list[DocumentRing]:
    """Algorithm 2: return the rings of the documents that stay on one node.

    Args:
        bucket: fragments of the node.
        units: units of the node.
        capacity: most tokens of a unit.
    """
    inter_node_tokens = sum(fragment.tokens for fragment in bucket if fragment.is_inter_node) / len(units)  # of a unit
    inside = [fragment.document for fragment in bucket if not fragment.is_inter_node]
    average = sum(lengths[j] ** 2 for j in inside) / len(units)
    threshold = capacity
    while True:
        rings, unit_tokens = [], [inter_node_tokens] * len(units)
        next_unit = 0  # documents that are cut take units in turn
        for j in (j for j in inside if lengths[j] >= threshold):
            count = min(-int(-(lengths[j] ** 2) // average), len(units))
            members = sorted((next_unit + i) % len(units) for i in range(count))
            next_unit += count
            for i in members:
                unit_tokens[i] += lengths[j] / count
            rings.append(DocumentRing(j, "node" if count > 1 else "local", tuple(units[i] for i in members)))
        uncut = [j for j in inside if lengths[j] < threshold]
        for j in uncut:
            i = min(range(len(units)), key=lambda i: (unit_tokens[i], i))
            if unit_tokens[i] + lengths[j] > capacity:
                break
            unit_tokens[i] += lengths[j]
            rings.append(DocumentRing(j, "local", (units[i],)))
        else:
            return rings
        threshold = lengths[uncut[0]]


ZEPPELIN = PublishedPlanner(
    name="zeppelin", title="Zeppelin", source="EuroSys 2026, Algorithms 1 and 2", documents=zeppelin
)
