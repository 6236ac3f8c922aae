"""The message that no schedule fits: by how much the best attempt misses, on which rank, and what would fit."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ds_hetero.common.arrays import Floats
from ds_hetero.cost.model import CostModel
from ds_hetero.cost.terms.memory_parts import MemoryParts
from ds_hetero.planner.results.candidates import ScheduleCandidate
from ds_hetero.planner.search.memory_fit import longest_of_assignment

# Share of the missing memory that a change has to save to be named. Chosen, never measured.
LEAST_SAVING = 0.1


def does_not_fit(cost: CostModel, candidates: Sequence[ScheduleCandidate]) -> str:
    """By how much the best attempt misses, on which rank, and what would fit."""
    work = cost.workload

    def excess_D(candidate: ScheduleCandidate) -> Floats:
        return np.asarray(candidate.prediction.memory_bytes) - cost.capacity_bytes_D

    nearest = min(candidates, key=lambda candidate: float(excess_D(candidate).max()))
    over_D = excess_D(nearest)
    parts = cost.memory_parts(*cost.arrays(nearest.schedule)).of_rank(int(over_D.argmax()))
    longest = longest_of_assignment(cost)
    remedies = [f"sequences of up to about {longest} tokens"] if longest else []
    offloads = not cost.cluster.devices[int(over_D.argmax())].shares_host_memory
    remedies += _remedies(cost, parts, LEAST_SAVING * float(over_D.max()), offloads=offloads)
    return (
        f"no schedule of {cost.model.name} with {work.seq_len} tokens fits on {cost.cluster.num_ranks} devices. "
        f"At the nearest one {nearest.prediction.reason}. What would fit or help: "
        f"{', '.join((*remedies, 'more or larger devices'))}."
    )


def _remedies(cost: CostModel, parts: MemoryParts, least: float, *, offloads: bool) -> list[str]:
    """Changes by the names that ``fit`` gives them, those first that save the most.

    Args:
        least: bytes that a change has to be able to save.
        offloads: what is offloaded leaves the memory of that rank.
    """
    work = cost.workload
    states = parts.weights + parts.gradients + parts.optimizer_state
    may_step_there = offloads and work.zero_stage > 0 and not work.offload_optimizer
    by_tiled_loss = 0.0 if work.tiled_logits else parts.logits
    saved = {
        "tiled loss": by_tiled_loss,
        "tiled MLP and loss": 0.0 if work.tiled_mlp else parts.layer + by_tiled_loss,
        "activation checkpointing": 0.0 if work.activation_checkpointing else parts.activations,
        "activation offload": parts.activations if offloads and not work.offload_activations else 0.0,
        "ZeRO stage 3": states if work.zero_stage < 3 else 0.0,
        "optimizer offload": parts.optimizer_state if may_step_there else 0.0,
        "smaller gradient buckets": parts.bucket if work.zero_stage else 0.0,
        "one sequence per micro-batch": parts.activations + parts.logits if work.micro_batch > 1 else 0.0,
    }
    by_size = sorted(saved.items(), key=lambda item: -item[1])
    return [name for name, size in by_size if size and size >= least]
