"""Time of copies between devices and the memory of their host, over the cards' own slots.

Dimension key: D ranks.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ds_hetero.cluster.catalogue import CATALOGUE, pcie_bytes_per_s
from ds_hetero.cluster.device import DeviceSpec
from ds_hetero.common.arrays import Floats
from ds_hetero.cost.workload import Workload
from ds_hetero.models.shapes import ModelSpec

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
