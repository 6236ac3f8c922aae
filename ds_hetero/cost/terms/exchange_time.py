"""Time of a ragged all-to-all when the bytes of a device add up at its ports.

HexiSeq's Eq. 9 takes the slowest pair alone, so a group of many ranks exchanges almost for free (arXiv:2605.07569,
section A.4). Here a rank sends everything for other nodes through one network port and everything for its own node
through one inner port (NVLink, PCIe); the two work side by side. Nodes whose ranks share a NIC or a switch are bound by
the sum of their bytes as well.

The exchange moves s_d x w_j bytes from rank d to rank j, where w counts q, k and v on the way in. With tokens and
weights trading places the same function gives the way back, because ports are equally fast both ways.

Dimension key: B assignments, D ranks, K groups, N node slices, S sites: see `grouping`.
"""

from __future__ import annotations

import numpy as np

from ds_hetero.common.arrays import Floats
from ds_hetero.cost.terms.grouping import Grouping


def exchange_s(grouping: Grouping, tokens_BD: Floats, bytes_BD: Floats) -> Floats:
    """Transfer time of one all-to-all in every group, without latency, ``[B, K]``.

    Args:
        grouping: the groups.
        tokens_BD: s, tokens of every rank.
        bytes_BD: w, bytes per token that every rank receives for its heads.
    """
    part, values_2BD = grouping.node_slices.part_of, np.stack([tokens_BD, bytes_BD])
    values_2BN = grouping.node_slices.reduce(np.add, values_2BD)
    tokens_BN, bytes_BN = values_2BN
    # What a rank sends is its tokens of others' bytes, and what it receives its bytes of others' tokens.
    inside_2BD = values_2BD * (values_2BN[::-1, :, part] - values_2BD[::-1])
    worst_BD = inside_2BD.max(axis=0) * grouping.inner_s_per_byte
    if len(grouping.slice_node) > grouping.num_groups:  # some group spans several nodes
        outside_2BD = values_2BD * _elsewhere(grouping, values_2BN[::-1])[..., part]
        np.maximum(worst_BD, outside_2BD.max(axis=0), out=worst_BD)
    time_BK = grouping.by_group(np.maximum, worst_BD)
    if grouping.cluster.shares_ports:
        same_BN = grouping.node_slices.reduce(np.add, tokens_BD * bytes_BD)
        time_BK = np.maximum(time_BK, _shared_s(grouping, tokens_BN, bytes_BN, same_BN))
    return time_BK


def _elsewhere(grouping: Grouping, amount_N: Floats) -> Floats:
    """Share of a node slice's group in its other slices, times the seconds per byte to get there, ``[..., N]``."""
    source, destination, _, _ = grouping.site_pairs
    s_per_byte, starts, own_s_N = grouping.site_s_per_byte
    amount_S = grouping.sites.reduce(np.add, amount_N)
    weighted_S = np.zeros_like(amount_S)
    weighted_S[..., source[starts]] = np.add.reduceat(amount_S[..., destination] * s_per_byte, starts, axis=-1)
    return np.asarray(weighted_S[..., grouping.sites.part_of] - own_s_N * amount_N)


def _shared_s(grouping: Grouping, tokens_BN: Floats, bytes_BN: Floats, same_BN: Floats) -> Floats:
    """The same for what a node's ranks share, ``[B, K]``: all groups exchange at once, so their bytes add up."""
    cluster, group, node = grouping.cluster, grouping.slice_group, grouping.slice_node
    all_tokens_BN = np.add.reduceat(tokens_BN, grouping.group_starts, axis=1)[:, group]
    all_bytes_BN = np.add.reduceat(bytes_BN, grouping.group_starts, axis=1)[:, group]
    out_BN = tokens_BN * (all_bytes_BN - bytes_BN)
    into_BN = bytes_BN * (all_tokens_BN - tokens_BN)
    inside_BN = tokens_BN * bytes_BN - same_BN
    nic_bytes = np.maximum(grouping.by_node(np.add, out_BN), grouping.by_node(np.add, into_BN))
    nic_s = nic_bytes / cluster.nic_bytes_per_s
    switch_s = grouping.by_node(np.add, inside_BN) / cluster.switch_bytes_per_s
    time_BN = np.where(out_BN + into_BN > 0, nic_s[:, node], 0.0)
    np.maximum(time_BN, np.where(inside_BN > 0, switch_s[:, node], 0.0), out=time_BN)
    return np.asarray(np.maximum.reduceat(time_BN, grouping.group_starts, axis=1))
