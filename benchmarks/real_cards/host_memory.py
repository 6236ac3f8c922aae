"""Memory of the hosts: what offloads put there."""

from __future__ import annotations

import numpy as np

from ds_hetero.cluster.topology import Cluster
from ds_hetero.common.arrays import Floats
from ds_hetero.cost.terms.layer_memory import trained_parameters, weight_bytes
from ds_hetero.cost.workload import Workload
from ds_hetero.models.shapes import ModelSpec

HOST_SHARE = 0.68
"""Share of a host's memory that offloads can use: ALST's longest sequences (arXiv:2506.13996) end where checkpoints
and optimizer state take 1.1 to 1.5 TB of 1.9. The rest is the system's, the data
loaders', and copies of what is under way."""


def host_bytes_of_nodes(cluster: Cluster, model: ModelSpec, work: Workload, tokens_D: Floats) -> Floats:
    """Bytes on the host of every node: offloaded checkpoints of all layers, optimizer state, parameters."""
    bytes_D = np.zeros(cluster.num_ranks)
    if work.activation_checkpointing and work.offload_activations:
        bytes_D += work.micro_batch * tokens_D * model.num_layers * model.hidden_size * work.element_bytes
    weights_D = np.ones(cluster.num_ranks) if work.zero_weights is None else np.array(work.zero_weights)
    share_D = weights_D / weights_D.sum() / work.data_parallel
    if work.offload_optimizer:
        bytes_D += share_D * trained_parameters(model, work) * (work.optimizer_bytes + work.gradient_bytes)
    if work.offload_parameters:
        bytes_D += (share_D if work.zero_stage == 3 else 1.0) * weight_bytes(model, work)
    return np.asarray(
        np.bincount(cluster.node_of_rank, weights=bytes_D, minlength=len(cluster.nodes)), dtype=np.float64
    )
