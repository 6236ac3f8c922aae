"""How the experts of a layer are divided among ranks, and the weights that this takes out of the rest of the model.

Every divided expert is on one rank, with its gradients and optimizer state, which ZeRO neither partitions nor gathers.
Everything else of the model is trained as before: `ds_hetero.cost.terms.trained` counts it without them.

Dimension key: D ranks.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from ds_hetero.cluster.topology import Cluster
from ds_hetero.common.arrays import Floats
from ds_hetero.cost.workload import EXPERT_RULES, Workload
from ds_hetero.errors import PlanError
from ds_hetero.models.shapes import ModelSpec
from ds_hetero.models.trained_weights import expert_adapter_parameters
from ds_hetero.values.splits import share

EQUAL, BY_MEMORY, BY_SPEED = EXPERT_RULES


def expert_weights(experts: str | tuple[float, ...], cluster: Cluster) -> tuple[float, ...]:
    """Return the weight of every rank, in proportion to which it gets experts.

    ``"by_speed"``: rates of matmuls, since the time of experts is that of their matmuls if all are chosen alike.
    ``"by_memory"``: memory for tensors.

    Args:
        experts: one of `EXPERT_RULES`, or a weight for every rank.

    Raises:
        PlanError: there are more or fewer weights than ranks.
    """
    if isinstance(experts, tuple):
        if len(experts) != cluster.num_ranks:
            raise PlanError(
                f"experts has {len(experts)} weights, the cluster {cluster.num_ranks} ranks. Give one weight per rank."
            )
        return experts
    if experts == BY_MEMORY:
        return tuple(float(device.usable_bytes) for device in cluster.devices)
    if experts == BY_SPEED:
        return tuple(device.peak_flops_per_s * device.efficiency.matmul for device in cluster.devices)
    return (1.0,) * cluster.num_ranks


def experts_of_ranks(model: ModelSpec, workload: Workload, cluster: Cluster) -> tuple[int, ...]:
    """Return the experts of a layer that every rank holds. Raises `PlanError`: as `expert_weights`."""
    assert workload.experts is not None
    return share(model.num_experts, expert_weights(workload.experts, cluster))


def share_of_experts_D(model: ModelSpec, workload: Workload, cluster: Cluster) -> Floats:
    """Return the share of a layer's experts that every rank holds, ``[D]``; zeros if they are not divided."""
    if workload.experts is None:
        return np.zeros(cluster.num_ranks)
    return np.array(experts_of_ranks(model, workload, cluster)) / model.num_experts


def without_experts(model: ModelSpec) -> ModelSpec:
    """Return the model whose experts have no weights; routers and shared experts stay."""
    return replace(model, mlp_size=0)


def divided_of_layer(model: ModelSpec, workload: Workload) -> int:
    """Number of weights of a layer that are divided among ranks, the mean if layers differ; 0 if none are."""
    if workload.experts is None:
        return 0
    return model.layer_parameters - without_experts(model).layer_parameters


def divided_adapters_of_layer(model: ModelSpec, workload: Workload) -> int:
    """Number of weights of a layer's adapters that are divided among ranks with their experts; 0 if none are."""
    if workload.experts is None or not workload.adapter_rank:
        return 0
    return expert_adapter_parameters(model, workload.adapter_rank)


def predicts_experts(model: ModelSpec) -> bool:
    """Return True if the cost model knows a model's experts that are divided among ranks."""
    return model.num_experts > 0 and model.recurrent is None


def expect_experts(model: ModelSpec, workload: Workload) -> None:
    """Check that the experts of a model can be divided and predicted. Raises `PlanError`: why they cannot."""
    reason = ""
    if not model.num_experts:
        reason = "has no experts"
    elif model.recurrent is not None:
        reason = "has linear-attention or SSM layers, beside which the messages of experts are not predicted yet"
    elif workload.quantization is not None:
        reason = "would have quantized experts, which are not divided"
    elif workload.data_parallel > 1:
        reason = f"has {workload.data_parallel} replicas, which would have to average their experts"
    elif workload.zero_within:
        reason = "would have shards of ZeRO-3 inside nodes, which is not tried with divided experts"
    elif workload.offload_optimizer or workload.offload_parameters:
        reason = "would have its states in the host's memory, and those of divided experts are not offloaded"
    if reason:
        raise PlanError(f"experts are to be divided among the ranks, but {model.name} {reason}. Leave --experts out.")
