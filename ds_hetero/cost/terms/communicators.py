"""Device memory of NCCL's communicators, which no tensor gets: what they allocate beyond the reserve of a device.

A communicator allocates in three steps, each the first time that it is needed (NCCL 2.30.7, whose files are named):

    made         tables of every channel                                                            (src/channel.cc)
    collectives  buffers of every channel to the neighbours in its ring, and in its tree            (src/transport)
    messages     buffers of every channel of a peer to each peer of the same node; of all peers on other nodes together
                 one buffer to send from and one to receive into                  (src/transport/net.cc, shared buffers)

The two ends of a connection allocate unlike parts of its buffers, so a rank that sends to a peer and receives from it
has one connection's worth. All-to-alls are messages between all pairs.

    communicator            ranks                    collectives  messages with
    WORLD, messages_group,  the job                  yes          -
      DeepSpeed's
    sequence parallelism    a replica                yes          ranks of the neighbouring groups of the ring
    Ulysses all-to-all      a group of the ring      yes          all its ranks
    far group               a replica of more nodes  yes          as sequence parallelism, on other nodes
    zero_within             a node; the job          yes          -; all ranks
    boundaries of stages    two stages, two of them  yes          the other stage
    gradient sync           holders of an element    yes          all of them

These figures are bounds from above. It is not known before a job runs which ring and tree NCCL builds, and whether
buffers of the network are on the device at all (only where the port reads device memory itself). Buffers of NVLink
SHARP are not counted. Measured by others: a first all-to-all of 8 H100 takes 3.28 GB beside PyTorch's memory, in
buffers of 10 and 2 MiB, 32 channels a peer (NVIDIA/nccl#1685). Of those 2.82 GB are the messages here, and 0.20 GB the
tables. This project has measured none.

Dimension key: D ranks.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil, inf, isinf

import numpy as np

from ds_hetero.cluster.catalogue import CATALOGUE
from ds_hetero.cluster.topology import Cluster, DeviceSpec, Node
from ds_hetero.common.arrays import Floats
from ds_hetero.common.units import GB
from ds_hetero.cost.terms.grouping import Grouping
from ds_hetero.cost.workload import Workload

_MIB = 2**20

# Bytes of one channel.
# src/channel.cc, initChannel: three arrays, each rounded up to the 2 MiB that cuMemCreate allocates at least.
TABLE_BYTES = 3 * 2 * _MIB
# src/transport/p2p.cc: buffers of the protocols LL, LL128 and Simple, 0.5 + 4.69 + 4 MiB (src/init.cc,
# computeBuffSizes), and counters, rounded up to 2 MiB on each end: 10 + 2 MiB, or 6 + 6 where the receiver reads.
LOCAL_CONNECTION_BYTES = 12 * _MIB
# src/transport/net.cc: sender and receiver have such buffers each.
REMOTE_CONNECTION_BYTES = 20 * _MIB
# src/transport/net.cc, sharedNetBuffersInit: 16 chunks of 128 KiB, to send from and to receive into.
REMOTE_MESSAGE_BYTES = 2 * 16 * 128 * 1024

# Numbers of channels.
# One NVLink of a pair has two channels (src/graph/paths.cc, ncclTopoGetNchannels): 25 GB/s each from NVLink 2 to 4.
# A slower link counts as one.
_NVLINK_BYTES_PER_S = 25 * GB
# Rings of 8 A100 behind switches print "Channel 00/24" (NVIDIA/nccl-tests#100); of others it is a guess.
_MOST_LOCAL_CHANNELS = 24
# Three nodes of 8 H100 print "Channel 00/16" (NVIDIA/nccl#1453).
_MOST_REMOTE_CHANNELS = 16
# src/graph/connect.cc: a ring for each port, doubled; doubled again on Hopper behind NVLink.
_CHANNELS_PER_PORT = 4
# src/graph/paths.cc: channels of a remote peer, one for each 14 GB/s, two at least.
_MESSAGE_CHANNEL_BYTES_PER_S = 14 * GB

# torch's default group, `ds_hetero.runtime.collectives.messages_group`, and the one that DeepSpeed makes of all ranks
# (deepspeed/utils/groups.py, _clone_world_group).
_COMMUNICATORS_OF_JOB = 3

# Of a device's reserve this share is meant for NCCL: 0.5 of the usual 1.5 GiB. Before that first all-to-all the process
# had 1.06 GB beside PyTorch's memory (NVIDIA/nccl#1685), context and kernels; the split is a guess.
_SHARE_OF_RESERVE = 1 / 3


@dataclass(frozen=True, kw_only=True, slots=True)
class Channels:
    """Channels of a communicator."""

    collective: int  # of its rings
    per_peer: int  # of messages to one peer
    spans_nodes: bool  # has ranks on more than one node
    # Of one channel to the neighbours in a ring, the mean of the ranks that have a port to other nodes: a ring leaves
    # and enters a node once, and rings of several ports do so at several ranks.
    connection_bytes: float

    @classmethod
    def inside(cls, node: Node) -> Channels:
        """Channels of a communicator inside one node."""
        links = max(1, int(node.link.bytes_per_s / _NVLINK_BYTES_PER_S))
        collective = min(2 * links, _MOST_LOCAL_CHANNELS)
        per_peer = min(_power_of_2_from(2 * links), _power_of_2_from(collective))
        return cls(collective=collective, per_peer=per_peer, spans_nodes=False, connection_bytes=LOCAL_CONNECTION_BYTES)

    @classmethod
    def between(cls, cluster: Cluster) -> Channels:
        """Channels of a communicator over several nodes."""
        port_bytes_per_s = cluster.network.bytes_per_s
        ports = [_ports(node, port_bytes_per_s) for node in cluster.nodes]
        # More than a communicator may have are not used; a network without a limit would ask for infinitely many.
        per_peer = max(2, ceil(min(port_bytes_per_s / _MESSAGE_CHANNEL_BYTES_PER_S, _MOST_REMOTE_CHANNELS)))
        collective = min(_CHANNELS_PER_PORT * max(ports), _MOST_REMOTE_CHANNELS)
        of_peer = min(_power_of_2_from(per_peer), _power_of_2_from(collective))
        remote_share = 1 / min(ports)
        connection_bytes = LOCAL_CONNECTION_BYTES + remote_share * (REMOTE_CONNECTION_BYTES - LOCAL_CONNECTION_BYTES)
        return cls(collective=collective, per_peer=of_peer, spans_nodes=True, connection_bytes=connection_bytes)

    @classmethod
    def of(cls, cluster: Cluster) -> Channels:
        """Channels of a communicator over all ranks of a cluster."""
        return cls.inside(cluster.nodes[0]) if len(cluster.nodes) == 1 else cls.between(cluster)

    @property
    def message(self) -> int:
        """Channels of all messages together; src/graph/paths.cc, ncclTopoComputeP2pChannels."""
        return _power_of_2_from(self.collective)

    def collective_bytes(self, num_ranks: int) -> float:
        """Bytes of a communicator that collectives use: its tables, its rings and its trees.

        A tree of ranks of a node is a chain, with connections to both neighbours in both directions; the ring has those
        of one direction among them. Of two ranks both are one connection.
        """
        if num_ranks == 1:
            return 0.0
        neighbours = min(num_ranks - 1, 2)
        return float(TABLE_BYTES * self.message + neighbours * self.collective * self.connection_bytes)

    def message_bytes(self, local_peers: float) -> float:
        """Bytes for messages to and from peers of the own node, and to all others where there are some."""
        remote_bytes = REMOTE_MESSAGE_BYTES * self.message if self.spans_nodes else 0
        # Float: in browsers NumPy's integers have 32 bits, which hold 2 GiB.
        return float(local_peers * self.per_peer * LOCAL_CONNECTION_BYTES + remote_bytes)


def _ports(node: Node, port_bytes_per_s: float) -> int:
    """Ports of a node to the network, which its ranks share, or one for each of them; so where ports limit nothing."""
    if node.nic_bytes_per_s is None or isinf(node.nic_bytes_per_s):
        return len(node.devices)
    return max(1, round(node.nic_bytes_per_s / port_bytes_per_s))


def _power_of_2_from(number: int) -> int:
    """The least power of 2 that is not below ``number``."""
    return 1 << (number - 1).bit_length()


def _covered_bytes(device: DeviceSpec) -> float:
    """Bytes of communicators that need none of a device's memory for tensors; infinite where buffers are the host's.

    So they are of a device without a reserve, such as a CPU, and of GeForce: without peer-to-peer access NCCL takes
    shared memory of the host (src/transport/shm.cc), and without GPUDirect RDMA the network's buffers are there, too.
    """
    if not device.reserved_bytes or not reads_peers(device):
        return inf
    return _SHARE_OF_RESERVE * device.reserved_bytes


def reads_peers(device: DeviceSpec) -> bool:
    """Whether a device can read the memory of others in its node; so one does that the catalogue does not have."""
    known = CATALOGUE.get(device.name.partition("#")[0])  # a slower one of several is "RTX-4090#2" in a measured file
    return known is None or known.peer_to_peer


def beyond_reserve(device: DeviceSpec, needed_bytes: float) -> float:
    """The part of ``needed_bytes`` that a device's reserve does not cover."""
    return max(needed_bytes - _covered_bytes(device), 0.0)


@dataclass(frozen=True, kw_only=True, slots=True)
class Communicators:
    """Bytes of the communicators of a job that shares sequences, without those that its groups decide."""

    replica: Channels  # of the communicators of all ranks of a replica
    by_node: tuple[Channels, ...]  # of those inside each node
    standing_D: Floats  # whatever the groups
    covered_D: Floats  # by the reserve of a device

    @classmethod
    def of(cls, cluster: Cluster, workload: Workload) -> Communicators:
        """Count the communicators of the job, of the replica, and of ZeRO within nodes."""
        owners = workload.zero_cluster or cluster
        job_ranks = cluster.num_ranks * workload.data_parallel
        # Other replicas are on other nodes, as far as is known.
        has_more_nodes = workload.data_parallel > 1 and workload.zero_cluster is None
        job = Channels.between(owners) if has_more_nodes else Channels.of(owners)
        replica = Channels.of(cluster)
        by_node = tuple(map(Channels.inside, cluster.nodes))
        standing_D = np.full(cluster.num_ranks, _COMMUNICATORS_OF_JOB * job.collective_bytes(job_ranks))
        standing_D += replica.collective_bytes(cluster.num_ranks)
        if replica.spans_nodes:
            standing_D += replica.collective_bytes(cluster.num_ranks) + replica.message_bytes(0)
        if workload.zero_within:
            standing_D += job.collective_bytes(job_ranks) + job.message_bytes(0)
            of_node = [
                channels.collective_bytes(len(node.devices))
                for channels, node in zip(by_node, cluster.nodes, strict=True)
            ]
            standing_D += np.array(of_node)[cluster.node_of_rank]
        covered_D = np.array([_covered_bytes(device) for device in cluster.devices])
        return cls(replica=replica, by_node=by_node, standing_D=standing_D, covered_D=covered_D)

    def beyond_reserve_D(self, grouping: Grouping) -> Floats:
        """Bytes of every rank that its reserve does not cover."""
        needed_D = self.standing_D + self._ulysses_D(grouping) + self._ring_D(grouping)
        return np.maximum(needed_D - self.covered_D, 0.0)

    def _ulysses_D(self, grouping: Grouping) -> Floats:
        """All-to-alls inside the groups; one group of all ranks uses the communicator of sequence parallelism."""
        node_of_rank, size_D = grouping.cluster.node_of_rank, grouping.sizes[grouping.group_of]
        on_node_D = grouping.node_slices.sizes[grouping.node_slices.part_of]
        is_own = grouping.num_groups > 1
        inside_D = np.array([channels.message_bytes(1) for channels in self.by_node])[node_of_rank] * (on_node_D - 1)
        if is_own:
            sizes, place = np.unique(size_D, return_inverse=True)
            by_node = [[channels.collective_bytes(int(size)) for size in sizes] for channels in self.by_node]
            inside_D = inside_D + np.array(by_node)[node_of_rank, place]
        spans_D = on_node_D < size_D
        if not spans_D.any():
            return np.asarray(inside_D, dtype=np.float64)
        of_peer = self.replica.message_bytes(1) - self.replica.message_bytes(0)
        between_D = self.replica.message_bytes(0) + of_peer * (on_node_D - 1)
        between_D = between_D + (self.replica.collective_bytes(grouping.cluster.num_ranks) if is_own else 0.0)
        return np.where(spans_D, between_D, inside_D)

    def _ring_D(self, grouping: Grouping) -> Floats:
        """Messages to and from the neighbouring groups, all of whose ranks count as being on the own node.

        A rank of a group of 2 that follows a group of 4 has two peers there, one more where heads are cut unevenly,
        which is not counted.
        """
        num_groups = grouping.num_groups
        if num_groups == 1:
            return np.zeros(grouping.cluster.num_ranks)
        sizes_K = grouping.sizes
        neighbours = (1,) if num_groups == 2 else (1, -1)
        peers_K = sum(np.ceil(np.roll(sizes_K, -shift) / sizes_K) for shift in neighbours)
        of_peer = self.replica.message_bytes(1) - self.replica.message_bytes(0)
        return np.asarray(self.replica.message_bytes(0) + of_peer * np.asarray(peers_K)[grouping.group_of])


def of_stage(cluster: Cluster, node: Node, *, local_ranks: int, ranks: int, neighbours: int, holders: int) -> float:
    """Bytes of the communicators of a rank of a stage of a pipeline, as far as its block of devices tells.

    Neighbouring stages count as having one rank, on its own node if that has devices outside the block. The holders of
    its elements count as one set; where pipelines are cut at unlike layers there are more of them.

    Args:
        node: of the rank.
        local_ranks: ranks of the stage on ``node``.
        ranks: of the stage.
        neighbours: stages before and after it: none in a pipeline of one stage, one at either end, else two.
        holders: ranks that add to the gradient of an element.
    """
    job, inside = Channels.of(cluster), Channels.inside(node)
    # DeepSpeed's engine, which sees itself alone, takes all ranks for one model.
    needed = (_COMMUNICATORS_OF_JOB + 1) * job.collective_bytes(cluster.num_ranks)
    stage = inside if local_ranks == ranks else job
    # Two where it cuts layers, one of which is for what crosses a boundary; two of a replica, one for its all-to-alls.
    needed += 2 * stage.collective_bytes(ranks) + (stage.message_bytes(local_ranks - 1) if ranks > 1 else 0.0)
    has_local_neighbour = local_ranks < len(node.devices)
    neighbour = inside if has_local_neighbour else job
    # Activations and gradients have a communicator each, of one direction, so both have one connection together.
    messages = neighbour.message_bytes(1 if has_local_neighbour else 0)
    needed += neighbours * (2 * neighbour.collective_bytes(ranks + 1) + messages)
    if holders > 1:
        local_holders = local_ranks - 1 if job.spans_nodes else holders - 1
        needed += job.collective_bytes(holders) + job.message_bytes(local_holders)
    return needed
