"""Who is grouped with whom, in arrays: everything about a schedule that does not depend on tokens and heads.

A search tries many assignments of tokens and heads over one partition, so what follows from the partition and
the cluster alone is worked out once.

Dimension key: D ranks, K groups in ring order, C cells, R regions, I items, P parts. A cell is the part of one group
that sits on one node, a region the cells of one group whose nodes have the same place in the network (`Cluster.place`).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from ds_hetero.cluster.topology import Cluster
from ds_hetero.schedule import Schedule

__all__ = ["Grouping", "Parts"]

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]


class Parts:
    """Items put together where two keys of theirs are equal; parts ascend by the first key, then by the second.

    Args:
        major, minor: keys of every item, ``[I]``.

    Attributes:
        order: items, part after part, ``[I]``.
        starts: first place of every part in `order`, ``[P]``.
    """

    def __init__(self, major: Ints, minor: Ints) -> None:
        self.order: Ints = np.lexsort((minor, major))
        changes = (np.diff(major[self.order]) != 0) | (np.diff(minor[self.order]) != 0)
        self.starts: Ints = np.flatnonzero(np.concatenate([[True], changes]))

    @property
    def first(self) -> Ints:
        """An item of every part, ``[P]``."""
        return self.order[self.starts]

    @cached_property
    def sizes(self) -> Ints:
        """Items of every part, ``[P]``."""
        return np.diff(np.append(self.starts, len(self.order)))

    @cached_property
    def part_of(self) -> Ints:
        """Part of every item, ``[I]``."""
        part_of = np.empty(len(self.order), dtype=np.int64)
        part_of[self.order] = np.repeat(np.arange(len(self.starts)), self.sizes)
        return part_of

    def reduce(self, reduce: np.ufunc, values_I: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """``reduce`` (such as ``np.maximum``) over the items of every part: ``[..., I]`` to ``[..., P]``."""
        return np.asarray(reduce.reduceat(values_I[..., self.order], self.starts, axis=-1))


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
        self.order: Ints = np.concatenate([np.asarray(group, dtype=np.int64) for group in groups])
        self.sizes: Ints = np.array(sizes, dtype=np.int64)
        self.offsets: Ints = np.concatenate([[0], np.cumsum(self.sizes)])
        self.group_of: Ints = np.empty(cluster.num_ranks, dtype=np.int64)
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
        return np.asarray(reduce.reduceat(values_D[..., self.order], self.offsets[:-1], axis=-1))

    # --- cells --------------------------------------------------------------------------------------

    @cached_property
    def cells(self) -> Parts:
        """Ranks by (group, node)."""
        return Parts(self.group_of, self.cluster.node_of_rank)

    @cached_property
    def cell_group(self) -> Ints:
        """Group of every cell, ``[C]``, ascending."""
        return self.group_of[self.cells.first]

    @cached_property
    def cell_node(self) -> Ints:
        """Node of every cell, ``[C]``."""
        return self.cluster.node_of_rank[self.cells.first]

    @cached_property
    def group_starts(self) -> Ints:
        """First cell of every group, ``[K]``."""
        return np.flatnonzero(np.diff(self.cell_group, prepend=-1))

    @cached_property
    def _cells_by_node(self) -> tuple[Ints, Ints]:
        order = np.argsort(self.cell_node, kind="stable")
        return order, np.flatnonzero(np.diff(self.cell_node[order], prepend=-1))

    def by_node(self, reduce: np.ufunc, values_C: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """``reduce`` over the cells of every node: ``[..., C]`` to ``[..., nodes]``."""
        order, starts = self._cells_by_node
        return np.asarray(reduce.reduceat(values_C[..., order], starts, axis=-1))

    # --- regions ------------------------------------------------------------------------------------

    @cached_property
    def regions(self) -> Parts:
        """Cells by (group, place in the network)."""
        return Parts(self.cell_group, self.cluster.place[self.cell_node])

    @cached_property
    def region_pairs(self) -> tuple[Ints, Ints, Ints, Ints]:
        """Ordered pairs of regions of one group: sources (ascending), destinations, and a node of each.

        A region of several cells is a pair with itself, and the two nodes are different ones of its place.
        """
        first_cell = self.regions.first
        group, place = self.cell_group[first_cell], self.cluster.place[self.cell_node[first_cell]]
        first, counts = np.unique(group, return_index=True, return_counts=True)[1:]
        per_region = np.repeat(counts, counts)
        source = np.repeat(np.arange(len(group)), per_region)
        within = np.arange(len(source)) - np.repeat(np.cumsum(per_region) - per_region, per_region)
        destination = np.repeat(np.repeat(first, counts), per_region) + within
        exist = (source != destination) | (self.regions.sizes[source] > 1)
        source, destination = source[exist], destination[exist]
        sender, receiver = (nodes[place[source], place[destination]] for nodes in self.cluster.place_nodes)
        return source, destination, sender, receiver
