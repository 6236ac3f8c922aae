"""Search for a faster distribution of layers over the stages of running pipelines."""

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
    """A change of a running job: stages of its pipelines get other numbers of layers."""

    step: int  # optimizer steps that this process had done before the change
    layers: tuple[tuple[int, ...], ...]  # number of layers by pipeline and stage
    gain: float  # share of the passes' time that the change is predicted to save
    event: ClassVar[str] = "layers moved"

    def applied_to(self, plan: Plan) -> Plan:
        """Return the plan with these layers."""
        return with_layers(plan, self.layers)

    def __str__(self) -> str:
        by_pipeline = ["+".join(map(str, layers)) for layers in self.layers]  # such as "20+12"
        return f"layers move, predicted to save {self.gain:.1%} of the passes: {' | '.join(by_pipeline)}"

    def to_dict(self) -> JsonDict:
        """Return this change as an entry of ``run.json``."""
        return {"step": self.step, "layers": [list(layers) for layers in self.layers], "gain": self.gain}


class LayerSearch:
    """Proposes other numbers of layers for the stages of pipelines; on rank 0.

    It proposes a change when two observations in a row predict a gain. The first one alone would not do: speeds may
    have changed in the middle of its steps, and its means are then between the old and the new speeds.

    Args:
        min_gain: share of the passes' time that a change must be predicted to save.
    """

    def __init__(self, min_gain: float) -> None:
        self._min_gain = min_gain
        self._had_gain_before = False  # in the observation before

    def propose(self, step: int, plan: Plan, job_times: JobTimes) -> Sequence[LayerChange]:
        """See `ds_hetero.job.replanning.PlanSearch`."""
        change = best_layer_change(step, plan, job_times)
        is_gain = change.gain > 0 and change.gain >= self._min_gain
        is_second_in_a_row = is_gain and self._had_gain_before
        # After a proposal, two observations are needed again.
        self._had_gain_before = is_gain and not is_second_in_a_row
        return [change] if is_second_in_a_row else []

    def predicted_gain(self, plan: Plan, job_times: JobTimes) -> float | None:
        """See `ds_hetero.job.replanning.PlanSearch`."""
        return best_layer_change(0, plan, job_times).gain


def best_layer_change(step: int, plan: Plan, job_times: JobTimes) -> LayerChange:
    """Return the layers with which the pipelines are predicted to be fastest.

    Args:
        plan: the plan under which the steps of ``job_times`` ran.
    """
    before_s = after_s = 0.0  # passes of the slowest pipeline, for which the others wait
    layers_by_pipeline = []
    for pipeline, times in zip(plan.pipelines, job_times.pipelines, strict=True):
        layers_now = tuple(stage.num_layers or 0 for stage in pipeline.stages)
        growth = []
        for stage in pipeline.stages:
            # The rank with the least free memory limits the stage.
            growth.append(min(job_times.ranks[rank].growth for rank in stage.ranks))
        speeds = speeds_of(times, layers_now, growth)
        layers_best = best_layers(speeds, layers_now)
        layers_by_pipeline.append(layers_best)
        before_s = max(before_s, pipeline_s(speeds, layers_now))
        after_s = max(after_s, pipeline_s(speeds, layers_best))
    return LayerChange(step=step, layers=tuple(layers_by_pipeline), gain=1 - after_s / before_s)


def speeds_of(measured: MeasuredPipeline, layers: Sequence[int], growth: Sequence[float]) -> PipelineSpeeds:
    """Return, for every stage, the seconds of one layer and of the work outside the layers (embedding, head, loss).

    Only forwards are timed by layer; a backward is assumed to be divided in the same ratio.

    Args:
        measured: times of the pipeline's passes.
        layers: number of layers, by stage.
        growth: by stage, the factor by which the memory in use may grow. Memory is assumed to grow with the layers.
    """
    stages = []
    columns = (measured.forward_s, measured.backward_s, measured.layers_share, layers, growth)
    for forward_s, backward_s, layers_share, num_layers, stage_growth in zip(*columns, strict=True):
        stages.append(
            StageSpeed(
                forward_s=forward_s * layers_share / num_layers,
                backward_s=backward_s * layers_share / num_layers,
                other_forward_s=forward_s * (1 - layers_share),
                other_backward_s=backward_s * (1 - layers_share),
                most_layers=int(min(num_layers * stage_growth, MAX_STEPS)),
            )
        )
    return PipelineSpeeds(
        stages=tuple(stages), hop_s=measured.hop_s, micro_batches=measured.micro_batches, in_flight=measured.in_flight
    )
