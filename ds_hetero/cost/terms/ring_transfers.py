"""Time of a KV transfer in one step of the ring, bounded by the ports of a rank and by its node's NIC and switch.

As in the all-to-all, all bytes that a rank sends in one step add up at its inner port (to its own node) and at its
network port (to others), and so do all bytes that it receives. The bytes of all ranks of a node add up at the node's
NIC and switch, if they share these. HexiSeq's Eq. 12 instead lets transfers from different sources run side by side
(arXiv:2605.07569, section A.4).

Dimension key: B assignments, R assignments with unlike transfers, D ranks, K groups in ring order, E edges (`Edges`).
"""

from __future__ import annotations

import numpy as np

from ds_hetero.common.arrays import Floats, Ints
from ds_hetero.cost.terms.grouping import Grouping
from ds_hetero.cost.terms.head_cuts import Edges, ring_edges


def ring_transfers_s(
    grouping: Grouping, heads_BD: Ints, length_BK: Floats, queries_per_kv_head: int
) -> tuple[Floats, Floats, Floats]:
    """Compute latency and rates of the transfer into every group from the group before it in the ring.

    Tokens matter only where ranks share ports, and then only through the mean length of a group, so one partition has
    few different results. `Grouping.ring_transfers` caches them.

    Returns:
        Three arrays ``[B, K]``: latency in seconds; seconds per token and byte of a KV head at a rank's ports; least
        seconds per byte of a KV head at a NIC or switch that several transfers share, for blocks of mean length.
    """
    num_sets, num_groups = length_BK.shape
    zeros = np.zeros((num_sets, num_groups))
    if num_groups == 1:
        return zeros, zeros, zeros
    mean_length_B = np.zeros(num_sets)
    if grouping.cluster.shares_ports:  # rint: sums that differ by rounding alone share a cache entry
        mean_length_B = np.rint(length_BK.sum(axis=1)) / num_groups
    # A search passes many adjacent rows with equal heads: each run of them is looked up once.
    heads_change_B = (heads_BD[1:] != heads_BD[:-1]).any(axis=1)
    length_changes_B = mean_length_B[1:] != mean_length_B[:-1]
    begins_run_B = np.concatenate([[True], heads_change_B | length_changes_B])
    heads_RD, mean_length_R = heads_BD[begins_run_B], mean_length_B[begins_run_B]
    keys = [
        (queries_per_kv_head, length, heads.tobytes())
        for heads, length in zip(heads_RD, mean_length_R.tolist(), strict=True)
    ]
    results = grouping.ring_transfers
    missing = [r for r, key in enumerate(keys) if key not in results]
    if missing:
        computed = _transfers_s(grouping, heads_RD[missing], mean_length_R[missing], queries_per_kv_head)
        for r, *of_row in zip(missing, *computed, strict=True):
            latency_K, transfer_K, shared_K = of_row
            results[keys[r]] = latency_K, transfer_K, shared_K
    run_B = np.cumsum(begins_run_B) - 1
    latencies, transfers, shared = zip(*[results[key] for key in keys], strict=True)
    return np.array(latencies)[run_B], np.array(transfers)[run_B], np.array(shared)[run_B]


def _transfers_s(
    grouping: Grouping, heads_BD: Ints, mean_length_B: Floats, queries_per_kv_head: int
) -> tuple[Floats, Floats, Floats]:
    """Compute the result of `ring_transfers_s` for assignments that are not in its cache."""
    cluster, num_groups = grouping.cluster, grouping.num_groups
    edges = ring_edges(grouping, heads_BD, queries_per_kv_head)
    assignment_E = _assignment_of_edges(edges, len(heads_BD), num_groups)
    nodes = cluster.node_of_rank[edges.sender], cluster.node_of_rank[edges.receiver]
    latency_BK = _largest(edges, cluster.node_latency_s[nodes], num_groups)
    transfer_BK = _largest(edges, _own_ports_s(grouping, edges, assignment_E), num_groups)
    if not cluster.shares_ports:
        return latency_BK, transfer_BK, np.zeros_like(latency_BK)
    shared_E = _shared_ports_s(grouping, edges, assignment_E, mean_length_B)
    return latency_BK, transfer_BK, _largest(edges, shared_E, num_groups)


def _assignment_of_edges(edges: Edges, num_sets: int, num_groups: int) -> Ints:
    """Return the assignment of every edge, ``[E]``; edges are sorted by assignment."""
    first = edges.starts[::num_groups]  # first edge of every assignment
    counts = np.append(first[1:], len(edges.heads)) - first
    return np.repeat(np.arange(num_sets), counts)


def _largest(edges: Edges, values_E: Floats, num_groups: int) -> Floats:
    """Return the largest value of any edge into each group, ``[B, K]``."""
    return np.asarray(np.maximum.reduceat(values_E, edges.starts).reshape(-1, num_groups))


def _own_ports_s(grouping: Grouping, edges: Edges, assignment_E: Ints) -> Floats:
    """Seconds per token and byte of a KV head at the busier of an edge's two ports, ``[E]``.

    Each rank has two ports: 0 to its own node and 1 to other nodes. The time at a port is the sum over all its edges.
    """
    cluster = grouping.cluster
    nodes = cluster.node_of_rank[edges.sender], cluster.node_of_rank[edges.receiver]
    between_nodes_E = nodes[0] != nodes[1]
    edge_s_E = edges.heads * cluster.node_p2p_s_per_byte[nodes]
    port_s_E = np.zeros(len(edge_s_E))
    for rank_E in (edges.sender, edges.receiver):
        port_E = (assignment_E * cluster.num_ranks + rank_E) * 2 + between_nodes_E
        np.maximum(port_s_E, np.bincount(port_E, weights=edge_s_E)[port_E], out=port_s_E)
    return port_s_E


def _shared_ports_s(grouping: Grouping, edges: Edges, assignment_E: Ints, mean_length_B: Floats) -> Floats:
    """Seconds per byte of a KV head at the busiest NIC or switch of an edge, for all edges through it, ``[E]``."""
    cluster = grouping.cluster
    sending_E, receiving_E = cluster.node_of_rank[edges.sender], cluster.node_of_rank[edges.receiver]
    between_nodes_E = sending_E != receiving_E
    amount_E = mean_length_B[assignment_E] * edges.heads
    shared_s_E = np.zeros(len(amount_E))
    for node_E, bytes_per_s, uses_port_E in (
        (sending_E, cluster.nic_bytes_per_s, between_nodes_E),
        (receiving_E, cluster.nic_bytes_per_s, between_nodes_E),
        (receiving_E, cluster.switch_bytes_per_s, ~between_nodes_E),
    ):
        port_E = assignment_E * len(cluster.nodes) + node_E
        load = np.bincount(port_E, weights=np.where(uses_port_E, amount_E, 0.0))  # by port
        load_s_E = load[port_E] / bytes_per_s[node_E]
        np.maximum(shared_s_E, np.where(uses_port_E, load_s_E, 0.0), out=shared_s_E)
    return shared_s_E
