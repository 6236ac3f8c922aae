"""Zeppelin's partitioner as its Algorithms 1 and 2 say it (EuroSys 2026, section 3.1), for comparison.

It takes ranks for equal and balances tokens between nodes and squares of lengths inside them. Documents from a
threshold on are cut over several nodes, or over several units of a node; where a shorter one does not fit whole, the
threshold becomes the length of the longest that is to stay whole, and the pass begins again.

What the text leaves open is settled so: a document of exactly the threshold is cut; "empty buckets" are the least
loaded ones; c_avg counts all documents that stay on the node; a unit's capacity is at most twice the mean of tokens,
as a larger one leaves everything whole.

Its remapping (section 3.4) is run for the placements of every planner, see
`ds_hetero.planner.document_search.remapping`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from ds_hetero.errors import PlanError
from ds_hetero.planner.document_search.unit_costs import Pieces, UnitCosts
from ds_hetero.planner.published.interface import PublishedPlanner
from ds_hetero.values.splits import share

CAPACITY_OVER_MEAN = 2.0  # of a unit's tokens, over the mean; left open by the paper: chosen, never measured


class DocumentRing(NamedTuple):
    """A document and the units that share it evenly."""

    document: int  # its index
    zone: str  # ``"cluster"``, ``"node"`` or ``"local"``
    units: tuple[int, ...]  # in the order of the ring


class _Fragment(NamedTuple):
    """A node's share of a document, in tokens; an inter-node document may lie on one node all the same."""

    document: int
    tokens: float
    is_inter_node: bool


def zeppelin(lengths: Sequence[int], costs: UnitCosts) -> list[Pieces]:
    """Units of every document with their tokens. Raises `PlanError`: nodes have different numbers of units."""
    units_by_node = costs.units_by_node
    if len({len(units) for units in units_by_node}) > 1:
        raise PlanError(
            f"Zeppelin cannot plan this: its Algorithm 1 has as many devices P on every node, here nodes have "
            f"{[len(units) for units in units_by_node]} units. Leave the planner out for ours."
        )
    placed: list[Pieces] = [[] for _ in lengths]
    capacity = min(min(costs.most_tokens), CAPACITY_OVER_MEAN * sum(lengths) / len(costs.token_s))
    for document, _, units in zeppelin_rings(lengths, units_by_node, capacity):
        tokens = share(lengths[document], [1.0] * len(units))
        placed[document] = [(unit, count) for unit, count in zip(units, tokens, strict=True) if count]
    return placed


def zeppelin_rings(
    lengths: Sequence[int], units_by_node: Sequence[Sequence[int]], capacity: float
) -> list[DocumentRing]:
    """Both algorithms, on as many units of each node; ``capacity``: tokens of a unit, the paper's L."""
    buckets = _inter_node(lengths, len(units_by_node), len(units_by_node[0]) * capacity)
    nodes_of: dict[int, list[int]] = {}
    rings = []
    for node, bucket in enumerate(buckets):
        for fragment in bucket:
            if fragment.is_inter_node:
                nodes_of.setdefault(fragment.document, []).append(node)
        rings += _intra_node(lengths, bucket, units_by_node[node], capacity)
    across = [
        DocumentRing(
            document, "cluster" if len(nodes) > 1 else "node", tuple(u for node in nodes for u in units_by_node[node])
        )
        for document, nodes in nodes_of.items()
    ]
    return across + rings


def _inter_node(lengths: Sequence[int], num_nodes: int, capacity: float) -> list[list[_Fragment]]:
    """Algorithm 1: documents of every node; ``capacity`` is that of a node."""
    order = sorted(range(len(lengths)), key=lengths.__getitem__, reverse=True)  # stable: ties by index
    average = sum(lengths) / num_nodes
    threshold = capacity
    while True:
        buckets: list[list[_Fragment]] = [[] for _ in range(num_nodes)]
        held = [0.0] * num_nodes
        for j in (j for j in order if lengths[j] >= threshold):
            count = min(-int(-lengths[j] // average), num_nodes)
            for node in sorted(range(num_nodes), key=lambda node: (held[node], node))[:count]:
                buckets[node].append(_Fragment(j, lengths[j] / count, True))
                held[node] += lengths[j] / count
        whole = [j for j in order if lengths[j] < threshold]
        for j in whole:
            node = min(range(num_nodes), key=lambda node: (held[node], node))
            if held[node] + lengths[j] > capacity:
                break
            buckets[node].append(_Fragment(j, lengths[j], False))
            held[node] += lengths[j]
        else:
            return buckets
        threshold = lengths[whole[0]]


def _intra_node(
    lengths: Sequence[int], bucket: Sequence[_Fragment], units: Sequence[int], capacity: float
) -> list[DocumentRing]:
    """Algorithm 2: rings of the documents that stay on one node."""
    shared = sum(fragment.tokens for fragment in bucket if fragment.is_inter_node) / len(units)
    inside = [fragment.document for fragment in bucket if not fragment.is_inter_node]
    average = sum(lengths[j] ** 2 for j in inside) / len(units)
    threshold = capacity
    while True:
        rings, held, at = [], [shared] * len(units), 0
        for j in (j for j in inside if lengths[j] >= threshold):
            count = min(-int(-(lengths[j] ** 2) // average), len(units))
            members = sorted((at + i) % len(units) for i in range(count))
            at += count
            for i in members:
                held[i] += lengths[j] / count
            rings.append(DocumentRing(j, "node" if count > 1 else "local", tuple(units[i] for i in members)))
        whole = [j for j in inside if lengths[j] < threshold]
        for j in whole:
            i = min(range(len(units)), key=lambda i: (held[i], i))
            if held[i] + lengths[j] > capacity:
                break
            held[i] += lengths[j]
            rings.append(DocumentRing(j, "local", (units[i],)))
        else:
            return rings
        threshold = lengths[whole[0]]


ZEPPELIN = PublishedPlanner(
    name="zeppelin", title="Zeppelin", source="EuroSys 2026, Algorithms 1 and 2", documents=zeppelin
)
