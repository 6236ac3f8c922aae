"""Memory of the host: bytes that offloads put there, and bytes that stay on devices which share it.

Dimension key: D ranks.
"""

from __future__ import annotations

import numpy as np

from ds_hetero.cluster.topology import Cluster
from ds_hetero.common.arrays import Floats
from ds_hetero.cost.terms.host import kept_token_bytes
from ds_hetero.cost.terms.memory_parts import MemoryParts
from ds_hetero.cost.terms.model_states import owned_share_D
from ds_hetero.cost.terms.trained import trained_parameters, weight_bytes
from ds_hetero.cost.workload import Workload
from ds_hetero.models.shapes import ModelSpec

# Share of a host's memory that offloads can use. In ALST's longest sequences (arXiv:2506.13996) checkpoints and
# optimizer state take 1.1 to 1.5 TB of 1.9 TB; the system, data loaders and copies in progress use the rest.
USABLE_HOST_FRACTION = 0.68


def host_bytes_of_nodes(cluster: Cluster, model: ModelSpec, work: Workload, tokens_D: Floats) -> Floats:
    """Return the offloaded bytes on the host of every node, ``[nodes]``; devices that share its memory offload none."""
    bytes_D = np.where(cluster.shares_host_memory, 0.0, _offloaded(cluster, model, work, tokens_D).total)
    of_node = np.bincount(cluster.node_of_rank, weights=bytes_D, minlength=len(cluster.nodes))
    return np.asarray(of_node, dtype=np.float64)


def stays_on_device(cluster: Cluster, model: ModelSpec, work: Workload, tokens_D: Floats) -> MemoryParts:
    """Return offloaded bytes that stay on devices since they share their host's memory, ``[..., D]``; else 0."""
    if not cluster.shares_host_memory.any():
        return MemoryParts()
    parts = _offloaded(cluster, model, work, tokens_D).items()
    return MemoryParts(**{name: np.where(cluster.shares_host_memory, size, 0.0) for name, size in parts})


def _offloaded(cluster: Cluster, model: ModelSpec, work: Workload, tokens_D: Floats) -> MemoryParts:
    """Return the bytes that every rank offloads: checkpoints of layers; optimizer state with gradients; parameters."""
    owned_D = owned_share_D(work, cluster)
    activations_D: Floats | float = 0.0
    if work.activation_checkpointing and work.offload_activations:
        bytes_per_token = model.num_layers * model.hidden_size * work.element_bytes
        if work.keeps_attention:
            bytes_per_token += model.attention_layers * kept_token_bytes(model, work)
        activations_D = tokens_D * (bytes_per_token * work.micro_batch)
    bytes_per_parameter = 0.0
    if work.offload_optimizer:
        bytes_per_parameter = work.optimizer_bytes + work.gradient_bytes
    all_weights = weight_bytes(model, work) if work.offload_parameters else 0.0
    weight_share_D = owned_D if work.zero_stage == 3 else np.ones_like(owned_D)
    return MemoryParts(
        activations=activations_D,
        optimizer_state=owned_D * trained_parameters(model, work) * bytes_per_parameter,
        weights=all_weights * weight_share_D,
    )
