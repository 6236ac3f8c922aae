"""Model states under ZeRO: bytes of weights, gradients and optimizer state that every rank holds, or saves to disk.

Dimension key: D ranks.
"""

from __future__ import annotations

import numpy as np

from ds_hetero.cluster.topology import Cluster
from ds_hetero.common.arrays import Floats
from ds_hetero.cost.terms.memory_parts import MemoryParts
from ds_hetero.cost.terms.trained import trained_parameters, weight_bytes
from ds_hetero.cost.workload import Workload
from ds_hetero.models.shapes import ModelSpec


def static_bytes(model: ModelSpec, workload: Workload, cluster: Cluster) -> Floats:
    """Bytes of parameters, gradients and optimizer state that every rank keeps, ``[D]``.

    ZeRO (arXiv:1910.02054, section 3): stage 1 partitions the optimizer state, stage 2 the gradients too, stage 3 the
    parameters too, each over all ranks of all replicas; see `owned_share_D`.
    """
    return np.asarray(sum(state_bytes(model, workload, cluster).values()))


def state_bytes(model: ModelSpec, workload: Workload, cluster: Cluster) -> dict[str, Floats]:
    """The parts of `static_bytes`: ``optimizer_state``, ``gradients`` and ``weights``, each ``[D]``."""
    owned_D, all_D = owned_share_D(workload, cluster), np.ones(cluster.num_ranks)
    of_state = {}
    for name, partitioned_from, size in _bytes_from_stage(model, workload):
        share_D = owned_D if workload.zero_stage >= partitioned_from else all_D
        of_state[name] = np.asarray(size * share_D)
    return of_state


def partitioned_bytes(model: ModelSpec, workload: Workload) -> float:
    """Bytes of all partitions together of the model states that ZeRO partitions; offloaded states are left out."""
    return sum(size for _, stage, size in _bytes_from_stage(model, workload) if stage <= workload.zero_stage)


def partitioned_parts(parts: MemoryParts, workload: Workload) -> Floats:
    """Bytes of a rank's ZeRO partitions in one phase, ``[D]``: the part of its memory that grows with its weight."""
    partitioned_from = {"optimizer_state": 1, "gradients": 2, "weights": 3, "step": 1}
    names = [name for name, stage in partitioned_from.items() if stage <= workload.zero_stage]
    return np.asarray(sum(getattr(parts, name) for name in names))


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
