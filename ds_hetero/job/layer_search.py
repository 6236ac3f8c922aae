"""Search of another cut of the layers of running pipelines, where one is predicted to be faster."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from ds_hetero.common.reading import MAX_STEPS, JsonDict
from ds_hetero.job.job_times import JobTimes
from ds_hetero.job.pipeline_times import MeasuredPipeline
from ds_hetero.planner.replan.stage_layers import PipelineSpeeds, StageSpeed, best_layers, pipeline_s, with_layers
from ds_hetero.values.plans import Plan


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
