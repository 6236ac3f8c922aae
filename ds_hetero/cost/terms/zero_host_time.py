"""Time of ZeRO's collectives: parameters gathered, gradients reduced, over all ranks of the cluster.

Time of the host: to launch a layer, to step what it holds, and to copy over the cards' own slots.

Dimension key: D ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ds_hetero.cluster.catalogue import CATALOGUE, pcie_bytes_per_s
from ds_hetero.cluster.topology import Cluster, DeviceSpec
from ds_hetero.common.arrays import Floats
from ds_hetero.cost.workload import Workload
from ds_hetero.models.shapes import ModelSpec


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
    """Gradients to the host, Adam there, parameters back, ``[D]``; nothing hides it.

    Args:
        devices: by rank.
        workload: with its bytes.
        own_D: trained parameters whose optimizer state a rank owns.
    """
    moved_D = own_D * (workload.gradient_bytes + workload.element_bytes)
    stepped_D = own_D * (2 * workload.optimizer_bytes + workload.gradient_bytes + workload.element_bytes)
    return np.asarray(moved_D / host_bytes_per_s_D(devices) + stepped_D / HOST_BYTES_PER_S)
