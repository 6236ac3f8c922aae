"""Time of ZeRO's collectives: parameters gathered, gradients reduced, over all ranks of the cluster."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ds_hetero.cluster.topology import Cluster


@dataclass(frozen=True, slots=True)
class RingCollective:
    """An all-gather or a reduce-scatter over all ranks, linear in the bytes of the whole tensor.

    A ring over ranks in order of their nodes, as NCCL builds it: every rank receives all but its own part, every
    node receives it once over all its network ports together, and each hop waits for its link once
    (Patarasuk and Yuan, 2009). Partitions of unequal size move the same total.
    """

    s_per_byte: float
    latency_s: float

    def __call__(self, num_bytes: float) -> float:
        """Seconds for a tensor of ``num_bytes``."""
        return self.latency_s + num_bytes * self.s_per_byte if num_bytes else 0.0

    @classmethod
    def over(cls, cluster: Cluster) -> RingCollective:
        """The collective over all ranks of ``cluster``."""
        num_ranks, num_nodes = cluster.num_ranks, len(cluster.nodes)
        if num_ranks == 1:
            return cls(0.0, 0.0)
        slowest, latency_s = 0.0, 0.0
        following = np.roll(np.arange(num_nodes), -1)
        for i, node in enumerate(cluster.nodes):
            size = len(node.devices)
            if size > 1:
                inner = float(cluster.node_p2p_s_per_byte[i, i])
                slowest = max(slowest, inner, (size - 1) / float(cluster.switch_bytes_per_s[i]))
                latency_s += (size - 1) * node.link.latency_s
            if num_nodes > 1:
                peer = int(following[i])
                ports = min(size, len(cluster.nodes[peer].devices)) / float(cluster.node_p2p_s_per_byte[i, peer])
                shared = min(float(cluster.nic_bytes_per_s[i]), float(cluster.nic_bytes_per_s[peer]))
                slowest = max(slowest, 1 / min(ports, shared))
                latency_s += float(cluster.node_latency_s[i, peer])
        return cls(s_per_byte=slowest * (num_ranks - 1) / num_ranks, latency_s=latency_s)
