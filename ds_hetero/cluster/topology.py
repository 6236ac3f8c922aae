"""Devices, nodes and links, and the `Cluster` that they form.

Links have classes: all pairs of ranks inside a node share one `Link`, and so do all pairs of ranks between the same two
nodes. So 4,096 ranks on 512 nodes need a 512 x 512 table of class numbers and a few classes, never a table over pairs
of ranks.

Ranks are numbered in the order of the nodes. Numbers are in SI base units, with the unit in the name.

A device has peaks, from the catalogue or the user, and efficiencies, the shares of the peaks that it achieves. These
come from a profile, or are the catalogue's assumption until there is one. The two are separate so that
`ds_hetero.cost.published` can use the peaks alone.
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
    """Shares of a device's peaks that large shapes achieve, and the sizes at which half of a share is achieved.

    Time of a matmul of ``m`` tokens with a weight: ``flops / (peak * matmul) * (1 + matmul_half_tokens / m)``.
    Time of attention between ``r`` query rows (tokens x heads x batch) and ``t`` keys:
    ``flops / (peak * attention) * (1 + attention_half_rows / r) * (1 + attention_half_kv / t)``: with few heads or
    short shards parts of the device idle, with short keys nothing hides the kernel's prologue and epilogue.

    With ``matmul=0.6`` and ``matmul_half_tokens=256``, 256 tokens run at 0.3 of the peak and 2,304 at 0.54.
    """

    matmul: float = 1.0
    attention_forward: float = 1.0
    attention_backward: float = 1.0
    memory: float = 1.0
    matmul_half_tokens: float = 0.0
    attention_half_rows: float = 0.0
    attention_half_kv: float = 0.0
    # A causal square costs half of its keys per query and this many more: tiles on the diagonal are computed in full.
    attention_edge_keys: float = 0.0
    # Head size for which the shares of attention were measured, 0 for any; see `DeviceSpec.attention_share`.
    attention_width: float = 0.0
    attention_narrow: float = 1.0  # factor on these shares for heads half as wide
    # Host time to launch the forward of a layer: a pass takes at least this, however little it computes.
    layer_host_s: float = 0.0
    kernel_overhead_s: float = 0.0  # host and launch time of one layer's forward outside attention
    attention_overhead_s: float = 0.0  # host and launch time of one attention block
    # Time of the computing thread to pack, post and unpack the messages of one round (an all-to-all, a ring step, a
    # stage-to-stage send, an all-reduce), without waiting. 0 if the host runs ahead of its device.
    message_overhead_s: float = 0.0

    @property
    def is_profiled(self) -> bool:
        """Whether the numbers were fitted to measured layers; the catalogue describes kernels and host separately."""
        return not self.layer_host_s


@dataclass(frozen=True, kw_only=True, slots=True)
class DeviceSpec:
    """One accelerator.

    Args:
        error: relative error of predicted steps that 8 of 10 measurements stay within; measured on this device if
            ``measured``, else on similar ones.
        attention_s: measured seconds of causal attention on this device, ``(tokens, seconds)`` by ascending tokens,
            the table of the hetero-ring paper; empty if not measured.
    """

    name: str  # catalogue name such as ``H100-SXM-80GB``, or the user's
    peak_flops_per_s: float  # dense bf16 of the datasheet, without sparsity; HexiSeq's c_d (arXiv:2605.07569, table 1)
    memory_bytes: int  # device memory, m_d
    memory_bytes_per_s: float  # bandwidth of that memory, b_d
    reserved_bytes: int = 0  # memory unusable for tensors: the driver's context and communication buffers
    fragmentation: float = 0.0  # memory that the allocator wastes, as a share of the tensors' bytes
    attention_kernel: str = ""  # catalogue kernel whose rates ``efficiency`` has; empty if they were measured
    error: float = 0.0
    measured: bool = True  # whether training steps on this device were measured, in `step_errors` or by a profile
    source: str = "given by the user"  # source of the numbers
    efficiency: Efficiency = field(default_factory=Efficiency)  # achieved shares of the peaks
    watts: float | None = None  # power under load; None if unknown
    idle_watts: float | None = None  # power while it waits; None for a quarter of ``watts``
    shares_host_memory: bool = False  # device and host have one memory: offloading frees nothing
    price_per_hour: float | None = None  # money for one hour, in any one currency; None if unknown
    attention_s: tuple[tuple[int, float], ...] = ()

    @property
    def usable_bytes(self) -> float:
        """Memory for tensors: without the reserve, and without the allocator's waste."""
        return (self.memory_bytes - self.reserved_bytes) / (1 + self.fragmentation)

    def attention_share(self, name: str, head_dim: int) -> float:
        """Return the share of the peak that attention achieves on heads of ``head_dim``.

        Narrower heads than ``attention_width`` achieve less: ``attention_narrow`` of it at each halving. Kernels pad
        ``head_dim`` to a multiple of 32. With a width of 128, ``attention_narrow=0.8`` and a share of 0.5, heads of 64
        achieve 0.4, and heads of 48 (padded to 64) 0.4 * 48 / 64 = 0.3.

        Args:
            name: the pass, ``"forward"`` or ``"backward"``.
        """
        efficiency = self.efficiency
        share: float = getattr(efficiency, f"attention_{name}")
        if not efficiency.attention_width or head_dim >= efficiency.attention_width:
            return share
        padded = -(-head_dim // 32) * 32
        narrowed: float = efficiency.attention_narrow ** log2(efficiency.attention_width / padded)
        return share * narrowed * head_dim / padded


@dataclass(frozen=True, kw_only=True, slots=True)
class Link:
    """A class of links: every pair of ranks that it joins sees the same latency and bandwidth."""

    name: str  # for messages, such as ``inside h100`` or ``h100 - a100``
    latency_s: float  # start-up time of a transfer, alpha of HexiSeq
    bytes_per_s: float  # nominal bandwidth of one pair in one direction, B of HexiSeq
    p2p_efficiency: float = 1.0  # achieved share of ``bytes_per_s`` by point-to-point transfers (ring steps)
    all_to_all_efficiency: float = 1.0  # achieved share by a ragged all-to-all
    all_to_all_latency_s: float | None = None  # start-up time of an all-to-all; None: as ``latency_s``


@dataclass(frozen=True, kw_only=True, slots=True)
class Node:
    """One machine: its devices in rank order, the link between them, and the rates and memory that they share.

    Args:
        nic_bytes_per_s: rate at which all ranks of the node together send to other nodes (and receive); None if every
            rank has a NIC to itself, at the rate of the network link.
        switch_bytes_per_s: rate at which all ranks together send inside the node, such as that of a PCIe root; None if
            pairs do not slow each other down (NVSwitch).
        host_memory_bytes: memory of the machine, to which devices offload; None if unknown.
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
        """Number of ranks, one per device."""
        return len(self.devices)

    @cached_property
    def node_of_rank(self) -> Ints:
        """Node index of every rank, ``[ranks]``."""
        return np.repeat(np.arange(len(self.nodes)), [len(node.devices) for node in self.nodes])

    @cached_property
    def peak_flops_per_s(self) -> Floats:
        """Peak of every rank's device in the datasheet, ``[ranks]``."""
        return np.array([device.peak_flops_per_s for device in self.devices])

    @cached_property
    def message_overhead_s(self) -> Floats:
        """Time of every rank's host for one round of messages, ``[ranks]``; see `Efficiency`."""
        return np.array([device.efficiency.message_overhead_s for device in self.devices])

    @cached_property
    def memory_bytes(self) -> Floats:
        """Memory of every rank, ``[ranks]``; floats, as NumPy's integers have 32 bits in browsers."""
        return np.array([device.memory_bytes for device in self.devices], dtype=np.float64)

    @cached_property
    def shares_host_memory(self) -> Bools:
        """Whether a rank's device uses its host's memory, ``[ranks]``."""
        return np.array([device.shares_host_memory for device in self.devices])

    @cached_property
    def memory_bytes_per_s(self) -> Floats:
        """Memory bandwidth of every rank, ``[ranks]``."""
        return np.array([device.memory_bytes_per_s for device in self.devices])

    @cached_property
    def link_classes(self) -> tuple[Link, ...]:
        """The distinct links, in order of first use: inside the nodes, the network, overrides."""
        inside = [node.link for node in self.nodes]
        overrides = [link for _, link in self.links]
        return tuple(dict.fromkeys([*inside, self.network, *overrides]))

    @cached_property
    def link_class(self) -> Ints:
        """Index into `link_classes` for every pair of nodes, ``[nodes, nodes]``; the diagonal is inside the node."""
        class_of_link = {link: i for i, link in enumerate(self.link_classes)}
        table = np.full((len(self.nodes), len(self.nodes)), class_of_link[self.network], dtype=np.int64)
        np.fill_diagonal(table, [class_of_link[node.link] for node in self.nodes])
        for (a, b), link in self.links:
            table[a, b] = table[b, a] = class_of_link[link]
        return table

    @cached_property
    def link_classes_inside(self) -> frozenset[int]:
        """Indices into `link_classes` of links inside nodes."""
        return frozenset(np.diagonal(self.link_class).tolist())

    @cached_property
    def link_class_alike(self) -> tuple[int, ...]:
        """For every link class, index of the first class with equal latency and rates; inside and between nodes apart.

        Eight equal nodes have eight classes that differ in their names only, ``inside node-0`` ...: all of them get the
        index of the first.
        """
        first_of_numbers: dict[tuple[bool, Link], int] = {}
        first_classes = []
        for i, link in enumerate(self.link_classes):
            numbers = i in self.link_classes_inside, replace(link, name="")
            first_classes.append(first_of_numbers.setdefault(numbers, i))
        return tuple(first_classes)

    @cached_property
    def node_latency_s(self) -> Floats:
        """Latency for every pair of nodes, ``[nodes, nodes]``."""
        return np.array([link.latency_s for link in self.link_classes])[self.link_class]

    @cached_property
    def node_all_to_all_latency_s(self) -> Floats:
        """Start-up time of an all-to-all for every pair of nodes, ``[nodes, nodes]``."""
        latencies_s = []
        for link in self.link_classes:
            measured_s = link.all_to_all_latency_s
            latencies_s.append(link.latency_s if measured_s is None else measured_s)
        return np.array(latencies_s)[self.link_class]

    @cached_property
    def place(self) -> Ints:
        """Index of every node's place in the network, ``[nodes]``; nodes of a place have the same links to all nodes.

        Between any two nodes of a place there is one link class, and so there is between two places. So sums and maxima
        over pairs of nodes are computed over a few places. 64 nodes in two racks, with one link class inside a rack and
        another between racks, have two places.
        """
        num_nodes = len(self.nodes)
        place = np.full(num_nodes, -1)
        for node in range(num_nodes):
            if place[node] >= 0:
                continue
            same = self.link_class == self.link_class[node]  # [other node, third node]: same link to the third node
            # The rows of two nodes of one place may differ in the columns of these two nodes: there one row has the
            # link inside a node, and the other the link between the two. These columns do not count.
            same[np.arange(num_nodes), np.arange(num_nodes)] = True
            same[:, node] = True
            place[same.all(axis=1) & (place < 0)] = place.max() + 1
        return place

    @cached_property
    def place_nodes(self) -> tuple[Ints, Ints]:
        """For every pair of places, one pair of nodes there: senders and receivers, ``[places, places]`` each.

        For a place with itself these are two different nodes, if the place has several.
        """
        first_node = np.unique(self.place, return_index=True)[1]  # of every place
        last_node = len(self.place) - 1 - np.unique(self.place[::-1], return_index=True)[1]
        sender, receiver = np.meshgrid(first_node, last_node, indexing="ij")
        return sender, receiver

    @cached_property
    def node_bytes_per_s(self) -> Floats:
        """Nominal bandwidth of a pair of ranks for every pair of their nodes, ``[nodes, nodes]``."""
        return np.array([link.bytes_per_s for link in self.link_classes])[self.link_class]

    @cached_property
    def node_p2p_s_per_byte(self) -> Floats:
        """Seconds per byte of point-to-point transfers between ranks, by pair of their nodes, ``[nodes, nodes]``."""
        return np.array([1 / (link.bytes_per_s * link.p2p_efficiency) for link in self.link_classes])[self.link_class]

    @cached_property
    def node_all_to_all_s_per_byte(self) -> Floats:
        """Seconds per byte of uneven all-to-alls between ranks, by pair of their nodes, ``[nodes, nodes]``."""
        inverse = [1 / (link.bytes_per_s * link.all_to_all_efficiency) for link in self.link_classes]
        return np.array(inverse)[self.link_class]

    @cached_property
    def nic_bytes_per_s(self) -> Floats:
        """Bandwidth to other nodes that a node's ranks share, infinite if each rank has a NIC, ``[nodes]``."""
        return np.array([np.inf if node.nic_bytes_per_s is None else node.nic_bytes_per_s for node in self.nodes])

    @cached_property
    def switch_bytes_per_s(self) -> Floats:
        """Bandwidth that a node's ranks share inside it, infinite if pairs do not slow each other down, ``[nodes]``."""
        return np.array([np.inf if node.switch_bytes_per_s is None else node.switch_bytes_per_s for node in self.nodes])

    @cached_property
    def shares_ports(self) -> bool:
        """True if some node has a NIC or a switch that its ranks share."""
        return bool(np.isfinite(self.nic_bytes_per_s).any() or np.isfinite(self.switch_bytes_per_s).any())

    def link(self, rank: int, other_rank: int) -> Link:
        """Return the link between two ranks."""
        nodes = self.node_of_rank[rank], self.node_of_rank[other_rank]
        return self.link_classes[int(self.link_class[nodes])]

    def part(self, first: int, stop: int) -> Cluster:
        """Return the cluster of ranks ``first`` to ``stop - 1``, numbered from 0; see `subset`."""
        return self.subset(range(first, stop))

    def subset(self, ranks: Iterable[int]) -> Cluster:
        """Return the cluster of these ranks, at least one, numbered from 0 in ascending order.

        The other ranks of a node still use its NICs and its switch, so these ranks get their share of them.
        """
        chosen = np.array(sorted(set(ranks)), dtype=np.int64)
        node_of_chosen = self.node_of_rank[chosen]
        nodes: dict[int, Node] = {}
        for index in distinct(node_of_chosen).tolist():
            node = self.nodes[index]
            chosen_here = chosen[node_of_chosen == index]
            share = len(chosen_here) / len(node.devices)
            nodes[index] = replace(
                node,
                devices=tuple(self.devices[rank] for rank in chosen_here),
                nic_bytes_per_s=node.nic_bytes_per_s and node.nic_bytes_per_s * share,
                switch_bytes_per_s=node.switch_bytes_per_s and node.switch_bytes_per_s * share,
            )
        return self._of_nodes(nodes)

    def without(self, ranks: Iterable[int]) -> Cluster:
        """Return the cluster after the loss of these ranks, not of all; the others are numbered from 0, ascending.

        Unlike in a `subset`, the remaining ranks of a node have its NICs and its switch to themselves.
        """
        lost = set(ranks)
        first_rank, nodes = 0, {}
        for index, node in enumerate(self.nodes):
            remaining = tuple(device for rank, device in enumerate(node.devices, first_rank) if rank not in lost)
            first_rank += len(node.devices)
            if remaining:
                nodes[index] = replace(node, devices=remaining)
        return self._of_nodes(nodes)

    def _of_nodes(self, nodes: Mapping[int, Node]) -> Cluster:
        """Return the cluster of ``nodes``, by their index in this cluster, with the links between them."""
        new_index = {index: i for i, index in enumerate(nodes)}
        links = []
        for (a, b), link in self.links:
            if a in new_index and b in new_index:
                links.append(((new_index[a], new_index[b]), link))
        return Cluster(nodes=tuple(nodes.values()), network=self.network, links=tuple(links))

    def with_devices(self, changed: Callable[[DeviceSpec], DeviceSpec]) -> Cluster:
        """Return the cluster with every device replaced by ``changed(device)``, called in the order of the ranks."""
        nodes = tuple(replace(node, devices=tuple(map(changed, node.devices))) for node in self.nodes)
        return replace(self, nodes=nodes)

    def rank_name(self, rank: int) -> str:
        """Return a rank's name for people: ``rank 3 (A100-SXM-80GB on a100)``."""
        return f"rank {rank} ({self.devices[rank].name} on {self.nodes[self.node_of_rank[rank]].name})"
