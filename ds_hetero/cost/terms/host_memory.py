"""Memory of the host: what offloads put there, or leave on devices that share it.

Dimension key: D ranks.
"""

from __future__ import annotations

import numpy as np

from ds_hetero.cluster.topology import Cluster
from ds_hetero.common.arrays import Floats
from ds_hetero.cost.terms.memory_parts import MemoryParts
from ds_hetero.cost.terms.model_states import owned_share_D
from ds_hetero.cost.terms.trained import trained_parameters, weight_bytes
from ds_hetero.cost.workload import Workload
from ds_hetero.models.shapes import ModelSpec

USABLE_HOST_FRACTION = 0.68
"""Share of a host's memory that offloads can use: ALST's longest sequences (arXiv:2506.13996) end where checkpoints
and optimizer state take 1.1 to 1.5 TB of 1.9. The rest is the system's, the data
loaders', and copies of what is under way."""


def host_bytes_of_nodes(cluster: Cluster, model: ModelSpec, work: Workload, tokens_D: Floats) -> Floats:
    """Bytes on the host of every node, of devices whose memory is another one, ``[nodes]``."""
    bytes_D = np.where(cluster.shares_host_memory, 0.0, _offloaded(cluster, model, work, tokens_D).total)
    return np.asarray(
        np.bincount(cluster.node_of_rank, weights=bytes_D, minlength=len(cluster.nodes)), dtype=np.float64
    )


def stays_on_device(cluster: Cluster, model: ModelSpec, work: Workload, tokens_D: Floats) -> MemoryParts:
    """Offloaded bytes of devices whose memory is their host's; leading dimensions of ``tokens_D`` are kept."""
    if not cluster.shares_host_memory.any():
        return MemoryParts()
    parts = _offloaded(cluster, model, work, tokens_D).items()
    return MemoryParts(**{name: np.where(cluster.shares_host_memory, size, 0.0) for name, size in parts})


def _offloaded(cluster: Cluster, model: ModelSpec, work: Workload, tokens_D: Floats) -> MemoryParts:
    """Bytes that offloads move: checkpoints of all layers; optimizer state with gradients; parameters."""
    share_D = owned_share_D(work, cluster)
    checkpoint = model.num_layers * model.hidden_size * work.element_bytes * work.micro_batch
    is_kept = work.activation_checkpointing and work.offload_activations
    per_parameter = (work.optimizer_bytes + work.gradient_bytes) if work.offload_optimizer else 0
    held = weight_bytes(model, work) if work.offload_parameters else 0.0
    return MemoryParts(
        activations=tokens_D * checkpoint if is_kept else 0.0,
        optimizer_state=share_D * trained_parameters(model, work) * per_parameter,
        weights=held * (share_D if work.zero_stage == 3 else np.ones_like(share_D)),
    )
