"""Model states under ZeRO: bytes of weights, gradients and optimizer state that every rank holds, or saves to disk.

Dimension key: D ranks.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ds_hetero.cluster.topology import Cluster
from ds_hetero.common.arrays import Floats
from ds_hetero.cost.terms.expert_shares import divided_adapters_of_layer, divided_of_layer, share_of_experts_D
from ds_hetero.cost.terms.memory_parts import MemoryParts
from ds_hetero.cost.terms.trained import ADAPTER_BYTES, trained_parameters, weight_bytes
from ds_hetero.cost.workload import Workload
from ds_hetero.models.shapes import ModelSpec

FP32_BYTES = 4
# Temporaries per parameter of torch's optimizers on GPUs, which step all tensors at once (``foreach``): one list of
# fp32 tensors, as torch's documentation of ``foreach`` says. On CPUs they step one tensor after the other.
_FOREACH_BYTES = 4


def static_bytes(model: ModelSpec, workload: Workload, cluster: Cluster) -> Floats:
    """Bytes of parameters, gradients and optimizer state that every rank keeps, ``[D]``.

    ZeRO (arXiv:1910.02054, section 3): stage 1 partitions the optimizer state, stage 2 the gradients too, stage 3 the
    parameters too, each over all ranks of all replicas; see `owned_share_D`. Experts that are divided among ranks
    are counted where they live.
    """
    of_rest = np.asarray(sum(state_bytes(model, workload, cluster).values()))
    return of_rest + DividedExperts.of(model, workload, cluster).gradients_D


def state_bytes(model: ModelSpec, workload: Workload, cluster: Cluster) -> dict[str, Floats]:
    """Return the parts of `static_bytes`: ``optimizer_state``, ``gradients`` and ``weights``, each ``[D]``.

    Gradients of divided experts are left out, since ZeRO does not hold them: see `DividedExperts`.
    """
    of_experts = DividedExperts.of(model, workload, cluster).by_part | {"gradients": np.zeros(cluster.num_ranks)}
    owned_D, all_D = owned_share_D(workload, cluster), np.ones(cluster.num_ranks)
    of_state = {}
    for name, partitioned_from, size in _bytes_from_stage(model, workload):
        share_D = owned_D if workload.zero_stage >= partitioned_from else all_D
        of_state[name] = np.asarray(size * share_D + of_experts[name])
    return of_state


@dataclass(frozen=True, kw_only=True, slots=True)
class DividedExperts:
    """Bytes of the experts that every rank holds alone, ``[D]``; zeros if experts are not divided among ranks.

    An optimizer of torch steps them, see `ds_hetero.frameworks.deepspeed.experts.optimizer`: gradients add up in fp32,
    and weights of 16 bits have fp32 masters. Weights of fp32 are their own masters, also in ZeRO 1 to 3. Beside
    adapters experts are frozen; adapters on experts are divided with them.
    """

    parameters_D: Floats  # number of weights, without adapters
    weights_D: Floats
    gradients_D: Floats
    optimizer_D: Floats
    step_D: Floats  # temporaries of the step

    @classmethod
    def of(cls, model: ModelSpec, workload: Workload, cluster: Cluster) -> DividedExperts:
        """Count the bytes for a model and a workload on a cluster."""
        share_D = share_of_experts_D(model, workload, cluster)
        parameters_D = model.num_layers * divided_of_layer(model, workload) * share_D
        adapters_D = model.num_layers * divided_adapters_of_layer(model, workload) * share_D
        # Without ``adapter_rank`` bytes of gradients are averages over all weights.
        trained_share = 0.0 if workload.adapter_rank else min(workload.gradient_bytes / workload.element_bytes, 1.0)
        trained_D = parameters_D * (trained_share > 0)
        optimizer_bytes = adapter_optimizer_bytes = workload.optimizer_bytes
        if workload.element_bytes >= FP32_BYTES and workload.zero_stage:
            optimizer_bytes = max(optimizer_bytes - trained_share * FP32_BYTES, 0.0)
            adapter_optimizer_bytes = max(adapter_optimizer_bytes - FP32_BYTES, 0.0)
        foreach_bytes = 0 if workload.buffers.optimizer_bytes else _FOREACH_BYTES
        return cls(
            parameters_D=parameters_D,
            weights_D=parameters_D * workload.element_bytes + adapters_D * ADAPTER_BYTES,
            gradients_D=(trained_D * trained_share + adapters_D) * FP32_BYTES,
            optimizer_D=trained_D * optimizer_bytes + adapters_D * adapter_optimizer_bytes,
            step_D=(trained_D * trained_share + adapters_D) * foreach_bytes,
        )

    @property
    def by_part(self) -> dict[str, Floats]:
        """The bytes by the name that they have in `MemoryParts`."""
        return {
            "optimizer_state": self.optimizer_D,
            "gradients": self.gradients_D,
            "weights": self.weights_D,
            "step": self.step_D,
        }


def partitioned_bytes(model: ModelSpec, workload: Workload) -> float:
    """Bytes of all partitions together of the model states that ZeRO partitions; offloaded states are left out."""
    return sum(size for _, stage, size in _bytes_from_stage(model, workload) if stage <= workload.zero_stage)


def partitioned_parts(parts: MemoryParts, workload: Workload, experts: DividedExperts | None = None) -> Floats:
    """Bytes of a rank's ZeRO partitions in one phase, ``[D]``: the part of its memory that grows with its weight.

    Args:
        experts: states in ``parts`` that ZeRO does not partition; None if there are none. Of a phase in which they are
            only in part there, they are taken off whole, so that a partition is rather too small than too large.
    """
    partitioned_from = {"optimizer_state": 1, "gradients": 2, "weights": 3, "step": 1}
    names = [name for name, stage in partitioned_from.items() if stage <= workload.zero_stage]
    if experts is None:
        return np.asarray(sum(getattr(parts, name) for name in names))
    of_experts = experts.by_part
    # Not below 0: in some phases a part of the experts' states is not there.
    of_rest = (np.maximum(getattr(parts, name) - of_experts[name], 0.0) for name in names)
    return np.asarray(sum(of_rest))


def owned_share_D(workload: Workload, cluster: Cluster) -> Floats:
    """Share of the model states that every rank of a replica owns under ZeRO, ``[D]``.

    The shares of all ranks of all replicas sum to 1; with ``zero_within`` those of each node's ranks do. Ranks of a
    replica own in proportion to ``zero_weights``, or equal shares if there are none.
    """
    weights_D = np.ones(cluster.num_ranks) if workload.zero_weights is None else np.array(workload.zero_weights)
    total_D = weights_D.sum() * workload.data_parallel
    if workload.zero_within:
        total_D = np.bincount(cluster.node_of_rank, weights=weights_D)[cluster.node_of_rank]
    return np.asarray(weights_D / total_D)


def _bytes_from_stage(model: ModelSpec, workload: Workload) -> tuple[tuple[str, int, float], ...]:
    """List the model states: name, first ZeRO stage that partitions them, and bytes on devices before partitioning."""
    trained = trained_parameters(model, workload)
    return (
        ("optimizer_state", 1, 0.0 if workload.offload_optimizer else trained * workload.optimizer_bytes),
        ("gradients", 2, trained * workload.gradient_bytes),
        ("weights", 3, 0.0 if workload.offload_parameters else weight_bytes(model, workload)),
    )


def saved_bytes(cluster: Cluster, model: ModelSpec, work: Workload) -> Floats:
    """Bytes that every rank writes when an elastic job saves, ``[D]``.

    A rank writes the optimizer state that it owns, and rank 0 also the trained parameters. Measured files are some 60
    KB larger (tests/integration/elastic/test_saved.py).
    """
    trained = trained_parameters(model, work)
    bytes_D = np.zeros(cluster.num_ranks)
    if work.zero_stage:
        bytes_D = bytes_D + owned_share_D(work, cluster) * trained * work.optimizer_bytes
    if work.zero_stage < 3:
        rank_0_optimizer_bytes = 0 if work.zero_stage else work.optimizer_bytes
        bytes_D[0] += trained * (work.element_bytes + rank_0_optimizer_bytes)
    return bytes_D
