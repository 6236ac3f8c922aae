"""Layers between the stages of a pipeline, from what its stages were measured to take.

A stage takes as long as its layers, each as long as the others of the stage, and what comes on top: the embedding, the
last norm, the head and the loss. Stages stay in their order on their ranks, so a layer that goes to a stage further
away shifts the boundaries between.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from ds_hetero.cost.stages.pipeline_time import run_pipeline
from ds_hetero.values.plans import Pipeline, Plan

LEAST_LAYER_GAIN = 1e-6  # of the time, for which a layer moves; less is rounding


@dataclass(frozen=True, kw_only=True, slots=True)
class StageSpeed:
    """Seconds of a stage for a micro-batch."""

    forward_s: float  # of one layer
    backward_s: float  # of one layer
    other_forward_s: float  # outside the layers
    other_backward_s: float  # outside the layers
    most_layers: int  # that its memory can hold


@dataclass(frozen=True, kw_only=True, slots=True)
class PipelineSpeeds:
    """Measured seconds of a pipeline."""

    stages: tuple[StageSpeed, ...]  # first to last
    hop_s: tuple[float, ...]  # between neighbours, one direction
    micro_batches: int  # of a step
    in_flight: tuple[int, ...]  # by stage


def pipeline_s(speeds: PipelineSpeeds, layers: Sequence[int]) -> float:
    """Return what the passes of a step take with so many layers by stage, by the recurrence of 1F1B."""
    pairs = list(zip(speeds.stages, layers, strict=True))
    forward_s = [stage.other_forward_s + number * stage.forward_s for stage, number in pairs]
    backward_s = [stage.other_backward_s + number * stage.backward_s for stage, number in pairs]
    return run_pipeline(forward_s, backward_s, speeds.hop_s, speeds.micro_batches, speeds.in_flight).total_s


def best_layers(speeds: PipelineSpeeds, layers: Sequence[int]) -> tuple[int, ...]:
    """Return the layers by stage, one at least, that layer by layer could not be made faster."""
    best, best_s = tuple(layers), pipeline_s(speeds, layers)
    better = True
    while better:
        better = False
        for moved in _neighbours(speeds, best):
            seconds = pipeline_s(speeds, moved)
            if seconds < best_s * (1 - LEAST_LAYER_GAIN):
                best, best_s, better = moved, seconds, True
    return best


def with_layers(plan: Plan, layers: Sequence[Sequence[int]]) -> Plan:
    """Return the same plan with other numbers of layers, by pipeline and stage; its prediction is dropped."""
    pipelines = [_with_layers(pipeline, own) for pipeline, own in zip(plan.pipelines, layers, strict=True)]
    return replace(plan, pipelines=tuple(pipelines), predicted=None)


def _with_layers(pipeline: Pipeline, layers: Sequence[int]) -> Pipeline:
    stages, start = [], 0
    for stage, number in zip(pipeline.stages, layers, strict=True):
        stages.append(replace(stage, layers=(start, start + number)))
        start += number
    return replace(pipeline, stages=tuple(stages))


def _neighbours(speeds: PipelineSpeeds, layers: Sequence[int]) -> Iterator[tuple[int, ...]]:
    """The cuts in which one stage has given one layer to another."""
    for giver in range(len(layers)):
        for taker, stage in enumerate(speeds.stages):
            if giver != taker and layers[giver] > 1 and layers[taker] < stage.most_layers:
                moved = list(layers)
                moved[giver] -= 1
                moved[taker] += 1
                yield tuple(moved)
