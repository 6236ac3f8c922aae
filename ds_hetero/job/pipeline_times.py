"""Where the time of pipelines goes: from the moments of all ranks to phases of every rank and speeds of every stage.

    forward, backward   computing passes
    hop                 packing and sending, and waiting for what the neighbour had computed already
    bubble              waiting for a neighbour that still computed, and for the slowest rank at the end of the passes
    sync                gradients to their owners, the norm, new values back
    rest                the optimizer, the loader, the host

Clocks of ranks are brought together by the end of the passes, where all ranks add up the loss: it comes to all within
the time of a short message.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from itertools import pairwise
from statistics import fmean, median

from ds_hetero.cost.stages.pipeline_time import run_pipeline
from ds_hetero.plans import Pipeline, Plan, Stage
from ds_hetero.plans.timetable import BACKWARD, FORWARD
from ds_hetero.runtime.pipeline.stage_clock import PassTimes, StageStep

__all__ = [
    "PHASES",
    "MeasuredPipeline",
    "RankPhases",
    "common_steps",
    "measure_pipeline",
    "measure_pipelines",
    "phases_of",
]

PHASES = ("forward", "backward", "hop", "bubble", "sync", "rest")

Steps = Mapping[int, StageStep]
"""One step, by rank."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RankPhases:
    """Sums over ``steps`` steps of one rank, in seconds; `PHASES` but ``rest`` are those of the module's docstring."""

    steps: int = 0
    step_s: float = 0.0
    forward_s: float = 0.0
    backward_s: float = 0.0
    hop_s: float = 0.0
    bubble_s: float = 0.0
    sync_s: float = 0.0

    def __add__(self, other: RankPhases) -> RankPhases:
        sums = {f.name: getattr(self, f.name) + getattr(other, f.name) for f in fields(self)}
        return RankPhases(**sums)

    @property
    def shares(self) -> dict[str, float]:
        """Shares of the steps' time, by `PHASES`; they add up to 1."""
        known = {name: getattr(self, f"{name}_s") / self.step_s for name in PHASES if name != "rest"}
        return {**known, "rest": 1 - sum(known.values())}


@dataclass(frozen=True, kw_only=True, slots=True)
class MeasuredPipeline:
    """What one pipeline took, means over steps.

    Args:
        forward_s: a stage and a micro-batch, until the stage is free again; of the stage's slowest rank.
        backward_s: likewise.
        layers_share: by stage, share of a forward that the stage's layers take.
        hop_s: from the end of a pass to the arrival at the next stage, one direction.
        micro_batches: of a step.
        in_flight: by stage.
        passes_s: from the first pass to the end of the last one.
    """

    forward_s: tuple[float, ...]
    backward_s: tuple[float, ...]
    layers_share: tuple[float, ...]
    hop_s: tuple[float, ...]
    micro_batches: int
    in_flight: tuple[int, ...]
    passes_s: float

    @property
    def predicted_s(self) -> float:
        """``passes_s`` by the recurrence of 1F1B from the stages' own times."""
        args = self.forward_s, self.backward_s, self.hop_s, self.micro_batches, self.in_flight
        return run_pipeline(*args).total_s


def common_steps(by_rank: Sequence[Sequence[StageStep]]) -> list[Steps]:
    """The steps that every rank has finished, in order."""
    numbered = [{step.number: step for step in steps} for steps in by_rank]
    numbers = set.intersection(*(set(steps) for steps in numbered))
    return [{rank: steps[number] for rank, steps in enumerate(numbered)} for number in sorted(numbers)]


def phases_of(plan: Plan, steps: Sequence[Steps]) -> list[RankPhases]:
    """Return the phases of every rank, summed over steps.

    Args:
        plan: that they ran under.
        steps: of all ranks.
    """
    phases = [RankPhases() for _ in steps[0]]
    for step in steps:
        for rank, times in step.items():
            idle_s = 0.0 if plan.place_of(rank) else times.joined_s
            phases[rank] += RankPhases(steps=1, step_s=times.step_s, bubble_s=idle_s, sync_s=times.sync_s)
        for pipeline in plan.pipelines:
            for j, stage in enumerate(pipeline.stages):
                for rank in stage.ranks:
                    phases[rank] += _phases_of_rank(pipeline, j, rank, step)
    return phases


def measure_pipelines(plan: Plan, steps: Sequence[Steps]) -> list[MeasuredPipeline]:
    """Return what every pipeline of a plan took; the arguments are those of `phases_of`."""
    return [measure_pipeline(pipeline, steps) for pipeline in plan.pipelines]


def measure_pipeline(pipeline: Pipeline, steps: Sequence[Steps]) -> MeasuredPipeline:
    """Return what one pipeline took.

    Args:
        pipeline: of the plan that they ran under.
        steps: of all ranks.
    """
    passes = [step[rank].passes for step in steps for rank in pipeline.ranks]
    return MeasuredPipeline(
        forward_s=tuple(_pass_s(stage, steps, FORWARD) for stage in pipeline.stages),
        backward_s=tuple(_pass_s(stage, steps, BACKWARD) for stage in pipeline.stages),
        layers_share=tuple(_layers_share(stage, steps) for stage in pipeline.stages),
        hop_s=tuple(
            median(_hop_s(earlier, later, step) for step in steps) for earlier, later in pairwise(pipeline.stages)
        ),
        micro_batches=round(median(len(each) // 2 for each in passes)),
        in_flight=tuple(pipeline.in_flight(j) for j in range(len(pipeline.stages))),
        passes_s=fmean(max(_passes_s(step[rank].passes) for rank in pipeline.ranks) for step in steps),
    )


def _passes_s(passes: Sequence[PassTimes]) -> float:
    return passes[-1].sent_s - passes[0].asked_s if passes else 0.0


def _pass_s(stage: Stage, steps: Sequence[Steps], kind: str) -> float:
    by_rank = [
        [each.sent_s - each.begin_s for step in steps for each in step[rank].passes if each.kind == kind]
        for rank in stage.ranks
    ]
    return max((fmean(seconds) for seconds in by_rank if seconds), default=0.0)


def _layers_share(stage: Stage, steps: Sequence[Steps]) -> float:
    """1 where nobody has timed the layers."""
    forwards = [
        e for step in steps for rank in stage.ranks for e in step[rank].passes if e.kind == FORWARD and e.layers_s
    ]
    return sum(e.layers_s for e in forwards) / sum(e.sent_s - e.begin_s for e in forwards) if forwards else 1.0


# --- clocks of different ranks ----------------------------------------------------------------------


def _ahead_s(step: Steps, rank: int, other: int) -> float:
    """How far the clock of ``rank`` is ahead of that of ``other``."""
    return step[rank].joined_s - step[other].joined_s


def _hop_s(earlier: Stage, later: Stage, step: Steps) -> float:
    """The fastest message of a step between two stages, from the end of a pass to its arrival at a rank that waited."""
    rank, other = earlier.ranks[0], later.ranks[0]
    first, second, ahead_s = _by_pass(step[rank].passes), _by_pass(step[other].passes), _ahead_s(step, other, rank)
    there = [second[key].begin_s - first[key].end_s - ahead_s for key in first if key in second and key[0] == FORWARD]
    back = [first[key].begin_s - second[key].end_s + ahead_s for key in first if key in second and key[0] == BACKWARD]
    return max(0.0, min([*there, *back], default=0.0))


def _phases_of_rank(pipeline: Pipeline, j: int, rank: int, step: Steps) -> RankPhases:
    """What a rank of stage ``j`` did in a step, without ``sync`` and the step itself."""
    times = step[rank]
    senders = {FORWARD: j - 1, BACKWARD: j + 1}
    sums = {FORWARD: 0.0, BACKWARD: 0.0}
    hop_s = bubble_s = 0.0
    ready = {
        kind: _by_pass(step[pipeline.stages[i].ranks[0]].passes)
        for kind, i in senders.items()
        if 0 <= i < len(pipeline.stages)
    }
    for each in times.passes:
        sums[each.kind] += each.end_s - each.begin_s
        hop_s += each.sent_s - each.end_s
        sent = ready.get(each.kind, {}).get((each.kind, each.micro_batch))
        waited_s = each.begin_s - each.asked_s
        if sent is not None:
            sender = pipeline.stages[senders[each.kind]].ranks[0]
            left_s = sent.end_s + _ahead_s(step, rank, sender)  # on this rank's clock
            on_wire_s = min(max(each.begin_s - max(left_s, each.asked_s), 0.0), waited_s)
            hop_s, bubble_s = hop_s + on_wire_s, bubble_s + waited_s - on_wire_s
    if times.passes:
        bubble_s += max(0.0, times.joined_s - times.passes[-1].sent_s)
    return RankPhases(forward_s=sums[FORWARD], backward_s=sums[BACKWARD], hop_s=hop_s, bubble_s=bubble_s)


def _by_pass(passes: Sequence[PassTimes]) -> dict[tuple[str, int], PassTimes]:
    return {(each.kind, each.micro_batch): each for each in passes}
