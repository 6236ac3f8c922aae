"""Sentences about schedules: what one is, why another was not chosen, why none fits."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ds_hetero.cluster.topology import Cluster
from ds_hetero.common.arrays import Floats
from ds_hetero.cost.model import CostModel
from ds_hetero.cost.prediction import Prediction
from ds_hetero.cost.terms.memory import MemoryParts
from ds_hetero.planner.planned import Rejected, ScheduleCandidate
from ds_hetero.planner.search.memory_fit import longest_of_assignment
from ds_hetero.values.schedule import Schedule

AS_FAST = 1.0005  # times this close are the same in a table
_WORTH = 0.1  # of the missing memory: a change that saves less is not named


def idle_ranks(schedule: Schedule) -> tuple[int, ...]:
    """Ranks that get neither tokens nor heads, group after group."""
    return tuple(
        rank
        for group in schedule.groups
        for rank, tokens, heads in zip(group.ranks, group.tokens, group.heads, strict=True)
        if not tokens + heads
    )


def describe(schedule: Schedule, cluster: Cluster) -> str:
    """A schedule in a line: ``ring of 3 groups: 2 x (1 H100-SXM-80GB + 3 L40S), 8 A100-SXM-80GB``."""
    idle = idle_ranks(schedule)
    makeups: dict[str, int] = {}
    for group in schedule.ring_groups:
        names = [cluster.devices[rank].name for rank in group.ranks if rank not in idle]
        counts = {name: names.count(name) for name in dict.fromkeys(names)}
        makeup = " + ".join(f"{count} {name}" for name, count in counts.items())
        makeups[makeup] = makeups.get(makeup, 0) + 1
    listed = ", ".join(f"{count} x ({makeup})" if count > 1 else makeup for makeup, count in makeups.items())
    shape = "one group" if schedule.ring_size == 1 else f"ring of {schedule.ring_size} groups"
    return f"{shape}: {listed}" + (f"; {len(idle)} idle" if idle else "")


def compared(name: str, prediction: Prediction, best: Prediction) -> Rejected:
    """The candidate ``name`` with the reason why the one of prediction ``best`` is preferred."""
    if not prediction.feasible:
        reason = f"does not fit: {prediction.reason}"
    else:
        reason = f"{slower_text(prediction.iteration_s / best.iteration_s)}; {prediction.bottleneck.text}"
    return Rejected(name=name, prediction=prediction, reason=reason)


def slower_text(times: float) -> str:
    """How a candidate that takes ``times`` the time of the best one compares with it."""
    if times < AS_FAST:
        return "as fast"
    return f"{100 * (times - 1):.1f} % slower" if times < 2 else f"takes {times:.1f} times as long"


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
    remedies += _remedies(cost, parts, _WORTH * float(over_D.max()))
    return (
        f"no schedule of {cost.model.name} with {work.seq_len} tokens fits on {cost.cluster.num_ranks} devices. "
        f"At the nearest one {nearest.prediction.reason}. What would fit or help: "
        f"{', '.join((*remedies, 'more or larger devices'))}."
    )


def _remedies(cost: CostModel, parts: MemoryParts, least: float) -> list[str]:
    """Changes by the names that ``fit`` gives them, those first that save the most.

    Args:
        cost: of the training that does not fit.
        parts: memory of the rank that misses by most.
        least: bytes that a change has to be able to save.
    """
    work = cost.workload
    states = parts.weights + parts.gradients + parts.optimizer_state
    saved = {
        "tiled loss": 0.0 if work.tiled_logits else parts.logits,
        "tiled MLP and loss": 0.0 if work.tiled_mlp else parts.layer + (0.0 if work.tiled_logits else parts.logits),
        "activation checkpointing": 0.0 if work.activation_checkpointing else parts.activations,
        "activation offload": 0.0 if work.offload_activations else parts.activations,
        "ZeRO stage 3": states if work.zero_stage < 3 else 0.0,
        "optimizer offload": 0.0 if work.offload_optimizer or not work.zero_stage else parts.optimizer_state,
        "smaller gradient buckets": parts.bucket if work.zero_stage else 0.0,
        "one sequence per micro-batch": parts.activations + parts.logits if work.micro_batch > 1 else 0.0,
    }
    by_size = sorted(saved.items(), key=lambda item: -item[1])
    return [name for name, size in by_size if size and size >= least]
