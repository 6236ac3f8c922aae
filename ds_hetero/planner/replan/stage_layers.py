"""Move layers between the stages of a running pipeline, by the measured times of its stages.

A stage takes the time of its layers, which are equally long, plus the time of its other modules: embedding, last norm,
head and loss. Stages keep their order and their ranks, so if one stage gives a layer to a distant one, the boundaries
of all stages between them shift. Example: layers (3, 2, 3) become (2, 2, 4): the middle stage had layers 3 and 4, and
now has layers 2 and 3.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from ds_hetero.cost.stages.pipeline_time import run_pipeline
from ds_hetero.values.plans import Pipeline, Plan

LEAST_LAYER_GAIN = 1e-6  # relative gain of time that moving a layer must have; less is rounding


@dataclass(frozen=True, kw_only=True, slots=True)
class StageSpeed:
    """Measured seconds of a stage for a micro-batch, and the number of layers that its memory holds."""

    forward_s: float  # of one layer
    backward_s: float  # of one layer
    other_forward_s: float  # of the other modules
    other_backward_s: float  # of the other modules
    most_layers: int  # layers that fit into its memory


@dataclass(frozen=True, kw_only=True, slots=True)
class PipelineSpeeds:
    """Measured seconds of the stages and sends of a pipeline."""

    stages: tuple[StageSpeed, ...]  # first to last
    hop_s: tuple[float, ...]  # send from a stage to the next one, or back; one value fewer than stages
    micro_batches: int  # micro-batches of a step
    in_flight: tuple[int, ...]  # micro-batches in flight, by stage


def pipeline_s(speeds: PipelineSpeeds, layers: Sequence[int]) -> float:
    """Return the time of all passes of a step under 1F1B with ``layers`` by stage, see `run_pipeline`."""
    pairs = list(zip(speeds.stages, layers, strict=True))
    forward_s = [stage.other_forward_s + number * stage.forward_s for stage, number in pairs]
    backward_s = [stage.other_backward_s + number * stage.backward_s for stage, number in pairs]
    return run_pipeline(forward_s, backward_s, speeds.hop_s, speeds.micro_batches, speeds.in_flight).total_s


def best_layers(speeds: PipelineSpeeds, layers: Sequence[int]) -> tuple[int, ...]:
    """Return layers by stage, at least one each, from which no move of a single layer saves time.

    Args:
        layers: layers by stage at which the search begins.
    """
    best, best_s = tuple(layers), pipeline_s(speeds, layers)
    has_improved = True
    while has_improved:
        has_improved = False
        for candidate in _neighbours(speeds, best):
            seconds = pipeline_s(speeds, candidate)
            if seconds < best_s * (1 - LEAST_LAYER_GAIN):
                best, best_s, has_improved = candidate, seconds, True
    return best


def with_layers(plan: Plan, layers: Sequence[Sequence[int]]) -> Plan:
    """Return the plan with other numbers of layers, by pipeline and stage, and without its prediction."""
    pairs = zip(plan.pipelines, layers, strict=True)
    pipelines = [_with_layers(pipeline, stage_layers) for pipeline, stage_layers in pairs]
    return replace(plan, pipelines=tuple(pipelines), predicted=None)


def _with_layers(pipeline: Pipeline, layers: Sequence[int]) -> Pipeline:
    """Return the pipeline with other numbers of layers, by stage."""
    stages, start = [], 0
    for stage, number in zip(pipeline.stages, layers, strict=True):
        stages.append(replace(stage, layers=(start, start + number)))
        start += number
    return replace(pipeline, stages=tuple(stages))


def _neighbours(speeds: PipelineSpeeds, layers: Sequence[int]) -> Iterator[tuple[int, ...]]:
    """Yield layers by stage after one stage has given one layer to another."""
    for giver in range(len(layers)):
        for taker, stage in enumerate(speeds.stages):
            if giver != taker and layers[giver] > 1 and layers[taker] < stage.most_layers:
                changed = list(layers)
                changed[giver] -= 1
                changed[taker] += 1
                yield tuple(changed)
