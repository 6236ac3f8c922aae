"""Collectives of ZeRO over all ranks: all-gather and reduce-scatter as NCCL's ring does them."""

from __future__ import annotations

from typing import NamedTuple

from ds_hetero.cluster.topology import Cluster

# Seconds of a collective of unequal parts, as a multiple of those of an even one of as many bytes. NCCL has none of
# unequal parts: a gather is a broadcast for each rank in one group, which 2.30 schedules as one ring
# (src/scheduler/allgatherv_sched.cc) and older releases do not; a reduction is a reduce for each rank. Never measured;
# 1.0 to 1.5 is likely. A run on GPUs sets both: see `ds_hetero.selftest`, uneven gathers with their rate.
UNEVEN_GATHER_SLOWDOWN = 1.0
UNEVEN_REDUCE_SLOWDOWN = 1.0


class RingCollective(NamedTuple):
    """An all-gather or a reduce-scatter over all ranks, linear in the bytes of the whole tensor.

    A ring over ranks in order of their nodes, as NCCL builds it: every rank receives all but its own part, every
    node receives it once over all its network ports together, and each hop waits for its link once
    (Patarasuk and Yuan, 2009). Partitions of unequal size move the same total, by other calls: see `slowed`.
    """

    s_per_byte: float
    latency_s: float

    def __call__(self, num_bytes: float) -> float:
        """Seconds for a tensor of ``num_bytes``."""
        return self.latency_s + num_bytes * self.s_per_byte if num_bytes else 0.0

    def slowed(self, by: float) -> RingCollective:
        """The same collective at a fraction of its speed."""
        return RingCollective(self.s_per_byte * by, self.latency_s * by)

    @classmethod
    def over(cls, cluster: Cluster) -> RingCollective:
        """The collective over all ranks of ``cluster``."""
        num_ranks = cluster.num_ranks
        inside = [_hops_inside(cluster, i) for i in range(len(cluster.nodes))]
        between_s_per_byte, between_latency_s = _hops_between(cluster)
        slowest = max([between_s_per_byte, *(s_per_byte for s_per_byte, _ in inside)])
        latency_s = between_latency_s + sum(latency_s for _, latency_s in inside)
        return cls(s_per_byte=slowest * (num_ranks - 1) / num_ranks, latency_s=latency_s)

    @classmethod
    def within(cls, cluster: Cluster) -> RingCollective:
        """The collective over the ranks of each node, of the slowest node."""
        slowest, latency_s = 0.0, 0.0
        for i, node in enumerate(cluster.nodes):
            s_per_byte, node_latency_s = _hops_inside(cluster, i)
            slowest = max(slowest, s_per_byte * (len(node.devices) - 1) / len(node.devices))
            latency_s = max(latency_s, node_latency_s)
        return cls(s_per_byte=slowest, latency_s=latency_s)

    @classmethod
    def between(cls, cluster: Cluster) -> RingCollective:
        """The collective over nodes, each of which has one part."""
        num_nodes = len(cluster.nodes)
        s_per_byte, latency_s = _hops_between(cluster)
        return cls(s_per_byte=s_per_byte * (num_nodes - 1) / num_nodes, latency_s=latency_s)


def _hops_inside(cluster: Cluster, i: int) -> tuple[float, float]:
    """Seconds per byte of the hops of a ring in one node, and the latency of all of them."""
    node = cluster.nodes[i]
    size = len(node.devices)
    if size == 1:
        return 0.0, 0.0
    own_port_s_per_byte = float(cluster.node_p2p_s_per_byte[i, i])
    switch_s_per_byte = (size - 1) / float(cluster.switch_bytes_per_s[i])  # which all hops inside the node pass at once
    return max(own_port_s_per_byte, switch_s_per_byte), (size - 1) * node.link.latency_s


def _hops_between(cluster: Cluster) -> tuple[float, float]:
    """Seconds per byte of the slowest hop of a ring between nodes, and the latency of all of them."""
    slowest, latency_s = 0.0, 0.0
    num_nodes = len(cluster.nodes)
    if num_nodes == 1:
        return slowest, latency_s
    for i, node in enumerate(cluster.nodes):
        peer = (i + 1) % num_nodes
        num_ports = min(len(node.devices), len(cluster.nodes[peer].devices))
        ports_bytes_per_s = num_ports / float(cluster.node_p2p_s_per_byte[i, peer])
        nic_bytes_per_s = min(float(cluster.nic_bytes_per_s[i]), float(cluster.nic_bytes_per_s[peer]))
        slowest = max(slowest, 1 / min(ports_bytes_per_s, nic_bytes_per_s))
        latency_s += float(cluster.node_latency_s[i, peer])
    return slowest, latency_s
