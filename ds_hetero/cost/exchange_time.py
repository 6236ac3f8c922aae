"""Time of a ragged all-to-all when the bytes of a device add up at its ports.

HexiSeq's Eq. 9 takes the slowest pair alone, so a group of many ranks exchanges almost for free (arXiv:2605.07569,
section A.4). Here a rank sends everything for other nodes through one network port and everything for its own node
through one inner port (NVLink, PCIe); the two work side by side. Nodes whose ranks share a NIC or a switch are bound by
the sum of their bytes as well.

The exchange moves s_d x w_j bytes from rank d to rank j, where w counts q, k and v on the way in. With tokens and
weights trading places the same function gives the way back, because ports are equally fast both ways.

Dimension key: B assignments, D ranks, K groups, C cells (ranks of one group on one node), R regions: see `Grouping`.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from ds_hetero.cost.grouping import Grouping

__all__ = ["exchange_latency_s", "exchange_s"]

Floats = npt.NDArray[np.float64]


def exchange_s(grouping: Grouping, tokens_BD: Floats, bytes_BD: Floats) -> Floats:
    """Transfer time of one all-to-all in every group, without latency, ``[B, K]``.

    Args:
        grouping: the groups.
        tokens_BD: s, tokens of every rank.
        bytes_BD: w, bytes per token that every rank receives for its heads.
    """
    cell, node = grouping.cells.part_of, grouping.cell_node
    s_per_byte = grouping.cluster.node_all_to_all_s_per_byte
    tokens_BC, bytes_BC = grouping.cells.reduce(np.add, tokens_BD), grouping.cells.reduce(np.add, bytes_BD)
    sent_BD = tokens_BD * (bytes_BC[:, cell] - bytes_BD)
    received_BD = bytes_BD * (tokens_BC[:, cell] - tokens_BD)
    worst_BD = np.maximum(sent_BD, received_BD) * s_per_byte[node, node][cell]
    if len(node) > grouping.num_groups:  # some group spans several nodes
        np.maximum(worst_BD, tokens_BD * _elsewhere(grouping, bytes_BC)[:, cell], out=worst_BD)
        np.maximum(worst_BD, bytes_BD * _elsewhere(grouping, tokens_BC)[:, cell], out=worst_BD)
    time_BK = grouping.by_group(np.maximum, worst_BD)
    if grouping.cluster.shares_ports:
        same_BC = grouping.cells.reduce(np.add, tokens_BD * bytes_BD)
        time_BK = np.maximum(time_BK, _shared_s(grouping, tokens_BC, bytes_BC, same_BC))
    return time_BK


def _elsewhere(grouping: Grouping, amount_BC: Floats) -> Floats:
    """What every cell's group has in other cells, each weighted with the seconds per byte to get there, ``[B, C]``."""
    source, destination, sender, receiver = grouping.region_pairs
    s_per_byte = grouping.cluster.node_all_to_all_s_per_byte[sender, receiver]
    amount_BR = grouping.regions.reduce(np.add, amount_BC)
    weighted_BR, own_s_R = np.zeros_like(amount_BR), np.zeros(amount_BR.shape[1])
    starts = np.flatnonzero(np.diff(source, prepend=-1))
    weighted_BR[:, source[starts]] = np.add.reduceat(amount_BR[:, destination] * s_per_byte, starts, axis=1)
    itself = source == destination
    own_s_R[source[itself]] = s_per_byte[itself]
    return np.asarray(weighted_BR[:, grouping.regions.part_of] - own_s_R[grouping.regions.part_of] * amount_BC)


def _shared_s(grouping: Grouping, tokens_BC: Floats, bytes_BC: Floats, same_BC: Floats) -> Floats:
    """The same for what a node's ranks share, ``[B, K]``: all groups exchange at once, so their bytes add up."""
    cluster, group, node = grouping.cluster, grouping.cell_group, grouping.cell_node
    all_tokens_BC = np.add.reduceat(tokens_BC, grouping.group_starts, axis=1)[:, group]
    all_bytes_BC = np.add.reduceat(bytes_BC, grouping.group_starts, axis=1)[:, group]
    out_BC = tokens_BC * (all_bytes_BC - bytes_BC)
    into_BC = bytes_BC * (all_tokens_BC - tokens_BC)
    inside_BC = tokens_BC * bytes_BC - same_BC
    nic_bytes = np.maximum(grouping.by_node(np.add, out_BC), grouping.by_node(np.add, into_BC))
    nic_s = nic_bytes / cluster.nic_bytes_per_s
    switch_s = grouping.by_node(np.add, inside_BC) / cluster.switch_bytes_per_s
    time_BC = np.where(out_BC + into_BC > 0, nic_s[:, node], 0.0)
    np.maximum(time_BC, np.where(inside_BC > 0, switch_s[:, node], 0.0), out=time_BC)
    return np.asarray(np.maximum.reduceat(time_BC, grouping.group_starts, axis=1))


def exchange_latency_s(grouping: Grouping) -> Floats:
    """Start-up time of one all-to-all in every group, the largest of its pairs, ``[K]``; 0 for single ranks."""
    node, latency_s = grouping.cell_node, grouping.cluster.node_all_to_all_latency_s
    worst_C = np.where(grouping.cells.sizes > 1, latency_s[node, node], 0.0)
    worst_R = grouping.regions.reduce(np.maximum, worst_C)
    source, _, sender, receiver = grouping.region_pairs
    np.maximum.at(worst_R, source, latency_s[sender, receiver])
    return np.asarray(np.maximum.reduceat(worst_R[grouping.regions.part_of], grouping.group_starts))
