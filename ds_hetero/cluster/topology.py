"""Devices, nodes, links and the cluster they form.

Links come in classes: every pair of ranks inside a node shares one `Link`, every pair of ranks of two given
nodes shares another. So 4,096 ranks on 512 nodes need a 512 x 512 table of class numbers and a handful of
classes, never a table over pairs of ranks.

Ranks are numbered in the order of the nodes. SI base units; the unit is in the name.

A device is datasheet numbers, and how far below them it really runs. Peaks come from the catalogue or from the user;
efficiencies come from a profile, or are the catalogue's assumption until there is one. The two are kept apart so that
`ds_hetero.cost.published` can ignore the second.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import log2

import numpy as np

from ds_hetero.common.arrays import Bools, Floats, Ints, distinct


@dataclass(frozen=True, kw_only=True, slots=True)
class Efficiency:
    """Achieved share of the peak for large shapes, and the sizes at which half of that is left.

    Time of a product of ``m`` tokens with a weight: ``flops / (peak * matmul) * (1 + matmul_half_tokens / m)``.
    Time of attention between ``r`` query rows (tokens x heads x batch) and ``t`` keys:
    ``flops / (peak * attention) * (1 + attention_half_rows / r) * (1 + attention_half_kv / t)``: few heads or short
    shards leave parts of the device idle, short keys leave the kernel's prologue and epilogue uncovered. A causal
    square takes ``attention_edge_keys`` more keys per query than its half. The shares of attention hold for heads of
    ``attention_width``, 0 for any; of heads half as wide ``attention_narrow`` of them is left, and widths that are no
    multiple of 32 are padded to one.
    """

    matmul: float = 1.0
    attention_forward: float = 1.0
    attention_backward: float = 1.0
    memory: float = 1.0
    matmul_half_tokens: float = 0.0
    attention_half_rows: float = 0.0
    attention_half_kv: float = 0.0
    attention_edge_keys: float = (
        0.0  # keys per query that a causal square costs beyond its half, computed in whole tiles
    )
    attention_width: float = 0.0
    attention_narrow: float = 1.0
    # Of the host, to launch the forward of a layer: a pass takes at least that, however little it computes.
    layer_host_s: float = 0.0
    kernel_overhead_s: float = 0.0  # host and launch time of one layer's forward outside attention
    attention_overhead_s: float = 0.0  # host and launch time of one attention block
    # Of the thread that computes, for its part in one round of messages (an exchange of heads, a hop of a ring or
    # between stages, an all-reduce): to pack, post, unpack, without waiting. 0 where a host runs ahead of its device.
    message_overhead_s: float = 0.0

    @property
    def is_profiled(self) -> bool:
        """Whether a layer was measured whole; devices of the catalogue are described by kernels and their host."""
        return not self.layer_host_s


@dataclass(frozen=True, kw_only=True, slots=True)
class DeviceSpec:
    """One accelerator.

    Args:
        error: half of the range, as a share, in which a predicted step lies in 8 of 10 cases: of measurements of this
            card, or of cards like it; see ``measured``.
        attention_s: measured seconds of causal attention on this device alone, ``(tokens, seconds)`` by ascending
            tokens, the table of the hetero-ring paper; empty if it was not measured.
    """

    name: str  # catalogue name such as ``H100-SXM-80GB``, or the user's
    peak_flops_per_s: float  # dense bf16 of the datasheet, without sparsity; HexiSeq's c_d (arXiv:2605.07569, table 1)
    memory_bytes: int  # device memory, m_d
    memory_bytes_per_s: float  # bandwidth of that memory, b_d
    reserved_bytes: int = 0  # part of the memory that no tensor gets: the driver's context and communication buffers
    fragmentation: float = 0.0  # bytes that the allocator holds beside tensors, as a share of these
    attention_kernel: str = ""  # whose rates ``efficiency`` has; empty where they were measured
    error: float = 0.0
    measured: bool = True  # training on this card was measured, by this project's table or by a profile
    source: str = "given by the user"  # where the numbers come from
    efficiency: Efficiency = field(default_factory=Efficiency)  # achieved shares of the peaks
    watts: float | None = None  # power under load; None if not known
    idle_watts: float | None = None  # power while it waits; None for a quarter of ``watts``
    shares_host_memory: bool = False  # the memory is the machine's own, so that what is offloaded stays in it
    price_per_hour: float | None = None  # money for one hour, in any one currency; None if not known
    attention_s: tuple[tuple[int, float], ...] = ()

    @property
    def usable_bytes(self) -> float:
        """Memory that tensors get: without the reserve and what the allocator loses between them."""
        return (self.memory_bytes - self.reserved_bytes) / (1 + self.fragmentation)

    def attention_share(self, name: str, head_dim: int) -> float:
        """Share of the peak that a pass of attention, ``"forward"`` or ``"backward"``, reaches on heads of a width."""
        own = self.efficiency
        share: float = getattr(own, f"attention_{name}")
        if not own.attention_width or head_dim >= own.attention_width:
            return share
        padded = -(-head_dim // 32) * 32
        narrowed: float = own.attention_narrow ** log2(own.attention_width / padded)
        return share * narrowed * head_dim / padded


@dataclass(frozen=True, kw_only=True, slots=True)
class Link:
    """A class of links: every pair of ranks that it joins sees the same latency and bandwidth."""

    name: str  # for messages, such as ``inside h100`` or ``h100 - a100``
    latency_s: float  # start-up time of a transfer, alpha of HexiSeq
    bytes_per_s: float  # nominal bandwidth of one pair in one direction, B of HexiSeq
    p2p_efficiency: float = 1.0  # achieved share of ``bytes_per_s`` by point-to-point transfers (ring steps)
    all_to_all_efficiency: float = 1.0  # achieved share by a ragged all-to-all
    all_to_all_latency_s: float | None = None  # start-up time of an all-to-all, ``latency_s`` where it is not known


@dataclass(frozen=True, kw_only=True, slots=True)
class Node:
    """One machine: its devices in rank order, the link inside it, and what its ranks share.

    Args:
        nic_bytes_per_s: what all ranks of the node together can send to other nodes (and receive); None when every
            rank has a port of its own that runs at the network link's rate.
        switch_bytes_per_s: what all ranks together can move inside the node, such as a PCIe root; None when pairs do
            not disturb each other (NVSwitch).
        host_memory_bytes: memory of the machine itself, where offloads of devices with a memory of their own go; None
            where nobody says it.
    """

    name: str
    devices: tuple[DeviceSpec, ...]
    link: Link
    nic_bytes_per_s: float | None = None
    switch_bytes_per_s: float | None = None
    host_memory_bytes: float | None = None
    group: str = ""  # name of the entry in the cluster file, the same for all copies made by ``repeat``


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """Devices by rank and links by pair of nodes."""

    nodes: tuple[Node, ...]  # in rank order
    network: Link  # link between nodes for which ``links`` has no entry
    links: tuple[tuple[tuple[int, int], Link], ...] = ()  # overrides, ``((lower node index, higher node index), link)``

    @cached_property
    def devices(self) -> tuple[DeviceSpec, ...]:
        """Device of every rank."""
        return tuple(device for node in self.nodes for device in node.devices)

    @property
    def num_ranks(self) -> int:
        """Ranks, one per device."""
        return len(self.devices)

    @cached_property
    def node_of_rank(self) -> Ints:
        """Node index of every rank, ``[ranks]``."""
        return np.repeat(np.arange(len(self.nodes)), [len(node.devices) for node in self.nodes])

    @cached_property
    def peak_flops_per_s(self) -> Floats:
        """Datasheet rate of every rank, ``[ranks]``."""
        return np.array([device.peak_flops_per_s for device in self.devices])

    @cached_property
    def message_overhead_s(self) -> Floats:
        """Host's time of every rank for its part in one round of messages, ``[ranks]``; see `Efficiency`."""
        return np.array([device.efficiency.message_overhead_s for device in self.devices])

    @cached_property
    def memory_bytes(self) -> Floats:
        """Memory of every rank, ``[ranks]``."""
        return np.array([device.memory_bytes for device in self.devices], dtype=np.float64)

    @cached_property
    def shares_host_memory(self) -> Bools:
        """Whether the memory of a rank's device is its machine's own, ``[ranks]``."""
        return np.array([device.shares_host_memory for device in self.devices])

    @cached_property
    def memory_bytes_per_s(self) -> Floats:
        """Memory bandwidth of every rank, ``[ranks]``."""
        return np.array([device.memory_bytes_per_s for device in self.devices])

    @cached_property
    def link_classes(self) -> tuple[Link, ...]:
        """The distinct links, in order of first use: inside the nodes, the network, overrides."""
        return tuple(dict.fromkeys([node.link for node in self.nodes] + [self.network] + [k for _, k in self.links]))

    @cached_property
    def link_class(self) -> Ints:
        """Index into `link_classes` for every pair of nodes, ``[nodes, nodes]``; the diagonal is inside the node."""
        number = {link: i for i, link in enumerate(self.link_classes)}
        table = np.full((len(self.nodes), len(self.nodes)), number[self.network], dtype=np.int64)
        np.fill_diagonal(table, [number[node.link] for node in self.nodes])
        for (a, b), link in self.links:
            table[a, b] = table[b, a] = number[link]
        return table

    @cached_property
    def link_classes_inside(self) -> frozenset[int]:
        """Indices into `link_classes` of links inside nodes."""
        return frozenset(np.diagonal(self.link_class).tolist())

    @cached_property
    def link_class_alike(self) -> tuple[int, ...]:
        """For every class of links the first one that differs from it in its name alone, both inside nodes or not."""
        first: dict[tuple[bool, Link], int] = {}
        nameless = ((i in self.link_classes_inside, replace(link, name="")) for i, link in enumerate(self.link_classes))
        return tuple(first.setdefault(key, i) for i, key in enumerate(nameless))

    @cached_property
    def node_latency_s(self) -> Floats:
        """Latency for every pair of nodes, ``[nodes, nodes]``."""
        return np.array([link.latency_s for link in self.link_classes])[self.link_class]

    @cached_property
    def node_all_to_all_latency_s(self) -> Floats:
        """Start-up time of an all-to-all for every pair of nodes, ``[nodes, nodes]``."""
        known = [link.all_to_all_latency_s for link in self.link_classes]
        plain = [link.latency_s for link in self.link_classes]
        return np.array([b if a is None else a for a, b in zip(known, plain, strict=True)])[self.link_class]

    @cached_property
    def place(self) -> Ints:
        """Place in the network of every node, ``[nodes]``: nodes of one place see each other and all others alike.

        Between two nodes of a place there is one link class, and so there is between two places: sums and maxima over
        pairs of nodes become sums and maxima over a handful of places.
        """
        num_nodes = len(self.nodes)
        place = np.full(num_nodes, -1)
        for node in range(num_nodes):
            if place[node] >= 0:
                continue
            same = self.link_class == self.link_class[node]
            # A twin differs at most where the row meets its own diagonal or that of the other.
            same[np.arange(num_nodes), np.arange(num_nodes)] = True
            same[:, node] = True
            place[same.all(axis=1) & (place < 0)] = place.max() + 1
        return place

    @cached_property
    def place_nodes(self) -> tuple[Ints, Ints]:
        """A pair of nodes, different if possible, for every pair of places: two arrays ``[places, places]``."""
        first = np.unique(self.place, return_index=True)[1]
        last = len(self.place) - 1 - np.unique(self.place[::-1], return_index=True)[1]
        sender, receiver = np.meshgrid(first, last, indexing="ij")
        return sender, receiver

    @cached_property
    def node_bytes_per_s(self) -> Floats:
        """Nominal bandwidth of a pair of ranks for every pair of their nodes, ``[nodes, nodes]``."""
        return np.array([link.bytes_per_s for link in self.link_classes])[self.link_class]

    @cached_property
    def node_p2p_s_per_byte(self) -> Floats:
        """Inverse of what point-to-point transfers achieve, ``[nodes, nodes]``."""
        return np.array([1 / (link.bytes_per_s * link.p2p_efficiency) for link in self.link_classes])[self.link_class]

    @cached_property
    def node_all_to_all_s_per_byte(self) -> Floats:
        """Inverse of what ragged all-to-alls achieve, ``[nodes, nodes]``."""
        inverse = [1 / (link.bytes_per_s * link.all_to_all_efficiency) for link in self.link_classes]
        return np.array(inverse)[self.link_class]

    @cached_property
    def nic_bytes_per_s(self) -> Floats:
        """Bandwidth that the ranks of a node share towards other nodes, infinite where each has a port, ``[nodes]``."""
        return np.array([np.inf if node.nic_bytes_per_s is None else node.nic_bytes_per_s for node in self.nodes])

    @cached_property
    def switch_bytes_per_s(self) -> Floats:
        """Bandwidth that the ranks of a node share inside it, infinite where pairs disturb no other, ``[nodes]``."""
        return np.array([np.inf if node.switch_bytes_per_s is None else node.switch_bytes_per_s for node in self.nodes])

    @cached_property
    def shares_ports(self) -> bool:
        """Some node has a NIC or a switch that its ranks share."""
        return bool(np.isfinite(self.nic_bytes_per_s).any() or np.isfinite(self.switch_bytes_per_s).any())

    def link(self, a: int, b: int) -> Link:
        """The link between ranks ``a`` and ``b``."""
        return self.link_classes[int(self.link_class[self.node_of_rank[a], self.node_of_rank[b]])]

    def part(self, first: int, stop: int) -> Cluster:
        """The cluster of ranks ``first`` to ``stop - 1``, which are numbered from 0 there; see `subset`."""
        return self.subset(range(first, stop))

    def subset(self, ranks: Iterable[int]) -> Cluster:
        """Return the cluster of these ranks, one at least, which are numbered from 0 there, in ascending order.

        Of a node with ranks outside they get their share of what its ranks have in common.
        """
        chosen = np.array(sorted(set(ranks)), dtype=np.int64)
        node_of_chosen = self.node_of_rank[chosen]
        nodes: dict[int, Node] = {}
        for index in distinct(node_of_chosen).tolist():
            node, inside = self.nodes[index], chosen[node_of_chosen == index]
            share = len(inside) / len(node.devices)
            nodes[index] = replace(
                node,
                devices=tuple(self.devices[rank] for rank in inside),
                nic_bytes_per_s=node.nic_bytes_per_s and node.nic_bytes_per_s * share,
                switch_bytes_per_s=node.switch_bytes_per_s and node.switch_bytes_per_s * share,
            )
        return self._of_nodes(nodes)

    def without(self, ranks: Iterable[int]) -> Cluster:
        """Return the cluster after these ranks are lost, but not all; the others are numbered from 0, ascending.

        Unlike a `subset`, what ranks of a node have in common stays whole for those that are left.
        """
        lost = set(ranks)
        first, nodes = 0, {}
        for index, node in enumerate(self.nodes):
            left = tuple(device for i, device in enumerate(node.devices, first) if i not in lost)
            first += len(node.devices)
            if left:
                nodes[index] = replace(node, devices=left)
        return self._of_nodes(nodes)

    def _of_nodes(self, nodes: Mapping[int, Node]) -> Cluster:
        """The cluster of some nodes, by their index here, with the links between them."""
        place = {index: i for i, index in enumerate(nodes)}
        links = tuple(((place[a], place[b]), link) for (a, b), link in self.links if a in place and b in place)
        return Cluster(nodes=tuple(nodes.values()), network=self.network, links=links)

    def with_devices(self, changed: Callable[[DeviceSpec], DeviceSpec]) -> Cluster:
        """The cluster with what ``changed`` makes of every device; it is called in the order of the ranks."""
        nodes = tuple(replace(node, devices=tuple(map(changed, node.devices))) for node in self.nodes)
        return replace(self, nodes=nodes)

    def rank_name(self, rank: int) -> str:
        """A rank as people see it: ``rank 3 (A100-SXM-80GB on a100)``."""
        return f"rank {rank} ({self.devices[rank].name} on {self.nodes[self.node_of_rank[rank]].name})"
