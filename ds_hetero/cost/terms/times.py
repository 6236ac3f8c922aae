"""Times of messages and of the host: all-to-all, ring steps and their end, collectives of ZeRO, launches and offloads.

**Ring**, a max-plus recurrence without barriers. HexiSeq's Eq. 2 lets every ring step wait for the slowest device of
all (arXiv:2605.07569). The runtime has no such barrier: a group waits for its own KV only, which travels while it
computes on the block before.

    S_p(t)      group p begins step t
    E_p(t)      = S_p(t) + compute_p(block at t)
    R_p(t + 1)  = max(S_p(t), S_{p-1}(t)) + transfer_p(block at t + 1)     both ends are there, one block ahead
    S_p(t + 1)  = max(E_p(t), R_p(t + 1))

Forward, group p works on the block of group p - t. Backward, the ring turns the other way: the last remote block of
the forward is still there, block p + 1 + t is worked on at step t, and while a group computes it receives the
next KV block and the fp32 dK and dV that its neighbour has finished for the present one (the runtime sends them on
right after its own part has been added). That makes K - 1 hops of KV forward, K - 2 of KV and K - 1 of dK/dV backward.

**All-to-all** of uneven parts, whose bytes add up at the ports of a device. HexiSeq's Eq. 9 takes the slowest pair
alone, so a group of many ranks exchanges almost for free (arXiv:2605.07569, section A.4). Here a rank sends everything
for other nodes through one network port and everything for its own node through one inner port (NVLink, PCIe); the two
work side by side. Nodes whose ranks share a NIC or a switch are bound by the sum of their bytes as well.

The exchange moves s_d x w_j bytes from rank d to rank j, where w counts q, k and v on the way in. With tokens and
weights trading places the same function gives the way back, because ports are equally fast both ways.

**Ring step**: as in the all-to-all, what a rank receives (or sends) in one step adds up at its inner port and at its
network port, and what the ranks of a node do adds up at its NIC and its switch. HexiSeq's Eq. 12 lets different sources
run side by side (arXiv:2605.07569, section A.4).

Dimension key: B assignments, D ranks, K groups in ring order, E edges, N node slices, S sites: see `grouping`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from ds_hetero.cluster.catalogue import CATALOGUE, pcie_bytes_per_s
from ds_hetero.cluster.topology import Cluster, DeviceSpec
from ds_hetero.common.arrays import Bools, Floats, Ints
from ds_hetero.cost.terms.grouping import Edges, Grouping, ring_edges
from ds_hetero.cost.workload import Workload
from ds_hetero.models.shapes import ModelSpec


def ring_transfers_s(
    grouping: Grouping, heads_BD: Ints, length_BK: Floats, queries_per_kv_head: int
) -> tuple[Floats, Floats, Floats]:
    """Transfers from the group one position back into every group, each ``[B, K]``.

    Returns:
        latency in seconds; seconds per token and byte of a KV head; and the least seconds per byte of a KV head that a
        NIC or a switch allows which all transfers of the step share, for blocks of average length.
    """
    num_sets, num_groups = length_BK.shape
    zeros = np.zeros((num_sets, num_groups))
    if num_groups == 1:
        return zeros, zeros, zeros
    # Tokens do not matter but by the mean length where ports are shared, and heads seen before are known.
    length_B = np.zeros(num_sets)
    if grouping.cluster.shares_ports:  # in whole tokens, so that rounding makes no assignments of its own
        length_B = np.rint(length_BK.sum(axis=1)) / num_groups
    known = grouping.transfers_of_heads
    new_B = np.concatenate([[True], (heads_BD[1:] != heads_BD[:-1]).any(axis=1) | (length_B[1:] != length_B[:-1])])
    different_RD, length_R = heads_BD[new_B], length_B[new_B]
    keys = [
        (queries_per_kv_head, length, heads.tobytes())
        for heads, length in zip(different_RD, length_R.tolist(), strict=True)
    ]
    unknown = [r for r, key in enumerate(keys) if key not in known]
    if unknown:
        made = _transfers_s(grouping, different_RD[unknown], length_R[unknown], queries_per_kv_head)
        known.update(zip((keys[r] for r in unknown), zip(*made, strict=True), strict=True))
    run_B = np.cumsum(new_B) - 1
    latency_BK, transfer_BK, shared_BK = (
        np.array(each)[run_B] for each in zip(*(known[key] for key in keys), strict=True)
    )
    return latency_BK, transfer_BK, shared_BK


def _transfers_s(
    grouping: Grouping, heads_BD: Ints, length_B: Floats, queries_per_kv_head: int
) -> tuple[Floats, Floats, Floats]:
    """`ring_transfers_s` for groups of these mean lengths."""
    edges, set_E, latency_BK, transfer_BK = _own_ports(grouping, heads_BD, queries_per_kv_head)
    if not grouping.cluster.shares_ports:
        return latency_BK, transfer_BK, np.zeros_like(latency_BK)
    shared_E = _shared_transfer_s(grouping, edges, set_E, length_B)
    return latency_BK, transfer_BK, _largest(edges, shared_E, grouping.num_groups)


def _own_ports(grouping: Grouping, heads_BD: Ints, queries_per_kv_head: int) -> tuple[Edges, Ints, Floats, Floats]:
    """Edges, the assignment of each, and latency and seconds per token by what a rank's own ports carry."""
    cluster, (num_sets, num_groups) = grouping.cluster, (len(heads_BD), grouping.num_groups)
    edges = ring_edges(grouping, heads_BD, queries_per_kv_head)
    first = edges.starts[::num_groups]
    set_E = np.repeat(np.arange(num_sets), np.append(first[1:], len(edges.heads)) - first)
    pair = cluster.node_of_rank[edges.sender], cluster.node_of_rank[edges.receiver]
    outside_E = pair[0] != pair[1]
    port_s_E = edges.heads * cluster.node_p2p_s_per_byte[pair]
    worst_E = np.zeros(len(port_s_E))
    for rank_E in (edges.sender, edges.receiver):
        port_E = (set_E * cluster.num_ranks + rank_E) * 2 + outside_E
        np.maximum(worst_E, np.bincount(port_E, weights=port_s_E)[port_E], out=worst_E)
    latency_BK = _largest(edges, cluster.node_latency_s[pair], num_groups)
    return edges, set_E, latency_BK, _largest(edges, worst_E, num_groups)


def _largest(edges: Edges, values_E: Floats, num_groups: int) -> Floats:
    """The largest value of the edges into every group, ``[B, K]``."""
    return np.asarray(np.maximum.reduceat(values_E, edges.starts).reshape(-1, num_groups))


def _shared_transfer_s(grouping: Grouping, edges: Edges, set_E: Ints, length_B: Floats) -> Floats:
    """The time that the busiest shared port of every edge needs for all its edges, ``[E]``."""
    cluster = grouping.cluster
    send, receive = cluster.node_of_rank[edges.sender], cluster.node_of_rank[edges.receiver]
    outside_E = send != receive
    amount_E = length_B[set_E] * edges.heads
    shared_E = np.zeros(len(amount_E))
    for node_E, capacity, users_E in (
        (send, cluster.nic_bytes_per_s, outside_E),
        (receive, cluster.nic_bytes_per_s, outside_E),
        (receive, cluster.switch_bytes_per_s, ~outside_E),
    ):
        port_E = set_E * len(cluster.nodes) + node_E
        load_E = np.bincount(port_E, weights=np.where(users_E, amount_E, 0.0))[port_E] / capacity[node_E]
        np.maximum(shared_E, np.where(users_E, load_E, 0.0), out=shared_E)
    return shared_E


def exchange_s(grouping: Grouping, tokens_BD: Floats, bytes_BD: Floats) -> Floats:
    """Transfer time of one all-to-all in every group, without latency, ``[B, K]``.

    Args:
        tokens_BD: s, tokens of every rank.
        bytes_BD: w, bytes per token that every rank receives for its heads.
    """
    part, values_2BD = grouping.node_slices.part_of, np.array([tokens_BD, bytes_BD])
    values_2BN = grouping.node_slices.reduce(np.add, values_2BD)
    tokens_BN, bytes_BN = values_2BN
    # What a rank sends is its tokens of others' bytes, and what it receives its bytes of others' tokens.
    inside_2BD = values_2BD * (values_2BN[::-1, :, part] - values_2BD[::-1])
    worst_BD = inside_2BD.max(axis=0) * grouping.inner_s_per_byte
    if len(grouping.slice_node) > grouping.num_groups:  # some group spans several nodes
        outside_2BD = values_2BD * _elsewhere(grouping, values_2BN[::-1])[..., part]
        np.maximum(worst_BD, outside_2BD.max(axis=0), out=worst_BD)
    time_BK = grouping.by_group(np.maximum, worst_BD)
    if grouping.cluster.shares_ports:
        same_BN = grouping.node_slices.reduce(np.add, tokens_BD * bytes_BD)
        time_BK = np.maximum(time_BK, _shared_exchange_s(grouping, tokens_BN, bytes_BN, same_BN))
    return time_BK


def _elsewhere(grouping: Grouping, amount_N: Floats) -> Floats:
    """Share of a node slice's group in its other slices, times the seconds per byte to get there, ``[..., N]``."""
    source, destination, _, _ = grouping.site_pairs
    s_per_byte, starts, own_s_N = grouping.site_s_per_byte
    amount_S = grouping.sites.reduce(np.add, amount_N)
    weighted_S = np.zeros_like(amount_S)
    weighted_S[..., source[starts]] = np.add.reduceat(amount_S[..., destination] * s_per_byte, starts, axis=-1)
    return np.asarray(weighted_S[..., grouping.sites.part_of] - own_s_N * amount_N)


def _shared_exchange_s(grouping: Grouping, tokens_BN: Floats, bytes_BN: Floats, same_BN: Floats) -> Floats:
    """The same for what a node's ranks share, ``[B, K]``: all groups exchange at once, so their bytes add up."""
    cluster, group, node = grouping.cluster, grouping.slice_group, grouping.slice_node
    all_tokens_BN = np.add.reduceat(tokens_BN, grouping.group_starts, axis=1)[:, group]
    all_bytes_BN = np.add.reduceat(bytes_BN, grouping.group_starts, axis=1)[:, group]
    out_BN = tokens_BN * (all_bytes_BN - bytes_BN)
    into_BN = bytes_BN * (all_tokens_BN - tokens_BN)
    inside_BN = tokens_BN * bytes_BN - same_BN
    nic_bytes = np.maximum(grouping.by_node(np.add, out_BN), grouping.by_node(np.add, into_BN))
    nic_s = nic_bytes / cluster.nic_bytes_per_s
    switch_s = grouping.by_node(np.add, inside_BN) / cluster.switch_bytes_per_s
    time_BN = np.where(out_BN + into_BN > 0, nic_s[:, node], 0.0)
    np.maximum(time_BN, np.where(inside_BN > 0, switch_s[:, node], 0.0), out=time_BN)
    return np.asarray(np.maximum.reduceat(time_BN, grouping.group_starts, axis=1))


LARGE_RING = 256
STEP_TABLE = 1 << 15  # entries of a table of steps that are worked on at once; they stay in the cache


class RingCoefficients(NamedTuple):
    """One pass around the ring, every time linear in the tokens of the block; arrays are ``[B, K]``.

    Attributes:
        slope_s, fixed_s: compute time of a group per token of the block, and per block.
        kv_s, gradient_s: time of a transfer into a group per token of the block, KV and dK/dV; 0 in a forward pass.
        shared_kv_s, shared_gradient_s: least time of those transfers, set by a NIC or switch that others use as well.
    """

    start_s: Floats  # when every group is ready for step 0
    length: Floats  # tokens of every group, which are the block's when it travels
    slope_s: Floats
    fixed_s: Floats
    latency_s: Floats  # start-up of a transfer into a group
    kv_s: Floats
    gradient_s: Floats
    shared_kv_s: Floats
    shared_gradient_s: Floats
    backward: bool  # direction of the ring
    contiguous_causal: bool  # half of the local block, all of earlier blocks and nothing of later ones is computed

    def take(self, rows: Ints) -> RingCoefficients:
        """The coefficients of some assignments."""
        return RingCoefficients._make(each if isinstance(each, bool) else each.take(rows, axis=0) for each in self)


def alone_s(ring: RingCoefficients) -> Floats:
    """When every group would be done if KV were always there, ``[B, K]``; not for contiguous causal groups."""
    whole = np.add.reduce(ring.length, axis=1, keepdims=True)
    return np.asarray(ring.start_s + ring.slope_s * whole + ring.fixed_s * ring.length.shape[1])


def ring_finish_s(ring: RingCoefficients) -> Floats:
    """When the last group is done, ``[B]``.

    Two shortcuts. If even the longest transfer (plus the unevenness of the starts) hides under the shortest step, a
    path through the recurrence that changes groups gains nothing over one that stays with the slowest group: every
    change replaces a compute step by a transfer, and no longer step is left out for it. If all groups are of one length
    in a ring of more than 256, the slowest group's steps decide to within the start and one step, 1/K of the whole.
    """
    num_groups = ring.length.shape[1]
    if ring.contiguous_causal and num_groups > 1:
        return _recurrence(ring)
    largest, least = partial(np.maximum.reduce, axis=1), partial(np.minimum.reduce, axis=1)
    finish_B = largest(alone_s(ring))
    if num_groups == 1:
        return np.asarray(finish_B)
    longest_B, shortest_B = largest(ring.length), least(ring.length)
    step_BK = ring.slope_s * shortest_B[:, None] + ring.fixed_s
    transfer_BK = ring.latency_s + np.maximum(ring.kv_s * longest_B[:, None], ring.shared_kv_s)
    if ring.backward:
        transfer_BK += np.maximum(ring.gradient_s * longest_B[:, None], ring.shared_gradient_s)
    uneven_B = largest(ring.start_s) - least(ring.start_s)
    hidden_B = largest(transfer_BK) + uneven_B <= least(step_BK)
    if hidden_B.all():
        return np.asarray(finish_B)
    if num_groups > LARGE_RING and bool((longest_B == shortest_B).all()):
        slowest_BK = ring.start_s + np.maximum(step_BK, transfer_BK) * (num_groups - 1) + step_BK
        return np.asarray(np.where(hidden_B, finish_B, slowest_BK.max(axis=1)))
    if not hidden_B.any():
        return _recurrence(ring)
    rows = np.flatnonzero(~hidden_B)
    finish_B[rows] = _recurrence(ring.take(rows))
    return np.asarray(finish_B)


def _recurrence(ring: RingCoefficients) -> Floats:
    """The recurrence itself; `now_BK` is a view of an array that is one longer, so that neighbours are a slice."""
    num_sets, num_groups = ring.length.shape
    wrapped = np.empty((num_sets, num_groups + 1))
    if ring.backward:
        now_BK, other_BK, copy, original = wrapped[:, :-1], wrapped[:, 1:], wrapped[:, -1], wrapped[:, 0]
    else:
        now_BK, other_BK, copy, original = wrapped[:, 1:], wrapped[:, :-1], wrapped[:, 0], wrapped[:, -1]
    now_BK[:] = ring.start_s
    arrival_BK = np.empty_like(now_BK)
    for compute_TBK, transfer_TBK in _steps_s(ring):
        for compute_BK, transfer_BK in zip(compute_TBK, transfer_TBK, strict=True):
            copy[:] = original
            np.maximum(now_BK, other_BK, out=arrival_BK)
            np.add(arrival_BK, transfer_BK, out=arrival_BK)
            np.add(now_BK, compute_BK, out=now_BK)
            np.maximum(now_BK, arrival_BK, out=now_BK)
    return np.asarray(np.maximum.reduce(now_BK, axis=1))


def ring_schedule(ring: RingCoefficients) -> tuple[Floats, Floats]:
    """Start of every step and end of the transfer into the group beside it (-inf for none), each ``[steps, B, K]``."""
    now_BK = ring.start_s
    starts, arrivals = [], []
    for compute_TBK, transfer_TBK in _steps_s(ring):
        for compute_BK, transfer_BK in zip(compute_TBK, transfer_TBK, strict=True):
            starts.append(now_BK)
            arrivals.append(np.maximum(now_BK, np.roll(now_BK, -1 if ring.backward else 1, axis=1)) + transfer_BK)
            now_BK = np.maximum(now_BK + compute_BK, arrivals[-1])
    return np.array(starts), np.array(arrivals)


def _steps_s(ring: RingCoefficients) -> Iterator[tuple[Floats, Floats]]:
    """Compute time of every step and time of the transfer meanwhile (-inf for none), ``[T, B, K]``."""
    num_groups = ring.length.shape[1]
    rows = max(1, STEP_TABLE // ring.length.size)
    for first in range(0, num_groups, rows):
        last = min(first + rows, num_groups)
        shift = np.arange(first + 1, last + 2) if ring.backward else -np.arange(first, last + 1)
        kv = slice(0, max(num_groups - 1 - ring.backward - first, 0))
        gradient = slice(0 if first else 1, None) if ring.backward else slice(0, 0)
        visited_TBK = _shifted(ring.length, shift)  # the block of every step, and the one after the last
        block_TBK, next_TBK = visited_TBK[:-1], visited_TBK[1:]
        compute_TBK = ring.slope_s * block_TBK + ring.fixed_s
        kv_TBK = np.maximum(ring.kv_s * next_TBK[kv], ring.shared_kv_s)
        transfer_TBK = np.empty_like(compute_TBK)
        transfer_TBK[:] = -np.inf
        if ring.contiguous_causal:
            work_TK, kv_needed_TK, gradient_needed_TK = _visible(num_groups, shift[:-1], shift[1:])
            compute_TBK *= work_TK[:, None]
            kv_TBK *= kv_needed_TK[kv, None]
            sent_TK = np.zeros((last - first, num_groups), dtype=bool)
            sent_TK[kv] = kv_needed_TK[kv]
            sent_TK[gradient] |= gradient_needed_TK[gradient]
            np.copyto(transfer_TBK, ring.latency_s, where=sent_TK[:, None])
        else:
            transfer_TBK[kv] = transfer_TBK[gradient] = ring.latency_s
        transfer_TBK[kv] += kv_TBK
        if ring.backward:
            gradient_TBK = np.maximum(ring.gradient_s * block_TBK[gradient], ring.shared_gradient_s)
            if ring.contiguous_causal:
                gradient_TBK *= gradient_needed_TK[gradient, None]
            transfer_TBK[gradient] += gradient_TBK
        yield compute_TBK, transfer_TBK


def _visible(num_groups: int, shift: Ints, following: Ints) -> tuple[Floats, Bools, Bools]:
    """Contiguous causal groups see earlier ones and half of themselves; only what they see travels to them.

    Share of the block that is computed, whether the next block is needed, and whether the group one position further
    has added to the block's gradient, each ``[T, K]``.
    """
    position = np.arange(num_groups)
    source_TK, next_TK = (_shifted(position[None], each)[:, 0] for each in (shift, following))
    work_TK = np.where(source_TK == position, 0.5, np.where(source_TK < position, 1.0, 0.0))
    return work_TK, next_TK < position, (source_TK <= position) & (position < num_groups - 1)


def _shifted(length_BK: npt.NDArray[Any], shift_T: Ints) -> npt.NDArray[Any]:
    """``length[b, (p + shift_t) % K]`` as ``[T, B, K]``: rows of a view, since gathering single numbers is slower."""
    num_sets, num_groups = length_BK.shape
    twice = np.concatenate([length_BK, length_BK], axis=1)
    along_set, along = twice.strides
    shape, strides = (num_groups, num_sets, num_groups), (along, along_set, along)
    view: npt.NDArray[Any] = np.ndarray(shape, twice.dtype, twice, 0, strides)
    return np.asarray(view[shift_T % num_groups])


class RingCollective(NamedTuple):
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
        num_ranks = cluster.num_ranks
        inside, between = [_hops_inside(cluster, i) for i in range(len(cluster.nodes))], _hops_between(cluster)
        slowest = max([between[0], *(s_per_byte for s_per_byte, _ in inside)])
        latency_s = between[1] + sum(latency_s for _, latency_s in inside)
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
        num_nodes, (s_per_byte, latency_s) = len(cluster.nodes), _hops_between(cluster)
        return cls(s_per_byte=s_per_byte * (num_nodes - 1) / num_nodes, latency_s=latency_s)


def _hops_inside(cluster: Cluster, i: int) -> tuple[float, float]:
    """Seconds per byte of the hops of a ring in one node, and the latency of all of them."""
    node = cluster.nodes[i]
    size = len(node.devices)
    if size == 1:
        return 0.0, 0.0
    inner = float(cluster.node_p2p_s_per_byte[i, i])
    return max(inner, (size - 1) / float(cluster.switch_bytes_per_s[i])), (size - 1) * node.link.latency_s


def _hops_between(cluster: Cluster) -> tuple[float, float]:
    """Seconds per byte of the slowest hop of a ring between nodes, and the latency of all of them."""
    slowest, latency_s, num_nodes = 0.0, 0.0, len(cluster.nodes)
    for i, node in enumerate(cluster.nodes if num_nodes > 1 else ()):
        peer = (i + 1) % num_nodes
        ports = min(len(node.devices), len(cluster.nodes[peer].devices)) / float(cluster.node_p2p_s_per_byte[i, peer])
        shared = min(float(cluster.nic_bytes_per_s[i]), float(cluster.nic_bytes_per_s[peer]))
        slowest = max(slowest, 1 / min(ports, shared))
        latency_s += float(cluster.node_latency_s[i, peer])
    return slowest, latency_s


HOST_BYTES_PER_S = 20e9  # of one rank's share of the host's memory, read and written by Adam; an assumption
LORA_HOST_SHARE, QUANTIZED_HOST_SHARE, ZERO_3_HOST_SHARE = 1.1, 0.95, 3.5
UNKNOWN_PCIE = (4, 8)  # generation and lanes of a device that is not in the catalogue


def host_bytes_per_s_D(devices: Sequence[DeviceSpec]) -> Floats:
    """Bytes per second of every device to its host, or back, ``[D]``."""
    entries = [CATALOGUE.get(device.name) for device in devices]
    return np.array([pcie_bytes_per_s(*((e.pcie_generation, e.pcie_lanes) if e else UNKNOWN_PCIE)) for e in entries])


def checkpoint_copy_s_D(devices: Sequence[DeviceSpec], model: ModelSpec, workload: Workload) -> Floats:
    """One copy of a layer's checkpointed input per token of every sequence, ``[D]``; 0 where it stays on the device.

    Nothing hides it: transformers copies on the stream that computes.
    """
    if not (workload.activation_checkpointing and workload.offload_activations):
        return np.zeros(len(devices))
    return workload.micro_batch * workload.element_bytes * model.hidden_size / host_bytes_per_s_D(devices)


def host_share(workload: Workload) -> float:
    """Time of the host to launch a layer, over that of a plain one (`Efficiency.layer_host_s`).

    Qwen's README has steps of 256 and 512 tokens that take the same time: 5 ms a layer with LoRA, 7.3 ms with quantized
    weights, 11 ms under ZeRO-3, whose hooks surround every module; a layer is launched four times, twice of these
    backward.
    """
    beside = 0.0
    if workload.adapter_rank:
        beside += LORA_HOST_SHARE + (QUANTIZED_HOST_SHARE if workload.quantization else 0.0)
    if workload.zero_stage == 3:
        beside += ZERO_3_HOST_SHARE
    return 1.0 + beside


def offloaded_step_s_D(devices: Sequence[DeviceSpec], workload: Workload, own_D: Floats) -> Floats:
    """Gradients to the host, Adam there, parameters back, ``[D]``; nothing hides it. ``own_D``: parameters owned."""
    moved_D = own_D * (workload.gradient_bytes + workload.element_bytes)
    stepped_D = own_D * (2 * workload.optimizer_bytes + workload.gradient_bytes + workload.element_bytes)
    return np.asarray(moved_D / host_bytes_per_s_D(devices) + stepped_D / HOST_BYTES_PER_S)
