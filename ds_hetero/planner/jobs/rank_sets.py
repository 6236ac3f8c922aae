"""Sets of ranks that may make a job together: all, some nodes, and the faster or larger kinds of devices of these.

A device may cost more than it adds, by a slow link or by little memory, and only a job without it avoids that.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace

import numpy as np

from ds_hetero.cluster.topology import Cluster
from ds_hetero.common.arrays import Floats, Ints, distinct

MAX_RANK_SETS = 24  # sets that are looked at; chosen, never measured
_FEW_NODES = 4  # nodes up to which every set of them is tried; chosen, never measured


def job_rank_sets(cluster: Cluster) -> list[tuple[int, ...]]:
    """Return sets of two or more ranks, all ranks first; of sets with equal devices on equal nodes only the first."""
    found: dict[object, tuple[int, ...]] = {}
    for ranks in _sets(cluster):
        if len(ranks) > 1:
            found.setdefault(_makeup(cluster, ranks), ranks)
        if len(found) == MAX_RANK_SETS:
            break
    return list(found.values())


def single_ranks(cluster: Cluster) -> list[tuple[int, ...]]:
    """Return one rank of every kind of device."""
    first_of_kind: dict[object, int] = {}
    for rank, device in enumerate(cluster.devices):
        node = cluster.nodes[int(cluster.node_of_rank[rank])]
        first_of_kind.setdefault((device, node.host_memory_bytes), rank)
    return [(rank,) for rank in first_of_kind.values()]


def _sets(cluster: Cluster) -> Iterator[tuple[int, ...]]:
    """Yield all ranks of some nodes, then only their faster or larger devices; sets of more nodes first."""
    peaks = np.array([device.peak_flops_per_s for device in cluster.devices])
    memory = np.array([float(device.usable_bytes) for device in cluster.devices])
    for nodes in _node_sets(len(cluster.nodes)):
        ranks = np.flatnonzero(np.isin(cluster.node_of_rank, list(nodes)))
        yield tuple(ranks.tolist())
        for values in (peaks, memory):
            yield from _largest(ranks, values[ranks])


def _largest(ranks: Ints, values: Floats) -> Iterator[tuple[int, ...]]:
    """Yield the ranks without those of the least value, without those of the two least, and so on."""
    for least in distinct(values)[:-1]:
        yield tuple(ranks[values > least].tolist())


def _node_sets(num_nodes: int) -> Iterable[tuple[int, ...]]:
    """Return sets of nodes, larger ones first: all sets of few nodes; of many all, all but one, and single ones."""
    everything = tuple(range(num_nodes))
    if num_nodes <= _FEW_NODES:
        numbers = sorted(range(1, 2**num_nodes), key=lambda number: (-number.bit_count(), number))
        return [tuple(node for node in everything if number >> node & 1) for number in numbers]
    without_one = [tuple(node for node in everything if node != left_out) for left_out in everything]
    return [everything, *without_one, *((node,) for node in everything)]


def _makeup(cluster: Cluster, ranks: tuple[int, ...]) -> object:
    """Return a key that is equal for sets of ranks that train equally fast: devices and links of their nodes."""
    devices_of_node: dict[int, list[str]] = {}
    for rank in ranks:
        devices_of_node.setdefault(int(cluster.node_of_rank[rank]), []).append(cluster.devices[rank].name)
    makeup = []
    for index, names in devices_of_node.items():
        node = cluster.nodes[index]
        # Links between named nodes tell nodes apart; the name of a node's own link does not.
        link = replace(node.link, name="")
        identity = index if cluster.links else (link, node.nic_bytes_per_s, node.host_memory_bytes)
        makeup.append((sorted(names), str(identity)))
    return str(sorted(makeup))
