"""Where the layers of running pipelines shall be when another cut is predicted to be faster.

Other batches of the ranks, where each takes whole samples: as many as it computes in the time of the others.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from ds_hetero.common.reading import MAX_STEPS, JsonDict
from ds_hetero.decision.batches import balanced_batches
from ds_hetero.job.job_times import JobTimes
from ds_hetero.job.pipeline_times import MeasuredPipeline
from ds_hetero.planner.replan.stage_layers import PipelineSpeeds, StageSpeed, best_layers, pipeline_s, with_layers
from ds_hetero.values.plans import BatchSplit, Plan
from ds_hetero.values.section import HeterogeneitySection


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerChange:
    """One change of layers in a running job."""

    step: int  # optimizer steps of this process before it
    layers: tuple[tuple[int, ...], ...]  # by pipeline and stage
    gain: float  # share of the passes' time that it is predicted to save
    event: ClassVar[str] = "layers moved"

    def applied_to(self, plan: Plan) -> Plan:
        """The plan with these layers."""
        return with_layers(plan, self.layers)

    def __str__(self) -> str:
        shares = " | ".join("+".join(map(str, own)) for own in self.layers)
        return f"layers move, predicted to save {self.gain:.1%} of the passes: {shares}"

    def to_dict(self) -> JsonDict:
        """For ``run.json``."""
        return {"step": self.step, "layers": [list(own) for own in self.layers], "gain": self.gain}


class LayerSearch:
    """Looks for other layers of the stages of pipelines; on rank 0.

    A change takes two observations in a row that ask for one: the first may lie half before the speeds moved.

    Args:
        min_gain: share of the passes' time that a change must be predicted to save.
    """

    def __init__(self, min_gain: float) -> None:
        self._min_gain = min_gain
        self._asked = False

    def propose(self, step: int, plan: Plan, seen: JobTimes) -> Sequence[LayerChange]:
        """See `ds_hetero.job.replanning.PlanSearch`."""
        change, asked = best_layer_change(step, plan, seen), self._asked
        is_gain = change.gain > 0 and change.gain >= self._min_gain
        self._asked = is_gain and not asked
        return [change] if is_gain and asked else []

    def predicted_gain(self, plan: Plan, seen: JobTimes) -> float | None:
        """See `ds_hetero.job.replanning.PlanSearch`."""
        return best_layer_change(0, plan, seen).gain


def best_layer_change(step: int, plan: Plan, seen: JobTimes) -> LayerChange:
    """Return the layers with which the pipelines are predicted to be fastest. ``plan``: that the steps ran under."""
    before_s = after_s = 0.0
    layers = []
    for pipeline, times in zip(plan.pipelines, seen.pipelines, strict=True):
        own = tuple(stage.num_layers or 0 for stage in pipeline.stages)
        room = [min(seen.ranks[rank].growth for rank in stage.ranks) for stage in pipeline.stages]
        speeds = speeds_of(times, own, room)
        layers.append(best_layers(speeds, own))
        before_s = max(before_s, pipeline_s(speeds, own))
        after_s = max(after_s, pipeline_s(speeds, layers[-1]))
    return LayerChange(step=step, layers=tuple(layers), gain=1 - after_s / before_s)


def speeds_of(measured: MeasuredPipeline, layers: Sequence[int], growth: Sequence[float]) -> PipelineSpeeds:
    """Return what a layer of every stage takes, and the rest of the stage.

    The backward is taken to be shared between layers and the rest as the forward is.

    Args:
        growth: by stage, by what factor the memory in use may grow.
    """
    stages = [
        StageSpeed(
            forward_s=forward_s * share / number,
            backward_s=backward_s * share / number,
            other_forward_s=forward_s * (1 - share),
            other_backward_s=backward_s * (1 - share),
            most_layers=int(min(number * room, MAX_STEPS)),
        )
        for forward_s, backward_s, share, number, room in zip(
            measured.forward_s, measured.backward_s, measured.layers_share, layers, growth, strict=True
        )
    ]
    return PipelineSpeeds(
        stages=tuple(stages), hop_s=measured.hop_s, micro_batches=measured.micro_batches, in_flight=measured.in_flight
    )


_LOOKS_AT_START = 4


@dataclass(frozen=True, kw_only=True, slots=True)
class BatchChange:
    """One change of the ranks' batches in a running job."""

    step: int  # optimizer steps that this process has done before it
    batch: tuple[int, ...]  # samples of every rank's micro-batch from now on
    gain: float  # share of a step's time that the change was predicted to save
    event: ClassVar[str] = "the batches changed"

    def applied_to(self, plan: Plan) -> Plan:
        """The plan with these batches."""
        split = plan.batch_split
        assert split is not None
        return Plan.of_replicas(
            plan.schedules, BatchSplit(micro_batch_sizes=self.batch, micro_batches=split.micro_batches)
        )

    def __str__(self) -> str:
        return f'goes on with "batch": {list(self.batch)}, predicted to save {self.gain:.1%} of a step'

    def to_dict(self) -> dict[str, object]:
        """For ``run.json``."""
        return {"step": self.step, "batch": list(self.batch), "gain": self.gain}


class BatchSearch:
    """Looks for other batches of the same sum; on rank 0. See `ds_hetero.job.replanning.PlanSearch`.

    Args:
        section: with ``"by_speed"`` alone, the first steps are looked at some times; with ``"replan"``, all.
        tries: what fits is tried before a change, see `learn`; else it is as much as the peaks of memory leave.
    """

    def __init__(self, section: HeterogeneitySection, *, tries: bool = False) -> None:
        self._min_gain, self._goes_on = section.replan.min_gain, section.replan.enabled
        self._left, self._tries = _LOOKS_AT_START, tries
        self._looked_at = 0  # step
        self._most = dict[int, int]()  # samples of ranks that have run out of memory with more

    def learn(self, plan: Plan, room: Sequence[int]) -> list[str]:
        """Learn which ranks have no memory for a proposed plan; a line for each of them, for people."""
        assert plan.batch_split is not None
        wanted = plan.batch_split.micro_batch_sizes
        full = {rank: most for rank, most in enumerate(room) if most < wanted[rank]}
        self._most |= full
        return [
            f"rank {rank} ran out of memory when {wanted[rank]} samples were tried, and goes on with {most} at most"
            for rank, most in full.items()
        ]

    def propose(self, step: int, plan: Plan, seen: JobTimes) -> Sequence[BatchChange]:
        """The change that these times call for; none where it gains too little."""
        if not (self._goes_on or self._left or step == self._looked_at):
            return []
        batch, gain = self._best(plan, seen)
        self._left -= self._left > 0 and step != self._looked_at  # the first steps alone may show nothing
        self._looked_at = step
        if gain < self._min_gain:
            return []
        return [BatchChange(step=step, batch=batch, gain=gain)]

    def predicted_gain(self, plan: Plan, seen: JobTimes) -> float | None:
        """The share of a step that other batches would save."""
        return self._best(plan, seen)[1]

    def _best(self, plan: Plan, seen: JobTimes) -> tuple[tuple[int, ...], float]:
        split = plan.batch_split
        assert split is not None
        sizes = split.micro_batch_sizes
        own_s = [rank.own_median_s for rank in seen.ranks]
        if not all(own_s):
            return sizes, 0.0
        s_per_sample = [seconds / size for seconds, size in zip(own_s, sizes, strict=True)]
        total = sum(sizes)
        most = [total] * len(sizes)
        if not self._tries:
            seen_room = [size * rank.growth for size, rank in zip(sizes, seen.ranks, strict=True)]
            most = [
                total if math.isinf(room) else max(size, int(room)) for size, room in zip(sizes, seen_room, strict=True)
            ]
        for rank, bound in self._most.items():
            most[rank] = max(bound, sizes[rank])
        batch = balanced_batches(total, s_per_sample, most)
        slowest_s = max(size * seconds for size, seconds in zip(batch, s_per_sample, strict=True))
        return batch, (max(own_s) - slowest_s) / seen.step_s
