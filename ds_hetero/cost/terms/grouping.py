"""Partition of a cluster's ranks into groups, and the rates and latencies between and inside them, as arrays.

A search tries many assignments of tokens and heads for one partition. This module computes once all values that depend
on the partition and the cluster alone.

    node slice   the ranks of one group on one node
    site         the node slices of one group whose nodes have the same place in the network (`Cluster.place`)

Dimension key: D ranks, K groups in ring order, N node slices, S sites, P ordered pairs of sites.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from ds_hetero.cluster.topology import Cluster
from ds_hetero.common.arrays import Floats, Ints
from ds_hetero.cost.terms.group_by import GroupBy, pairs_within_runs, run_starts
from ds_hetero.values.schedule import Schedule


class SitePairs(NamedTuple):
    """Ordered pairs of sites of one group, sorted by source; each array is ``[P]``."""

    source: Ints  # site
    destination: Ints  # site
    sender: Ints  # a node of the source
    receiver: Ints  # a node of the destination; differs from `sender` also where source and destination are one site


class AllToAllRates(NamedTuple):
    """All-to-all rates: seconds per byte between nodes, by pair of sites and inside each site."""

    pair_s_per_byte: Floats  # seconds per byte of every pair of sites, ``[P]``
    first_pair: Ints  # index of the first pair of every source that has pairs
    within_s_per_byte: Floats  # seconds per byte between two nodes of a node slice's site, ``[N]``; 0 if it has one


class Grouping:
    """A partition of all ranks of a cluster into groups, in ring order.

    Args:
        cluster: gives every rank's node.
        groups: ranks of every group. Groups are in ring order, ranks in the order in which they get heads. Every rank
            of the cluster is in one group, and no group is empty.
        zigzag: layout of the positions; only causal attention depends on it.

    Attributes:
        order: ranks, group after group, ``[D]``; group k is ``order[offsets[k]:offsets[k + 1]]``.
        group_of: ring position of every rank's group, **indexed by rank**, ``[D]``.
    """

    def __init__(self, cluster: Cluster, groups: Sequence[Sequence[int] | Ints], *, zigzag: bool = True) -> None:
        sizes = [len(group) for group in groups]
        assert min(sizes) > 0 and sum(sizes) == cluster.num_ranks, "groups must hold every rank of the cluster once"
        self.cluster = cluster
        self.zigzag = zigzag
        self.order: Ints = np.concatenate([np.asarray(group, dtype=np.intp) for group in groups])
        self.sizes: Ints = np.array(sizes, dtype=np.intp)
        self.offsets: Ints = np.concatenate([[0], np.cumsum(self.sizes)])
        self.group_of: Ints = np.empty(cluster.num_ranks, dtype=np.intp)
        self.group_of[self.order] = np.repeat(np.arange(len(groups)), self.sizes)

    @classmethod
    def of_schedule(cls, cluster: Cluster, schedule: Schedule) -> Grouping:
        """Make the grouping of a schedule whose ranks begin at 0."""
        return cls(cluster, [group.ranks for group in schedule.ring_groups], zigzag=schedule.layout == "zigzag")

    @property
    def num_groups(self) -> int:
        """Number of groups, K."""
        return len(self.sizes)

    def by_group(self, reduce: np.ufunc, values_D: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """Apply ``reduce`` (such as ``np.maximum``) to the ranks of every group: ``[..., D]`` to ``[..., K]``."""
        in_order_D = values_D.take(self.order, axis=-1)
        has_single_ranks_only = len(self.sizes) == len(self.order)
        if has_single_ranks_only:
            return in_order_D
        return np.asarray(reduce.reduceat(in_order_D, self.offsets[:-1], axis=-1))

    @cached_property
    def ring_transfers(self) -> dict[tuple[int, float, bytes], tuple[Any, Any, Any]]:
        """Cache of `ring_transfers_s`, by query heads per KV head, mean length, and heads of all ranks as bytes."""
        return {}

    # --- node slices

    @cached_property
    def node_slices(self) -> GroupBy:
        """Ranks by (group, node)."""
        return GroupBy(self.group_of, self.cluster.node_of_rank)

    @cached_property
    def slice_group(self) -> Ints:
        """Group of every node slice, ``[N]``, ascending."""
        return self.group_of[self.node_slices.first]

    @cached_property
    def slice_node(self) -> Ints:
        """Node of every node slice, ``[N]``."""
        return self.cluster.node_of_rank[self.node_slices.first]

    @cached_property
    def first_slice(self) -> Ints:
        """First node slice of every group, ``[K]``."""
        return run_starts(self.slice_group)

    @cached_property
    def _slices_by_node(self) -> tuple[Ints, Ints]:
        """Node slices sorted by node, ``[N]``, and the place at which every node's slices begin, ``[nodes]``."""
        order = np.argsort(self.slice_node, kind="stable")
        return order, run_starts(self.slice_node[order])

    def by_node(self, reduce: np.ufunc, values_N: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """Apply ``reduce`` to the node slices of every node: ``[..., N]`` to ``[..., nodes]``."""
        order, starts = self._slices_by_node
        return np.asarray(reduce.reduceat(values_N.take(order, axis=-1), starts, axis=-1))

    # --- sites

    @cached_property
    def sites(self) -> GroupBy:
        """Node slices by (group, place in the network)."""
        return GroupBy(self.slice_group, self.cluster.place[self.slice_node])

    @cached_property
    def site_pairs(self) -> SitePairs:
        """Ordered pairs of sites of one group.

        Two different sites of a group are a pair in both directions. A site of several node slices is also a pair with
        itself, for the traffic between its nodes; sender and receiver are then two different nodes of its place.
        Example: group 0 has site 0 (two nodes) and site 1, group 1 has site 2:

            source        0  0  1
            destination   0  1  0
        """
        slice_of_site = self.sites.first
        source, destination = pairs_within_runs(self.slice_group[slice_of_site])
        spans_nodes = self.sites.sizes > 1
        exists = (source != destination) | spans_nodes[source]
        source, destination = source[exists], destination[exists]
        place_of_site = self.cluster.place[self.slice_node[slice_of_site]]
        sending_node, receiving_node = self.cluster.place_nodes  # tables by pair of places
        places = place_of_site[source], place_of_site[destination]
        return SitePairs(source, destination, sending_node[places], receiving_node[places])

    # --- rates and latencies of all-to-alls, for any tokens and heads

    @cached_property
    def inner_s_per_byte(self) -> Floats:
        """Seconds per byte of an all-to-all between a rank and its own node, ``[D]``."""
        of_node = self.cluster.node_all_to_all_s_per_byte.diagonal()
        return np.asarray(of_node[self.cluster.node_of_rank])

    @cached_property
    def all_to_all_rates(self) -> AllToAllRates:
        """Seconds per byte of an all-to-all between the nodes of each group."""
        source, destination, sender, receiver = self.site_pairs
        s_per_byte = self.cluster.node_all_to_all_s_per_byte[sender, receiver]
        is_within = source == destination
        within_s_per_byte_S = np.zeros(len(self.sites.starts))
        within_s_per_byte_S[source[is_within]] = s_per_byte[is_within]
        return AllToAllRates(s_per_byte, run_starts(source), within_s_per_byte_S[self.sites.part_of])

    @cached_property
    def exchange_latency_s(self) -> Floats:
        """Start-up time of one all-to-all in every group, ``[K]``; 0 for single ranks.

        This is the largest latency of any pair of ranks, plus the host's time on the slowest rank.
        """
        node, latency_s = self.slice_node, self.cluster.node_all_to_all_latency_s
        inside_N = np.where(self.node_slices.sizes > 1, latency_s[node, node], 0.0)
        worst_S = self.sites.reduce(np.maximum, inside_N)
        source, _, sender, receiver = self.site_pairs
        np.maximum.at(worst_S, source, latency_s[sender, receiver])
        worst_N = worst_S[self.sites.part_of]
        latency_K = np.maximum.reduceat(worst_N, self.first_slice)
        host_K = self.by_group(np.maximum, self.cluster.message_overhead_s)
        return np.asarray(latency_K + np.where(self.sizes > 1, host_K, 0.0))
