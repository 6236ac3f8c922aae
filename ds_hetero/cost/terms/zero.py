"""Time of ZeRO's all-gathers and reduce-scatters, which NCCL runs as rings."""

from __future__ import annotations

from typing import NamedTuple

from ds_hetero.cluster.topology import Cluster

# Time of a collective with unequal parts over that of an even one of as many bytes. NCCL has no uneven collectives: an
# uneven gather is a broadcast from each rank in one group, which NCCL 2.30 schedules as one ring
# (src/scheduler/allgatherv_sched.cc) and older releases do not; an uneven reduction is a reduce to each rank. Never
# measured; 1.0 to 1.5 is likely. `ds_hetero.selftest` measures uneven gathers on GPUs, from which to set both.
UNEVEN_GATHER_SLOWDOWN = 1.0
UNEVEN_REDUCE_SLOWDOWN = 1.0


class RingCollective(NamedTuple):
    """An all-gather or a reduce-scatter, whose time is linear in the bytes of the whole tensor.

    NCCL builds a ring over the ranks in order of their nodes. Every rank receives all parts but its own; the bytes that
    enter a node use all its network ports together; a part passes every hop once, so the latencies of all hops add up
    (Patarasuk and Yuan, 2009). Unequal partitions move as many bytes by other calls: see `UNEVEN_GATHER_SLOWDOWN`.
    """

    s_per_byte: float  # seconds per byte of the whole tensor
    latency_s: float  # start-up of all steps of the ring

    def __call__(self, num_bytes: float) -> float:
        """Seconds for a tensor of ``num_bytes``."""
        return self.latency_s + num_bytes * self.s_per_byte if num_bytes else 0.0

    def slowed(self, by: float) -> RingCollective:
        """Return the same collective with all its times multiplied by ``by``."""
        return RingCollective(self.s_per_byte * by, self.latency_s * by)

    @classmethod
    def over(cls, cluster: Cluster) -> RingCollective:
        """Make the collective over all ranks of ``cluster``."""
        num_ranks = cluster.num_ranks
        inside = [_hops_inside(cluster, i) for i in range(len(cluster.nodes))]
        between_s_per_byte, between_latency_s = _hops_between(cluster)
        slowest = max([between_s_per_byte, *(s_per_byte for s_per_byte, _ in inside)])
        latency_s = between_latency_s + sum(latency_s for _, latency_s in inside)
        return cls(s_per_byte=slowest * (num_ranks - 1) / num_ranks, latency_s=latency_s)

    @classmethod
    def within(cls, cluster: Cluster) -> RingCollective:
        """Make the collective that runs inside every node at the same time; the slowest node counts."""
        slowest, latency_s = 0.0, 0.0
        for i, node in enumerate(cluster.nodes):
            s_per_byte, node_latency_s = _hops_inside(cluster, i)
            slowest = max(slowest, s_per_byte * (len(node.devices) - 1) / len(node.devices))
            latency_s = max(latency_s, node_latency_s)
        return cls(s_per_byte=slowest, latency_s=latency_s)

    @classmethod
    def between(cls, cluster: Cluster) -> RingCollective:
        """Make the collective between nodes, in which each node has one part."""
        num_nodes = len(cluster.nodes)
        s_per_byte, latency_s = _hops_between(cluster)
        return cls(s_per_byte=s_per_byte * (num_nodes - 1) / num_nodes, latency_s=latency_s)


def _hops_inside(cluster: Cluster, i: int) -> tuple[float, float]:
    """Return the seconds per byte of the slowest hop of a ring inside node ``i``, and the latencies of all its hops."""
    node = cluster.nodes[i]
    size = len(node.devices)
    if size == 1:
        return 0.0, 0.0
    own_port_s_per_byte = float(cluster.node_p2p_s_per_byte[i, i])
    # All hops inside the node cross its switch at the same time.
    switch_s_per_byte = (size - 1) / float(cluster.switch_bytes_per_s[i])
    return max(own_port_s_per_byte, switch_s_per_byte), (size - 1) * node.link.latency_s


def _hops_between(cluster: Cluster) -> tuple[float, float]:
    """Return the seconds per byte of the slowest hop between nodes of a ring, and the latencies of all those hops."""
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
