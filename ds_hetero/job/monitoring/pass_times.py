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
from dataclasses import replace
from itertools import pairwise
from statistics import fmean, median

from ds_hetero.job.monitoring.times import JobTimes, MeasuredPipeline, RankTimes, sums_of
from ds_hetero.runtime.step_clock import PassTimes, StepTimes
from ds_hetero.values.plans import Pipeline, Plan, Stage
from ds_hetero.values.plans.timetable import BACKWARD, FORWARD

Steps = Mapping[int, StepTimes]
"""One step, by rank."""


def common_steps(by_rank: Sequence[Sequence[StepTimes]]) -> list[Steps]:
    """The steps that every rank has finished, in order."""
    numbered = [{step.number: step for step in steps} for steps in by_rank]
    numbers = set.intersection(*(set(steps) for steps in numbered))
    return [{rank: steps[number] for rank, steps in enumerate(numbered)} for number in sorted(numbers)]


def times_of_passes(plan: Plan, ranks: Sequence[RankTimes], steps: Sequence[Steps]) -> JobTimes:
    """Return where the time of pipelines went.

    Args:
        plan: that the steps ran under.
        ranks: what each says of itself, whatever steps it has finished.
        steps: that all ranks have finished.
    """
    phases = [dict.fromkeys(("forward_s", "backward_s", "hop_s", "bubble_s"), 0.0) for _ in ranks]
    for step in steps:
        for rank, times in step.items():
            if plan.place_of(rank) is None:
                phases[rank]["bubble_s"] += times.joined_s
        for pipeline in plan.pipelines:
            for j, stage in enumerate(pipeline.stages):
                for rank in stage.ranks:
                    for name, seconds in _phases_of_rank(pipeline, j, rank, step).items():
                        phases[rank][name] += seconds
    summed = [sums_of([step[rank] for step in steps]) for rank in range(len(ranks))]
    return JobTimes(
        [
            replace(times, steps=len(steps), **sums, **own)
            for times, sums, own in zip(ranks, summed, phases, strict=True)
        ],
        [measure_pipeline(pipeline, steps) for pipeline in plan.pipelines],
    )


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


def _phases_of_rank(pipeline: Pipeline, j: int, rank: int, step: Steps) -> dict[str, float]:
    """Seconds of what a rank of stage ``j`` did in the passes of a step, by the fields of `RankTimes`."""
    times = step[rank]
    senders = {FORWARD: j - 1, BACKWARD: j + 1}
    sums = {FORWARD: 0.0, BACKWARD: 0.0}
    hop_s = bubble_s = 0.0
    ready = {
        kind: _by_pass(step[pipeline.stages[i].ranks[0]].passes)
        for kind, i in senders.items()
        if 0 <= i < len(pipeline.stages)
    }
    for own in times.passes:
        sums[own.kind] += own.end_s - own.begin_s
        hop_s += own.sent_s - own.end_s
        sent = ready.get(own.kind, {}).get((own.kind, own.micro_batch))
        waited_s = own.begin_s - own.asked_s
        if sent is not None:
            sender = pipeline.stages[senders[own.kind]].ranks[0]
            left_s = sent.end_s + _ahead_s(step, rank, sender)  # on this rank's clock
            on_wire_s = min(max(own.begin_s - max(left_s, own.asked_s), 0.0), waited_s)
            hop_s, bubble_s = hop_s + on_wire_s, bubble_s + waited_s - on_wire_s
    if times.passes:
        bubble_s += max(0.0, times.joined_s - times.passes[-1].sent_s)
    return {"forward_s": sums[FORWARD], "backward_s": sums[BACKWARD], "hop_s": hop_s, "bubble_s": bubble_s}


def _by_pass(passes: Sequence[PassTimes]) -> dict[tuple[str, int], PassTimes]:
    return {(each.kind, each.micro_batch): each for each in passes}
