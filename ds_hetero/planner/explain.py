"""Sentences about schedules: what one is, why another was not chosen, why none fits."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ds_hetero.cluster.topology import Cluster
from ds_hetero.cost.model import CostModel
from ds_hetero.cost.prediction import Prediction
from ds_hetero.planner.planned import Rejected
from ds_hetero.planner.search.memory_fit import longest_of_assignment
from ds_hetero.values.schedule import Schedule

AS_FAST = 1.0005  # times this close are the same in a table


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


def does_not_fit(cost: CostModel, predictions: Sequence[Prediction]) -> str:
    """By how much the best attempt misses, on which rank, and what would fit."""
    work = cost.workload

    def excess(prediction: Prediction) -> float:
        return float((np.array(prediction.memory_bytes) - cost.capacity_bytes_D).max())

    nearest = min(predictions, key=excess)
    longest = longest_of_assignment(cost)
    remedies = [f"sequences of up to about {longest} tokens"] if longest else []
    if work.zero_stage < 3:
        remedies.append("zero_stage=3")
    if not work.activation_checkpointing:
        remedies.append("activation checkpointing")
    if not work.tiled_logits:
        remedies.append("a tiled loss")
    if not work.tiled_mlp:
        remedies.append('MLPs in tiles ("tile_tokens")')
    if work.micro_batch > 1:
        remedies.append("micro_batch=1")
    remedies.append("more or larger devices")
    return (
        f"no schedule of {cost.model.name} with {work.seq_len} tokens fits on {cost.cluster.num_ranks} devices. "
        f"At the nearest one {nearest.reason}. What would fit or help: {', '.join(remedies)}."
    )
