"""Time of a group's Ulysses all-to-all, from the sum of bytes at each port.

HexiSeq's Eq. 9 takes the slowest pair alone, so a group of many ranks exchanges almost for free (arXiv:2605.07569,
section A.4). Here a rank sends everything for other nodes through one network port and everything for its own node
through one inner port (NVLink, PCIe); the two work side by side. Where the ranks of a node share a NIC or a switch, the
sum of their bytes is a bound, too.

Rank d sends s_d x w_j bytes to rank j: s are tokens, and w are bytes per token, q, k and v of rank j's heads together.
On the way back rank j sends s_d x w_j bytes to rank d, where w counts the output. Ports are equally fast both ways, so
the same function computes this, too. Three ranks of a node with s = 4, 2, 1 tokens and w = 10, 20, 30 bytes per token:

    rank 0 sends      4 x (20 + 30) = 200,  receives  10 x (2 + 1) = 30
    rank 1 sends      2 x (10 + 30) =  80,  receives  20 x (4 + 1) = 100
    rank 2 sends      1 x (10 + 20) =  30,  receives  30 x (4 + 2) = 180
    the exchange      ends when 200 bytes have passed the inner port of rank 0

Dimension key: B assignments, D ranks, K groups, N node slices, S sites, P pairs of sites (see `grouping`);
a leading 2 is tokens and bytes, in this order.
"""

from __future__ import annotations

import numpy as np

from ds_hetero.common.arrays import Floats
from ds_hetero.cost.terms.grouping import Grouping


def exchange_s(grouping: Grouping, tokens_BD: Floats, bytes_BD: Floats) -> Floats:
    """Return the transfer time of one all-to-all in every group, without latency, ``[B, K]``.

    Args:
        tokens_BD: s, tokens of every rank.
        bytes_BD: w, bytes per token that every rank receives for its heads.
    """
    slice_D = grouping.node_slices.part_of
    amount_2BD = np.array([tokens_BD, bytes_BD])
    amount_2BN = grouping.node_slices.reduce(np.add, amount_2BD)
    # A rank sends its tokens x the others' bytes, and receives its bytes x the others' tokens. [::-1] swaps the two:
    # row 0 is tokens x others' bytes (sent), row 1 is bytes x others' tokens (received).
    others_on_node_2BD = amount_2BN[::-1, :, slice_D] - amount_2BD[::-1]
    inside_2BD = amount_2BD * others_on_node_2BD
    port_s_BD = inside_2BD.max(axis=0) * grouping.inner_s_per_byte
    some_group_spans_nodes = len(grouping.slice_node) > grouping.num_groups
    if some_group_spans_nodes:
        outside_s_2BD = amount_2BD * _other_nodes_s_per_unit(grouping, amount_2BN[::-1])[..., slice_D]
        np.maximum(port_s_BD, outside_s_2BD.max(axis=0), out=port_s_BD)
    time_BK = grouping.by_group(np.maximum, port_s_BD)
    if grouping.cluster.shares_ports:
        kept_BN = grouping.node_slices.reduce(np.add, tokens_BD * bytes_BD)
        tokens_BN, bytes_BN = amount_2BN
        time_BK = np.maximum(time_BK, _shared_ports_s(grouping, tokens_BN, bytes_BN, kept_BN))
    return time_BK


def _other_nodes_s_per_unit(grouping: Grouping, amount_N: Floats) -> Floats:
    """Sum ``amount_N`` times the seconds per byte over the other node slices of a slice's group, ``[..., N]``.

    For slice a of a group with slices a, b and c on nodes of three places this is ``amount[b] * s_per_byte[a, b] +
    amount[c] * s_per_byte[a, c]``. Slices of one place are added first: 32 equal nodes are one site, not 992 pairs.
    """
    source_P, destination_P, _, _ = grouping.site_pairs
    rates = grouping.all_to_all_rates
    amount_S = grouping.sites.reduce(np.add, amount_N)
    weighted_P = amount_S[..., destination_P] * rates.pair_s_per_byte
    weighted_S = np.zeros_like(amount_S)
    weighted_S[..., source_P[rates.first_pair]] = np.add.reduceat(weighted_P, rates.first_pair, axis=-1)
    # The pair of a site with itself has counted this slice's amount, which does not travel: subtract it.
    return np.asarray(weighted_S[..., grouping.sites.part_of] - rates.within_s_per_byte * amount_N)


def _shared_ports_s(grouping: Grouping, tokens_BN: Floats, bytes_BN: Floats, kept_BN: Floats) -> Floats:
    """Return the time of an all-to-all at the NICs and switches that the ranks of a node share, ``[B, K]``.

    All groups exchange at the same time, so the bytes of all groups on a node add up. A group waits for the ports that
    it uses.

    Args:
        kept_BN: bytes that ranks keep for themselves: the sum of tokens x bytes over the ranks of a slice.
    """
    cluster, group_N, node_N = grouping.cluster, grouping.slice_group, grouping.slice_node
    group_tokens_BN = np.add.reduceat(tokens_BN, grouping.first_slice, axis=1)[:, group_N]
    group_bytes_BN = np.add.reduceat(bytes_BN, grouping.first_slice, axis=1)[:, group_N]
    out_BN = tokens_BN * (group_bytes_BN - bytes_BN)
    into_BN = bytes_BN * (group_tokens_BN - tokens_BN)
    inside_BN = tokens_BN * bytes_BN - kept_BN
    nic_bytes = np.maximum(grouping.by_node(np.add, out_BN), grouping.by_node(np.add, into_BN))  # [B, nodes]
    nic_s = nic_bytes / cluster.nic_bytes_per_s
    switch_s = grouping.by_node(np.add, inside_BN) / cluster.switch_bytes_per_s
    nic_s_BN = np.where(out_BN + into_BN > 0, nic_s[:, node_N], 0.0)
    switch_s_BN = np.where(inside_BN > 0, switch_s[:, node_N], 0.0)
    time_BN = np.maximum(nic_s_BN, switch_s_BN)
    return np.asarray(np.maximum.reduceat(time_BN, grouping.first_slice, axis=1))
