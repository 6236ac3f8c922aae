"""Device memory that NCCL's communicators allocate beyond the reserve of a device, and that no tensor can use.

A communicator allocates in three steps, each at its first use (NCCL 2.30.7; files are those of its sources):

    made         tables of every channel                                                            (src/channel.cc)
    collectives  buffers of every channel to the neighbours in its ring, and in its tree            (src/transport)
    messages     buffers of every channel of a peer to each peer of the same node; of all peers on other nodes together
                 one buffer to send from and one to receive into                  (src/transport/net.cc, shared buffers)

Each end of a connection has a part of its buffers: the sender allocates some, the receiver the others. So a rank that
both sends to a peer and receives from it needs as much as one whole connection. All-to-alls are messages between all
pairs.

    communicator            ranks                    collectives  messages with
    WORLD, messages_group,  the job                  yes          none
      DeepSpeed's
    sequence parallelism    a replica                yes          ranks of the neighbouring groups of the ring
    colours of the ring     a replica                no           as sequence parallelism: 1, or 2 in odd rings
    Ulysses all-to-all      a group of the ring      yes          all its ranks
    far group               a replica of more nodes  yes          as sequence parallelism, on other nodes
    zero_within in a node   a node                   yes          none
    zero_within over nodes  the job                  yes          all ranks
    boundaries of stages    two stages, two of them  yes          the other stage
    gradient sync           holders of an element    yes          all of them

These figures are upper bounds. Before a job runs nobody knows which ring and tree NCCL builds, nor whether the
network's buffers are on the device at all (they are only where the NIC reads device memory itself, GPUDirect RDMA).
Buffers of NVLink SHARP are not counted. As a check, others measured that a first all-to-all of 8 H100 takes 3.28 GB
outside PyTorch's memory, in buffers of 10 and 2 MiB, with 32 channels to each peer (NVIDIA/nccl#1685). This module
predicts 2.82 GB for messages and 0.20 GB for tables. This project has not measured communicators itself.

Dimension key: D ranks.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from math import ceil, inf, isinf
from weakref import WeakKeyDictionary

import numpy as np

from ds_hetero.batch.ring_colours import EVEN_RING, colours_of_ring
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
_MAX_LOCAL_CHANNELS = 24
# Three nodes of 8 H100 print "Channel 00/16" (NVIDIA/nccl#1453).
_MAX_REMOTE_CHANNELS = 16
# src/graph/connect.cc: a ring for each NIC port, doubled; doubled again on Hopper behind NVLink.
_CHANNELS_PER_PORT = 4
# src/graph/paths.cc: channels of a remote peer, one for each 14 GB/s, two at least.
_MESSAGE_CHANNEL_BYTES_PER_S = 14 * GB

# torch's default group, `ds_hetero.runtime.collectives.messages_group`, and the one that DeepSpeed makes of all ranks
# (deepspeed/utils/groups.py, _clone_world_group).
_COMMUNICATORS_OF_JOB = 3

# Share of a device's reserve that is meant for NCCL: 0.5 of the usual 1.5 GiB. Before the first all-to-all of
# NVIDIA/nccl#1685 the process had 1.06 GB outside PyTorch's memory, for context and kernels; the split is a guess.
_SHARE_OF_RESERVE = 1 / 3


@dataclass(frozen=True, kw_only=True, slots=True)
class Channels:
    """Number of channels of a communicator, and the bytes of a connection in its rings."""

    collective: int  # channels of its rings
    per_peer: int  # channels of messages to one peer
    spans_nodes: bool  # whether it has ranks on more than one node
    # Bytes of one channel's connection to a neighbour in the ring. Over several nodes a ring leaves and enters a node
    # once, and the rings of several ports do so at different ranks: this is the mean over the ranks of a node.
    connection_bytes: float

    @classmethod
    def inside(cls, node: Node) -> Channels:
        """Channels of a communicator inside one node."""
        links = max(1, int(node.link.bytes_per_s / _NVLINK_BYTES_PER_S))
        collective = min(2 * links, _MAX_LOCAL_CHANNELS)
        per_peer = min(_power_of_2_from(2 * links), _power_of_2_from(collective))
        return cls(collective=collective, per_peer=per_peer, spans_nodes=False, connection_bytes=LOCAL_CONNECTION_BYTES)

    @classmethod
    def between(cls, cluster: Cluster) -> Channels:
        """Channels of a communicator over several nodes."""
        port_bytes_per_s = cluster.network.bytes_per_s
        ports = [_num_nic_ports(node, port_bytes_per_s) for node in cluster.nodes]
        # Bounded before it is rounded: a network of unlimited rate would ask for infinitely many channels.
        wanted_per_peer = max(2, ceil(min(port_bytes_per_s / _MESSAGE_CHANNEL_BYTES_PER_S, _MAX_REMOTE_CHANNELS)))
        collective = min(_CHANNELS_PER_PORT * max(ports), _MAX_REMOTE_CHANNELS)
        per_peer = min(_power_of_2_from(wanted_per_peer), _power_of_2_from(collective))
        remote_share = 1 / min(ports)
        connection_bytes = LOCAL_CONNECTION_BYTES + remote_share * (REMOTE_CONNECTION_BYTES - LOCAL_CONNECTION_BYTES)
        return cls(collective=collective, per_peer=per_peer, spans_nodes=True, connection_bytes=connection_bytes)

    @classmethod
    def of(cls, cluster: Cluster) -> Channels:
        """Channels of a communicator over all ranks of a cluster."""
        return cls.inside(cluster.nodes[0]) if len(cluster.nodes) == 1 else cls.between(cluster)

    @property
    def num_message_channels(self) -> int:
        """Channels of all messages together; src/graph/paths.cc, ncclTopoComputeP2pChannels."""
        return _power_of_2_from(self.collective)

    def collective_bytes(self, num_ranks: int) -> float:
        """Bytes of a communicator of so many ranks that only runs collectives: tables, rings and trees.

        The tree of a node's ranks is a chain, which connects each rank with both neighbours in both directions. The
        ring uses one direction of the same connections, so it adds none. With two ranks both neighbours are the same
        rank: one connection instead of two.
        """
        if num_ranks == 1:
            return 0.0
        neighbours = min(num_ranks - 1, 2)
        tables_bytes = TABLE_BYTES * self.num_message_channels
        return float(tables_bytes + neighbours * self.collective * self.connection_bytes)

    def message_bytes(self, local_peers: float) -> float:
        """Bytes that a rank needs for point-to-point messages.

        Args:
            local_peers: peers on the rank's node. Peers on other nodes share one buffer, however many they are.
        """
        remote_bytes = REMOTE_MESSAGE_BYTES * self.num_message_channels if self.spans_nodes else 0
        # Float: in browsers NumPy's integers have 32 bits, which hold 2 GiB.
        return float(local_peers * self.per_peer * LOCAL_CONNECTION_BYTES + remote_bytes)


def _num_nic_ports(node: Node, port_bytes_per_s: float) -> int:
    """Number of NIC ports of a node; one per rank if the node's NIC rate is unknown or unlimited."""
    if node.nic_bytes_per_s is None or isinf(node.nic_bytes_per_s):
        return len(node.devices)
    return max(1, round(node.nic_bytes_per_s / port_bytes_per_s))


def _power_of_2_from(number: int) -> int:
    """Return the least power of 2 that is not below ``number``."""
    return 1 << (number - 1).bit_length()


def _covered_bytes(device: DeviceSpec) -> float:
    """Bytes of communicators that take no memory from tensors, since they fit into the device's reserve.

    Infinite where the buffers are in the host's memory: on devices without a reserve, such as CPUs, and on GeForce.
    Without peer-to-peer access NCCL uses shared memory of the host (src/transport/shm.cc), and without GPUDirect RDMA
    the network's buffers are in the host's memory, too.
    """
    if not device.reserved_bytes or not reads_peers(device):
        return inf
    return _SHARE_OF_RESERVE * device.reserved_bytes


def reads_peers(device: DeviceSpec) -> bool:
    """Whether a device can read the memory of others in its node; True for devices that the catalogue lacks."""
    catalogue_name = device.name.partition("#")[0]  # a measured file calls a slower one of several "RTX-4090#2"
    entry = CATALOGUE.get(catalogue_name)
    return entry is None or entry.peer_to_peer


def bytes_beyond_reserve(device: DeviceSpec, needed_bytes: float) -> float:
    """Return the part of ``needed_bytes`` that a device's reserve does not cover; 0 if it covers all."""
    return max(needed_bytes - _covered_bytes(device), 0.0)


@dataclass(frozen=True, kw_only=True, slots=True)
class Communicators:
    """Communicators of a job with sequence parallelism: bytes that all groupings share, and channels of the others.

    The communicators of Ulysses groups and of the ring depend on the grouping: see `bytes_beyond_reserve_D`.
    """

    replica: Channels  # of a communicator over all ranks of a replica
    by_node: tuple[Channels, ...]  # of a communicator inside each node
    fixed_bytes_D: Floats  # bytes of the communicators that every grouping has
    covered_bytes_D: Floats  # bytes that the reserve of a device covers
    speed_D: Floats  # FLOPs per second in attention
    memory_D: Floats  # bytes
    # Results of `bytes_beyond_reserve_D`: a search asks for the same grouping with many tokens and heads.
    _by_grouping: WeakKeyDictionary[Grouping, Floats] = field(
        default_factory=WeakKeyDictionary, init=False, repr=False, compare=False
    )

    @classmethod
    def of(cls, cluster: Cluster, workload: Workload) -> Communicators:
        """Count the communicators of the job, of the replica, and of ZeRO within nodes."""
        owners = workload.zero_cluster or cluster
        job_ranks = cluster.num_ranks * workload.data_parallel
        # Without a cluster of all replicas, assume that the other ones are on other nodes.
        has_more_nodes = workload.data_parallel > 1 and workload.zero_cluster is None
        job = Channels.between(owners) if has_more_nodes else Channels.of(owners)
        replica = Channels.of(cluster)
        by_node = tuple(map(Channels.inside, cluster.nodes))
        fixed_bytes_D = np.full(cluster.num_ranks, _COMMUNICATORS_OF_JOB * job.collective_bytes(job_ranks))
        fixed_bytes_D += replica.collective_bytes(cluster.num_ranks)
        if replica.spans_nodes:
            fixed_bytes_D += replica.collective_bytes(cluster.num_ranks) + replica.message_bytes(0)
        if workload.zero_within:
            fixed_bytes_D += job.collective_bytes(job_ranks) + job.message_bytes(0)
            of_node = [
                channels.collective_bytes(len(node.devices))
                for channels, node in zip(by_node, cluster.nodes, strict=True)
            ]
            fixed_bytes_D += np.array(of_node)[cluster.node_of_rank]
        covered_bytes_D = np.array([_covered_bytes(device) for device in cluster.devices])
        devices = cluster.devices
        return cls(
            replica=replica,
            by_node=by_node,
            fixed_bytes_D=fixed_bytes_D,
            covered_bytes_D=covered_bytes_D,
            speed_D=np.array([device.peak_flops_per_s * device.efficiency.attention_forward for device in devices]),
            memory_D=np.array([device.memory_bytes for device in devices], dtype=np.float64),
        )

    def bytes_beyond_reserve_D(self, grouping: Grouping) -> Floats:
        """Bytes of communicators that every rank's reserve does not cover, ``[D]``."""
        known_D = self._by_grouping.get(grouping)
        if known_D is not None:
            return known_D
        needed_D = self.fixed_bytes_D + self._ulysses_bytes_D(grouping) + self._ring_bytes_D(grouping)
        beyond_D = self._by_grouping[grouping] = np.maximum(needed_D - self.covered_bytes_D, 0.0)
        return beyond_D

    def _ulysses_bytes_D(self, grouping: Grouping) -> Floats:
        """Bytes of every rank for the all-to-alls inside its group, ``[D]``.

        With several groups each has a communicator. One group of all ranks uses the communicator of sequence
        parallelism, which is counted already, and adds messages only.
        """
        node_of_rank, size_D = grouping.cluster.node_of_rank, grouping.sizes[grouping.group_of]
        on_node_D = grouping.node_slices.sizes[grouping.node_slices.part_of]
        has_group_communicators = grouping.num_groups > 1
        inside_D = np.array([channels.message_bytes(1) for channels in self.by_node])[node_of_rank] * (on_node_D - 1)
        if has_group_communicators:
            sizes, place = np.unique(size_D, return_inverse=True)
            by_node = [[channels.collective_bytes(int(size)) for size in sizes] for channels in self.by_node]
            inside_D = inside_D + np.array(by_node)[node_of_rank, place]
        group_spans_nodes_D = on_node_D < size_D
        if not group_spans_nodes_D.any():
            return np.asarray(inside_D, dtype=np.float64)
        between_D = self.replica.message_bytes(0) + self._local_peer_bytes * (on_node_D - 1)
        if has_group_communicators:
            between_D = between_D + self.replica.collective_bytes(grouping.cluster.num_ranks)
        return np.where(group_spans_nodes_D, between_D, inside_D)

    def _ring_bytes_D(self, grouping: Grouping) -> Floats:
        """Bytes of every rank for messages to and from the neighbouring groups of the ring, ``[D]``.

        All peers count as ranks of the same node, which need more. A rank of a group of 2 that follows a group of 4 has
        two peers there; the third that it gets where heads are cut unevenly is not counted. The colours of the ring
        (`ds_hetero.batch.ring_colours`) have communicators of their own; the connections are shared among them.
        """
        num_groups = grouping.num_groups
        if num_groups == 1:
            return np.zeros(grouping.cluster.num_ranks)
        sizes_K = grouping.sizes
        neighbours = (1,) if num_groups == 2 else (1, -1)
        peers_K = sum(np.ceil(np.roll(sizes_K, -shift) / sizes_K) for shift in neighbours)
        remote_bytes, local_peer_bytes = self.replica.message_bytes(0), self._local_peer_bytes
        needed_D = remote_bytes + local_peer_bytes * np.asarray(peers_K)[grouping.group_of]
        if num_groups > 2 and self._is_uneven(grouping):
            of_colour = TABLE_BYTES * self.replica.num_message_channels + remote_bytes
            needed_D = needed_D + (colours_of_ring(num_groups) - 1) * of_colour
        return np.asarray(needed_D)

    @property
    def _local_peer_bytes(self) -> float:
        """Bytes for messages with one peer of the same node."""
        return self.replica.message_bytes(1) - self.replica.message_bytes(0)

    def _is_uneven(self, grouping: Grouping) -> bool:
        """Whether the groups may get unlike numbers of tokens: they differ in speed or in memory."""
        return any(
            float(of_group.max()) > EVEN_RING * float(of_group.min())
            for of_group in (grouping.by_group(np.add, self.speed_D), grouping.by_group(np.add, self.memory_D))
        )


def stage_communicator_bytes(
    cluster: Cluster, node: Node, *, local_ranks: int, ranks: int, neighbours: int, holders: int
) -> float:
    """Bytes of communicators on one rank of a pipeline's stage, estimated from the stage's block of devices alone.

        communicators                number                 ranks      messages with
        of the job                   3                      all        none
        DeepSpeed's model group      1                      all        none
        of the stage                 2                      its ranks  local ones (of one of the two)
        with a neighbouring stage    2 for each of them     ranks + 1  one (both directions share a connection)
        gradient sync                1 if holders > 1       holders    all of them

    The engine of DeepSpeed knows no pipelines here and takes all ranks for one model. The two communicators of a stage
    are, under tensor parallelism, one for the matmuls and one for tensors that cross a boundary; if it shares
    sequences, one for the replica and one for its all-to-alls. A neighbouring stage counts as one rank, on ``node`` if
    that has devices outside the block. Pipelines that are cut at different layers have several sets of holders; one
    is counted.

    Args:
        node: node of the rank.
        local_ranks: ranks of the stage on ``node``.
        ranks: ranks of the stage.
        neighbours: stages before and after it: none in a pipeline of one stage, one at either end, else two.
        holders: ranks that add to the gradient of an element.
    """
    job, inside = Channels.of(cluster), Channels.inside(node)
    needed = (_COMMUNICATORS_OF_JOB + 1) * job.collective_bytes(cluster.num_ranks)
    stage = inside if local_ranks == ranks else job
    needed += 2 * stage.collective_bytes(ranks) + (stage.message_bytes(local_ranks - 1) if ranks > 1 else 0.0)
    has_local_neighbour = local_ranks < len(node.devices)
    neighbour = inside if has_local_neighbour else job
    messages = neighbour.message_bytes(1 if has_local_neighbour else 0)
    needed += neighbours * (2 * neighbour.collective_bytes(ranks + 1) + messages)
    if holders > 1:
        local_holders = local_ranks - 1 if job.spans_nodes else holders - 1
        needed += job.collective_bytes(holders) + job.message_bytes(local_holders)
    return needed
