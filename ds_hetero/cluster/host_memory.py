"""Host memory of a cluster whose file or notation does not say it."""

from __future__ import annotations

from dataclasses import replace

from ds_hetero.cluster.file_values import number
from ds_hetero.cluster.topology import Cluster
from ds_hetero.common.units import GIB


def with_host_memory(cluster: Cluster, gib: float) -> Cluster:
    """Return the cluster with this host memory in every node. Raises `ClusterError`: not above zero."""
    host_memory_bytes = number("--host-memory", gib) * GIB
    nodes = tuple(replace(node, host_memory_bytes=host_memory_bytes) for node in cluster.nodes)
    return replace(cluster, nodes=nodes)
