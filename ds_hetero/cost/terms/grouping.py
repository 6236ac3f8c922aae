"""Who is grouped with whom, in arrays: everything about a schedule that does not depend on tokens and heads.

A search tries many assignments of tokens and heads over one partition, so whatever depends on the partition and the
cluster alone is computed once.

    node slice   the ranks of one group on one node
    site         the node slices of one group whose nodes have the same place in the network (`Cluster.place`)

Dimension key: D ranks, K groups in ring order, N node slices, S sites, I items, P parts.

Who passes KV to whom: the head cuts of neighbouring groups, in arrays.

Every group cuts the same N heads at its own places. Written out head by head, the owner of head h in group k
is one entry of a table, and neighbours in the ring exchange what their rows have in common; the runs of equal
pairs are the sub-ring tasks of HexiSeq (arXiv:2605.07569, section 3.2) joined where one pair holds several.

Dimension key: B assignments, D ranks, K groups in ring order, N query heads, E edges.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from ds_hetero.cluster.topology import Cluster
from ds_hetero.common.arrays import Floats, Ints
from ds_hetero.values.schedule import Schedule


class GroupBy:
    """Group items by two integer keys, ``[I]`` each, and reduce over each part.

    Parts are ordered by the major key, then by the minor key.

    Attributes:
        starts: where every part begins in `order`, ``[P]``.
    """

    def __init__(self, major: Ints, minor: Ints) -> None:
        self.order: Ints = np.lexsort((minor, major))  # items, part after part, ``[I]``
        major, minor = major[self.order], minor[self.order]
        changes = (major[1:] != major[:-1]) | (minor[1:] != minor[:-1])
        self.starts: Ints = np.concatenate([[0], np.flatnonzero(changes) + 1])

    @property
    def first(self) -> Ints:
        """An item of every part, ``[P]``."""
        return self.order[self.starts]

    @cached_property
    def sizes(self) -> Ints:
        """Items of every part, ``[P]``."""
        return np.append(self.starts[1:], len(self.order)) - self.starts

    @cached_property
    def part_of(self) -> Ints:
        """Part of every item, ``[I]``."""
        part_of = np.empty(len(self.order), dtype=np.intp)
        part_of[self.order] = np.repeat(np.arange(len(self.starts)), self.sizes)
        return part_of

    def reduce(self, reduce: np.ufunc, values_I: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """``reduce`` (such as ``np.maximum``) over the items of every part: ``[..., I]`` to ``[..., P]``."""
        return np.asarray(reduce.reduceat(values_I.take(self.order, axis=-1), self.starts, axis=-1))


class Grouping:
    """A partition of all ranks of a cluster into groups, in ring order.

    Args:
        cluster: gives every rank's node.
        groups: ranks of every group, groups in ring order, ranks in the order of the head cut; every rank of the
            cluster once, no group empty.
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
        """The grouping of a schedule whose ranks begin at 0."""
        return cls(cluster, [group.ranks for group in schedule.ring_groups], zigzag=schedule.layout == "zigzag")

    @property
    def num_groups(self) -> int:
        """K."""
        return len(self.sizes)

    def by_group(self, reduce: np.ufunc, values_D: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """``reduce`` (such as ``np.maximum``) over the ranks of every group: ``[..., D]`` to ``[..., K]``."""
        in_order_D = values_D.take(self.order, axis=-1)
        if len(self.sizes) == len(self.order):
            return in_order_D
        return np.asarray(reduce.reduceat(in_order_D, self.offsets[:-1], axis=-1))

    @cached_property
    def transfers_of_heads(self) -> dict[tuple[int, float, bytes], tuple[Any, Any, Any]]:
        """Times of transfers of a ring step, by query heads of a KV head, mean length and all heads."""
        return {}

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
    def group_starts(self) -> Ints:
        """First node slice of every group, ``[K]``."""
        return _starts(self.slice_group)

    @cached_property
    def _slices_by_node(self) -> tuple[Ints, Ints]:
        order = np.argsort(self.slice_node, kind="stable")
        return order, _starts(self.slice_node[order])

    def by_node(self, reduce: np.ufunc, values_N: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """``reduce`` over the node slices of every node: ``[..., N]`` to ``[..., nodes]``."""
        order, starts = self._slices_by_node
        return np.asarray(reduce.reduceat(values_N.take(order, axis=-1), starts, axis=-1))

    @cached_property
    def sites(self) -> GroupBy:
        """Node slices by (group, place in the network)."""
        return GroupBy(self.slice_group, self.cluster.place[self.slice_node])

    @cached_property
    def inner_s_per_byte(self) -> Floats:
        """Seconds per byte of an all-to-all between a rank and its own node, ``[D]``."""
        return np.asarray(self.cluster.node_all_to_all_s_per_byte.diagonal()[self.cluster.node_of_rank])

    @cached_property
    def site_s_per_byte(self) -> tuple[Floats, Ints, Floats]:
        """Of an all-to-all: every pair of sites, the first pair of every source, and a site within itself by slice."""
        source, destination, sender, receiver = self.site_pairs
        s_per_byte = self.cluster.node_all_to_all_s_per_byte[sender, receiver]
        own_s_S, itself = np.zeros(len(self.sites.starts)), source == destination
        own_s_S[source[itself]] = s_per_byte[itself]
        return s_per_byte, _starts(source), own_s_S[self.sites.part_of]

    @cached_property
    def exchange_latency_s(self) -> Floats:
        """Time of one all-to-all that does not depend on its bytes, by group, ``[K]``; 0 for single ranks.

        The largest latency of its pairs, and the host's time of the slowest member.
        """
        node, latency_s = self.slice_node, self.cluster.node_all_to_all_latency_s
        worst_N = np.where(self.node_slices.sizes > 1, latency_s[node, node], 0.0)
        worst_S = self.sites.reduce(np.maximum, worst_N)
        source, _, sender, receiver = self.site_pairs
        np.maximum.at(worst_S, source, latency_s[sender, receiver])
        latency_K = np.maximum.reduceat(worst_S[self.sites.part_of], self.group_starts)
        host_K = self.by_group(np.maximum, self.cluster.message_overhead_s)
        return np.asarray(latency_K + np.where(self.sizes > 1, host_K, 0.0))

    @cached_property
    def site_pairs(self) -> tuple[Ints, Ints, Ints, Ints]:
        """Ordered pairs of sites of one group: sources (ascending), destinations, and a node of each.

        A site of several node slices is a pair with itself; its two nodes are different ones of its place.
        """
        first_slice = self.sites.first
        group, place = self.slice_group[first_slice], self.cluster.place[self.slice_node[first_slice]]
        first = _starts(group)
        counts = np.append(first[1:], len(group)) - first
        per_site = np.repeat(counts, counts)
        source = np.repeat(np.arange(len(group)), per_site)
        within = np.arange(len(source)) - np.repeat(np.cumsum(per_site) - per_site, per_site)
        destination = np.repeat(np.repeat(first, counts), per_site) + within
        exist = (source != destination) | (self.sites.sizes[source] > 1)
        source, destination = source[exist], destination[exist]
        sender, receiver = (nodes[place[source], place[destination]] for nodes in self.cluster.place_nodes)
        return source, destination, sender, receiver


def _starts(values: Ints) -> Ints:
    """Where every run of one value begins, of values that are not negative; `np.diff` takes much longer."""
    return np.flatnonzero(np.concatenate([values[:1] >= 0, values[1:] != values[:-1]]))


class Edges(NamedTuple):
    """Transfers of one ring step, sorted by (assignment, receiving position)."""

    sender: Ints  # global rank, ``[E]``
    receiver: Ints  # global rank, ``[E]``
    heads: Floats  # query heads, or KV heads, that travel between the two, ``[E]``; see `ring_edges`
    starts: Ints  # first edge of every (assignment, position), ``[B * K]``; each has at least one


def ring_edges(grouping: Grouping, heads_BD: Ints, queries_per_kv_head: int | None = None) -> Edges:
    """Edges from every group to the next one in the ring.

    With ``queries_per_kv_head`` the heads are KV heads: a KV head that a cut of *any* group divides travels once for
    each task that needs it, as in the runtime, whose tasks are the common refinement of all groups' cuts.
    Without it they are query heads (HexiSeq counts full-width KV).
    """
    num_sets, num_groups = len(heads_BD), grouping.num_groups
    ordered_BD = heads_BD[:, grouping.order]
    counts = ordered_BD.ravel().astype(np.intp, copy=False)
    previous = np.arange(-1, num_groups - 1)
    owner_BKN = np.full(ordered_BD.shape, grouping.order).ravel().repeat(counts).reshape(num_sets, num_groups, -1)
    sender_BKN = owner_BKN[:, previous]
    new_BKN = np.ones(owner_BKN.shape, dtype=bool)  # first head of a run of one (sender, receiver)
    own_cut_BKN = owner_BKN[:, :, 1:] != owner_BKN[:, :, :-1]
    new_BKN[:, :, 1:] = own_cut_BKN | own_cut_BKN[:, previous]
    starts = np.flatnonzero(new_BKN)
    if queries_per_kv_head is None:
        heads = np.diff(np.append(starts, owner_BKN.size)).astype(np.float64)
    else:
        begins_BN = np.arange(owner_BKN.shape[-1]) % queries_per_kv_head == 0  # a KV head, or a task inside one
        begins_BN = np.repeat(begins_BN[None], num_sets, axis=0)
        begins_BN[:, 1:] |= own_cut_BKN.any(axis=1)
        weight_BKN = np.broadcast_to(begins_BN[:, None], owner_BKN.shape).astype(np.float64)
        heads = np.add.reduceat(weight_BKN.ravel(), starts)
    row = starts // owner_BKN.shape[-1]
    return Edges(
        sender=sender_BKN.ravel()[starts],
        receiver=owner_BKN.ravel()[starts],
        heads=heads,
        starts=np.searchsorted(row, np.arange(num_sets * num_groups)),
    )


def kv_heads_of_ranks(grouping: Grouping, heads_BD: Ints, queries_per_kv_head: int) -> Ints:
    """KV heads that every rank needs for its query heads, ``[B, D]``; one on a cut counts on both sides."""
    if queries_per_kv_head == 1:
        return heads_BD
    ordered = heads_BD[:, grouping.order]
    stop = np.cumsum(ordered, axis=1)
    start = stop - ordered
    kv = np.where(ordered > 0, -(-stop // queries_per_kv_head) - start // queries_per_kv_head, 0)
    out = np.empty_like(kv)
    out[:, grouping.order] = kv
    return out
