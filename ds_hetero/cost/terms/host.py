"""Time that the host takes: kernel launches, copies of offloaded checkpoints, and steps of an offloaded optimizer.

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

# Bytes per second at which Adam reads and writes the host's memory, for each rank. Chosen, never measured.
HOST_ADAM_BYTES_PER_S = 20e9
# Launch time that a feature adds to a layer, as a multiple of a plain layer's. From steps of 256 and 512 tokens in
# Qwen's README: see `launch_time_factor`.
LORA_LAUNCH, QUANTIZED_LAUNCH, ZERO_3_LAUNCH = 1.1, 0.95, 3.5
_LOG_SUM_EXP_BYTES = 4  # of one query: it is in fp32
UNKNOWN_PCIE = (4, 8)  # generation and lanes of a device that is not in the catalogue; chosen, never measured


def host_bytes_per_s_D(devices: Sequence[DeviceSpec]) -> Floats:
    """Return the PCIe rate between every device and its host in one direction, in bytes per second, ``[D]``."""
    return np.array([_pcie_bytes_per_s(device) for device in devices])


def _pcie_bytes_per_s(device: DeviceSpec) -> float:
    """Return the PCIe rate of one device in one direction, from the catalogue or for `UNKNOWN_PCIE`."""
    entry = CATALOGUE.get(device.name)
    generation, lanes = UNKNOWN_PCIE
    if entry is not None:
        generation, lanes = entry.pcie_generation, entry.pcie_lanes
    return pcie_bytes_per_s(generation, lanes)


def checkpoint_copy_s_D(
    devices: Sequence[DeviceSpec], model: ModelSpec, workload: Workload, *, recurrent: bool = False
) -> Floats:
    """Seconds per token to copy a layer's checkpoint to the host or back, ``[D]``; 0 if it is not offloaded.

    The checkpoint is the input of the layer and, if it stays, the attention of an attention layer. A token stands for
    one position of all sequences of the micro-batch. Nothing hides the copy, since transformers copies on the stream
    that computes.

    Args:
        recurrent: of a linear-attention or SSM layer.
    """
    if not (workload.activation_checkpointing and workload.offload_activations):
        return np.zeros(len(devices))
    token_bytes = workload.element_bytes * model.hidden_size
    if workload.keeps_attention and not recurrent:
        token_bytes += kept_token_bytes(model, workload)
    return workload.micro_batch * token_bytes / host_bytes_per_s_D(devices)


def kept_token_bytes(model: ModelSpec, workload: Workload) -> int:
    """Return the bytes per token that stay of an attention layer, on average over the ranks of an all-to-all group.

    These are q, k, v, both outputs and the log-sum-exp, with a visiting KV block as long as the rank's own: an upper
    bound for a rank that shares no heads, of which `ds_hetero.cost.terms.layer_memory` has the exact bytes.
    """
    heads = 3 * model.num_heads + 4 * model.num_kv_heads
    return workload.element_bytes * model.head_dim * heads + _LOG_SUM_EXP_BYTES * model.num_heads


def launch_time_factor(workload: Workload) -> float:
    """Time of the host to launch a layer, as a multiple of a plain layer's (`Efficiency.layer_host_s`).

    In Qwen's README steps of 256 and of 512 tokens take the same time, so launches bound them: 5 ms a layer with LoRA,
    7.3 ms with quantized weights, 11 ms under ZeRO-3, whose hooks surround every module. A step launches a layer
    forward twice, since it is recomputed, and backward, which counts as two launches.
    """
    extra = 0.0
    if workload.adapter_rank:
        extra += LORA_LAUNCH + (QUANTIZED_LAUNCH if workload.quantization else 0.0)
    if workload.zero_stage == 3:
        extra += ZERO_3_LAUNCH
    return 1.0 + extra


def offloaded_step_s_D(devices: Sequence[DeviceSpec], workload: Workload, owned_D: Floats) -> Floats:
    """Return the time of an optimizer step on the host, ``[D]``: copy gradients there, run Adam, copy parameters back.

    Nothing hides this time.

    Args:
        owned_D: number of parameters whose optimizer state every rank owns.
    """
    copied_bytes_D = owned_D * (workload.gradient_bytes + workload.element_bytes)
    # Adam reads and writes its state, reads the gradient, and writes the parameter.
    adam_bytes_D = owned_D * (2 * workload.optimizer_bytes + workload.gradient_bytes + workload.element_bytes)
    return np.asarray(copied_bytes_D / host_bytes_per_s_D(devices) + adam_bytes_D / HOST_ADAM_BYTES_PER_S)
