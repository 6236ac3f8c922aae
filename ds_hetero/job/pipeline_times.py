"""Times of pipelines, from the moments of all ranks: phases of every rank, and speeds of every stage.

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
from dataclasses import dataclass
from itertools import pairwise
from statistics import fmean, median

from ds_hetero.cost.stages.pipeline_time import run_pipeline
from ds_hetero.runtime.step_clock import PassTimes, StepTimes
from ds_hetero.values.plans import Pipeline, Stage
from ds_hetero.values.plans.timetable import BACKWARD, FORWARD


@dataclass(frozen=True, kw_only=True, slots=True)
class MeasuredPipeline:
    """Times of one pipeline, means over steps."""

    forward_s: tuple[float, ...]  # a stage and a micro-batch, until the stage is free again; of its slowest rank
    backward_s: tuple[float, ...]  # likewise
    layers_share: tuple[float, ...]  # by stage, share of a forward that the stage's layers take
    hop_s: tuple[float, ...]  # from the end of a pass to the arrival at the next stage, one direction
    micro_batches: int
    in_flight: tuple[int, ...]  # by stage
    passes_s: float  # from the first pass to the end of the last one

    @property
    def predicted_s(self) -> float:
        """``passes_s`` by the recurrence of 1F1B from the stages' own times."""
        args = self.forward_s, self.backward_s, self.hop_s, self.micro_batches, self.in_flight
        return run_pipeline(*args).total_s


Steps = Mapping[int, StepTimes]
"""One step, by rank."""


def common_steps(by_rank: Sequence[Sequence[StepTimes]]) -> list[Steps]:
    """The steps that every rank has finished, in order."""
    numbered = [{step.number: step for step in steps} for steps in by_rank]
    numbers = set.intersection(*(set(steps) for steps in numbered))
    return [{rank: steps[number] for rank, steps in enumerate(numbered)} for number in sorted(numbers)]


def measure_pipeline(pipeline: Pipeline, steps: Sequence[Steps]) -> MeasuredPipeline:
    """Return what one pipeline took in these steps of all ranks."""
    passes_of_ranks = [step[rank].passes for step in steps for rank in pipeline.ranks]
    return MeasuredPipeline(
        forward_s=tuple(_pass_s(stage, steps, FORWARD) for stage in pipeline.stages),
        backward_s=tuple(_pass_s(stage, steps, BACKWARD) for stage in pipeline.stages),
        layers_share=tuple(_layers_share(stage, steps) for stage in pipeline.stages),
        hop_s=tuple(
            median(_hop_s(earlier, later, step) for step in steps) for earlier, later in pairwise(pipeline.stages)
        ),
        micro_batches=round(median(len(passes) // 2 for passes in passes_of_ranks)),
        in_flight=tuple(pipeline.in_flight(j) for j in range(len(pipeline.stages))),
        passes_s=fmean(max(_passes_s(step[rank].passes) for rank in pipeline.ranks) for step in steps),
    )


def _passes_s(passes: Sequence[PassTimes]) -> float:
    return passes[-1].sent_s - passes[0].asked_s if passes else 0.0


def _pass_s(stage: Stage, steps: Sequence[Steps], kind: str) -> float:
    """Seconds of a pass of one kind on the slowest rank of a stage; 0 where nobody ran one."""
    means_s = []
    for rank in stage.ranks:
        passes = [one for step in steps for one in step[rank].passes if one.kind == kind]
        if passes:
            means_s.append(fmean(one.sent_s - one.begin_s for one in passes))
    return max(means_s, default=0.0)


def _layers_share(stage: Stage, steps: Sequence[Steps]) -> float:
    """Share of the forwards of a stage that its layers take; 1 where nobody has timed them."""
    passes = [one for step in steps for rank in stage.ranks for one in step[rank].passes]
    timed = [one for one in passes if one.kind == FORWARD and one.layers_s]
    if not timed:
        return 1.0
    return sum(one.layers_s for one in timed) / sum(one.sent_s - one.begin_s for one in timed)


def _ahead_s(step: Steps, rank: int, other: int) -> float:
    """How far the clock of ``rank`` is ahead of that of ``other``."""
    return step[rank].joined_s - step[other].joined_s


def _hop_s(earlier: Stage, later: Stage, step: Steps) -> float:
    """The fastest message of a step between two stages, from the end of a pass to its arrival at a rank that waited."""
    sender, receiver = earlier.ranks[0], later.ranks[0]
    first, second = _by_pass(step[sender].passes), _by_pass(step[receiver].passes)
    ahead_s = _ahead_s(step, receiver, sender)
    messages_s = []
    for kind, micro_batch in first.keys() & second.keys():
        upstream, downstream = first[kind, micro_batch], second[kind, micro_batch]
        if kind == FORWARD:  # an activation, from the earlier stage to the later one
            messages_s.append(downstream.begin_s - upstream.end_s - ahead_s)
        else:  # a gradient, back
            messages_s.append(upstream.begin_s - downstream.end_s + ahead_s)
    return max(0.0, min(messages_s, default=0.0))


def phases_of_rank(pipeline: Pipeline, j: int, rank: int, step: Steps) -> dict[str, float]:
    """Seconds of what a rank of stage ``j`` did in the passes of a step, by the fields of `RankTimes`."""
    times = step[rank]
    neighbours = {FORWARD: j - 1, BACKWARD: j + 1}  # stages whose passes of a kind come before those of this one
    senders = {
        kind: pipeline.stages[neighbour].ranks[0]
        for kind, neighbour in neighbours.items()
        if 0 <= neighbour < len(pipeline.stages)
    }
    passes_before = {kind: _by_pass(step[sender].passes) for kind, sender in senders.items()}
    sums = {FORWARD: 0.0, BACKWARD: 0.0}
    hop_s = bubble_s = 0.0
    for one in times.passes:
        sums[one.kind] += one.end_s - one.begin_s
        hop_s += one.sent_s - one.end_s
        before = passes_before.get(one.kind, {}).get((one.kind, one.micro_batch))
        if before is None:
            continue
        # asked      the sender still computes: bubble      left      on the wire: hop      begin
        waited_s = one.begin_s - one.asked_s
        left_s = before.end_s + _ahead_s(step, rank, senders[one.kind])  # on this rank's clock
        since_both_s = one.begin_s - max(left_s, one.asked_s)
        on_wire_s = min(max(since_both_s, 0.0), waited_s)
        hop_s += on_wire_s
        bubble_s += waited_s - on_wire_s
    if times.passes:
        bubble_s += max(0.0, times.joined_s - times.passes[-1].sent_s)
    return {"forward_s": sums[FORWARD], "backward_s": sums[BACKWARD], "hop_s": hop_s, "bubble_s": bubble_s}


def _by_pass(passes: Sequence[PassTimes]) -> dict[tuple[str, int], PassTimes]:
    return {(each.kind, each.micro_batch): each for each in passes}
