"""Set the host memory of the nodes of a cluster, as ``--host-memory`` gives it."""

from __future__ import annotations

from dataclasses import replace

from ds_hetero.cluster.file_values import read_number
from ds_hetero.cluster.topology import Cluster
from ds_hetero.common.units import GIB


def with_host_memory(cluster: Cluster, gib: float) -> Cluster:
    """Return the cluster with ``gib`` of host memory in every node. Raises `ClusterError`: ``gib`` is out of range."""
    host_memory_bytes = read_number("--host-memory", gib) * GIB
    nodes = tuple(replace(node, host_memory_bytes=host_memory_bytes) for node in cluster.nodes)
    return replace(cluster, nodes=nodes)
