"""Time of the transfers of one ring step when the bytes of a device add up at its ports.

As in `exchange_time`: what a rank receives (or sends) in one step adds up at its inner port and at its network port,
and what the ranks of a node do adds up at its NIC and its switch. HexiSeq's Eq. 12 lets different sources run side by
side (arXiv:2605.07569, section A.4).

Dimension key: B assignments, D ranks, K groups in ring order, E edges.
"""

from __future__ import annotations

import numpy as np

from ds_hetero.common.arrays import Floats, Ints
from ds_hetero.cost.terms.grouping import Grouping
from ds_hetero.cost.terms.heads import Edges, ring_edges


def ring_transfers_s(
    grouping: Grouping, heads_BD: Ints, length_BK: Floats, queries_per_kv_head: int
) -> tuple[Floats, Floats, Floats]:
    """Transfers from the group one position back into every group, each ``[B, K]``.

    Returns:
        latency in seconds; seconds per token and byte of a KV head; and the least seconds per byte of a KV head that a
        NIC or a switch allows which all transfers of the step share, for blocks of average length.
    """
    num_sets, num_groups = length_BK.shape
    zeros = np.zeros((num_sets, num_groups))
    if num_groups == 1:
        return zeros, zeros, zeros
    cluster = grouping.cluster
    if not cluster.shares_ports:
        return (*_of_heads_alone(grouping, heads_BD, queries_per_kv_head), zeros)
    edges, set_E, latency_BK, transfer_BK = _own_ports(grouping, heads_BD, queries_per_kv_head)
    shared_E = _shared_s(grouping, edges, set_E, length_BK.mean(axis=1))
    return latency_BK, transfer_BK, _largest(edges, shared_E, num_groups)


def _of_heads_alone(grouping: Grouping, heads_BD: Ints, queries_per_kv_head: int) -> tuple[Floats, Floats]:
    """Latency and seconds per token where no port is shared: tokens do not matter, so heads seen before are known."""
    known = grouping.transfers_of_heads
    new_B = np.concatenate([[True], (heads_BD[1:] != heads_BD[:-1]).any(axis=1)])
    different_RD = heads_BD[new_B]
    keys = [(queries_per_kv_head, row.tobytes()) for row in different_RD]
    unknown = [r for r, key in enumerate(keys) if key not in known]
    if unknown:
        _, _, latency_RK, transfer_RK = _own_ports(grouping, different_RD[unknown], queries_per_kv_head)
        known.update(zip((keys[r] for r in unknown), zip(latency_RK, transfer_RK, strict=True), strict=True))
    run_B = np.cumsum(new_B) - 1
    latency_RK, transfer_RK = (np.array(each) for each in zip(*(known[key] for key in keys), strict=True))
    return latency_RK[run_B], transfer_RK[run_B]


def _own_ports(grouping: Grouping, heads_BD: Ints, queries_per_kv_head: int) -> tuple[Edges, Ints, Floats, Floats]:
    """Edges, the assignment of each, and latency and seconds per token by what a rank's own ports carry."""
    cluster, (num_sets, num_groups) = grouping.cluster, (len(heads_BD), grouping.num_groups)
    edges = ring_edges(grouping, heads_BD, queries_per_kv_head)
    set_E = np.repeat(np.arange(num_sets), np.diff(np.append(edges.starts[::num_groups], len(edges.heads))))
    pair = cluster.node_of_rank[edges.sender], cluster.node_of_rank[edges.receiver]
    outside_E = pair[0] != pair[1]
    port_s_E = edges.heads * cluster.node_p2p_s_per_byte[pair]
    worst_E = np.zeros(len(port_s_E))
    for rank_E in (edges.sender, edges.receiver):
        port_E = (set_E * cluster.num_ranks + rank_E) * 2 + outside_E
        np.maximum(worst_E, np.bincount(port_E, weights=port_s_E)[port_E], out=worst_E)
    latency_BK = _largest(edges, cluster.node_latency_s[pair], num_groups)
    return edges, set_E, latency_BK, _largest(edges, worst_E, num_groups)


def _largest(edges: Edges, values_E: Floats, num_groups: int) -> Floats:
    """The largest value of the edges into every group, ``[B, K]``."""
    return np.asarray(np.maximum.reduceat(values_E, edges.starts).reshape(-1, num_groups))


def _shared_s(grouping: Grouping, edges: Edges, set_E: Ints, length_B: Floats) -> Floats:
    """The time that the busiest shared port of every edge needs for all its edges, ``[E]``."""
    cluster = grouping.cluster
    send, receive = cluster.node_of_rank[edges.sender], cluster.node_of_rank[edges.receiver]
    outside_E = send != receive
    amount_E = length_B[set_E] * edges.heads
    shared_E = np.zeros(len(amount_E))
    for node_E, capacity, users_E in (
        (send, cluster.nic_bytes_per_s, outside_E),
        (receive, cluster.nic_bytes_per_s, outside_E),
        (receive, cluster.switch_bytes_per_s, ~outside_E),
    ):
        port_E = set_E * len(cluster.nodes) + node_E
        load_E = np.bincount(port_E, weights=np.where(users_E, amount_E, 0.0))[port_E] / capacity[node_E]
        np.maximum(shared_E, np.where(users_E, load_E, 0.0), out=shared_E)
    return shared_E
