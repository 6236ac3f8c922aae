"""Time of the host: launches of kernels, copies of checkpoints, and an optimizer that steps in the host's memory.

Dimension key: D ranks.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ds_hetero.cluster.catalogue import CATALOGUE, pcie_bytes_per_s
from ds_hetero.cluster.topology import DeviceSpec
from ds_hetero.common.arrays import Floats
from ds_hetero.cost.workload import Workload
from ds_hetero.models.shapes import ModelSpec

# Bytes per second of one rank's share of the host's memory, read and written by Adam. Chosen, never measured.
HOST_ADAM_BYTES_PER_S = 20e9
# Time of the host to launch a layer beyond a plain one's, in plain ones. From steps of 256 and 512 tokens in Qwen's
# README: see `launch_time_factor`.
LORA_LAUNCH, QUANTIZED_LAUNCH, ZERO_3_LAUNCH = 1.1, 0.95, 3.5
UNKNOWN_PCIE = (4, 8)  # generation and lanes of a device that is not in the catalogue; chosen, never measured


def host_bytes_per_s_D(devices: Sequence[DeviceSpec]) -> Floats:
    """Bytes per second of every device to its host, or back, ``[D]``."""
    return np.array([_pcie_bytes_per_s(device) for device in devices])


def _pcie_bytes_per_s(device: DeviceSpec) -> float:
    entry = CATALOGUE.get(device.name)
    generation, lanes = UNKNOWN_PCIE
    if entry is not None:
        generation, lanes = entry.pcie_generation, entry.pcie_lanes
    return pcie_bytes_per_s(generation, lanes)


def checkpoint_copy_s_D(devices: Sequence[DeviceSpec], model: ModelSpec, workload: Workload) -> Floats:
    """One copy of a layer's checkpointed input per token of every sequence, ``[D]``; 0 where it stays on the device.

    Nothing hides it: transformers copies on the stream that computes.
    """
    if not (workload.activation_checkpointing and workload.offload_activations):
        return np.zeros(len(devices))
    return workload.micro_batch * workload.element_bytes * model.hidden_size / host_bytes_per_s_D(devices)


def launch_time_factor(workload: Workload) -> float:
    """Time of the host to launch a layer, over that of a plain one (`Efficiency.layer_host_s`).

    Qwen's README has steps of 256 and 512 tokens that take the same time: 5 ms a layer with LoRA, 7.3 ms with quantized
    weights, 11 ms under ZeRO-3, whose hooks surround every module; a layer is launched four times, twice of these
    backward.
    """
    extra = 0.0
    if workload.adapter_rank:
        extra += LORA_LAUNCH + (QUANTIZED_LAUNCH if workload.quantization else 0.0)
    if workload.zero_stage == 3:
        extra += ZERO_3_LAUNCH
    return 1.0 + extra


def offloaded_step_s_D(devices: Sequence[DeviceSpec], workload: Workload, owned_D: Floats) -> Floats:
    """Time of an optimizer step on the host, ``[D]``: gradients there, Adam, parameters back; nothing hides it.

    Args:
        owned_D: parameters that every rank owns.
    """
    copied_bytes_D = owned_D * (workload.gradient_bytes + workload.element_bytes)
    # Adam reads and writes its state, reads the gradient, and writes the parameter.
    adam_bytes_D = owned_D * (2 * workload.optimizer_bytes + workload.gradient_bytes + workload.element_bytes)
    return np.asarray(copied_bytes_D / host_bytes_per_s_D(devices) + adam_bytes_D / HOST_ADAM_BYTES_PER_S)
