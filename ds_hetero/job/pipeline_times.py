"""Times of pipelines, from the timestamps of all ranks: phases of every rank, and speeds of every stage.

    forward, backward   the rank computes a pass
    hop                 the rank packs or sends, or the message that it waits for is on the wire
    bubble              the rank waits for a neighbour that still computes, or at the end for the slowest rank
    sync                gradients go to their owners, the norm is computed, new values come back
    rest                the optimizer, the loader, the host

Clocks of ranks differ. They are aligned by ``joined_s``, the end of the all-reduce of the loss after the last pass:
all ranks leave it within the time of a short message, so two ranks' ``joined_s`` stand for the same instant.

A wait is divided by the clock of the rank that waits. An example: it asks for an activation at 10, the sender ends its
forward at 13, the activation arrives at 14. The 3 seconds to 13 are bubble, the last one is hop.
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
    """Measured times of one pipeline: means over the steps of an observation."""

    forward_s: tuple[float, ...]  # by stage: one micro-batch on its slowest rank, until the result is sent
    backward_s: tuple[float, ...]  # likewise
    layers_share: tuple[float, ...]  # by stage: share of a forward that the stage's layers take
    hop_s: tuple[float, ...]  # by neighbouring pair: from the end of a pass to its arrival, one direction
    micro_batches: int  # of a step
    in_flight: tuple[int, ...]  # by stage: most micro-batches between their forward and their backward
    passes_s: float  # from the first pass to the end of the last one

    @property
    def predicted_s(self) -> float:
        """``passes_s`` as predicted by the 1F1B recurrence from the measured times of the stages."""
        args = self.forward_s, self.backward_s, self.hop_s, self.micro_batches, self.in_flight
        return run_pipeline(*args).total_s


Steps = Mapping[int, StepTimes]
"""One step, by rank."""


def common_steps(by_rank: Sequence[Sequence[StepTimes]]) -> list[Steps]:
    """Return the steps that every rank has finished, in order."""
    by_number = [{step.number: step for step in steps} for steps in by_rank]  # one dictionary per rank
    finished_by_all = set.intersection(*(set(steps) for steps in by_number))

    def step_of_all_ranks(number: int) -> Steps:
        """Return the times of step ``number`` of every rank."""
        return {rank: steps[number] for rank, steps in enumerate(by_number)}

    return [step_of_all_ranks(number) for number in sorted(finished_by_all)]


def measure_pipeline(pipeline: Pipeline, steps: Sequence[Steps]) -> MeasuredPipeline:
    """Return the times of one pipeline in these steps of all ranks."""
    hops_s = []
    for earlier, later in pairwise(pipeline.stages):
        hops_s.append(median(_hop_s(earlier, later, step) for step in steps))
    num_passes = []
    slowest_s = []  # by step, the passes of the pipeline's slowest rank
    for step in steps:
        num_passes += [len(step[rank].passes) for rank in pipeline.ranks]
        slowest_s.append(max(_passes_s(step[rank].passes) for rank in pipeline.ranks))
    return MeasuredPipeline(
        forward_s=tuple(_pass_s(stage, steps, FORWARD) for stage in pipeline.stages),
        backward_s=tuple(_pass_s(stage, steps, BACKWARD) for stage in pipeline.stages),
        layers_share=tuple(_layers_share(stage, steps) for stage in pipeline.stages),
        hop_s=tuple(hops_s),
        micro_batches=round(median(count // 2 for count in num_passes)),  # a forward and a backward each
        in_flight=tuple(pipeline.in_flight(j) for j in range(len(pipeline.stages))),
        passes_s=fmean(slowest_s),
    )


def _passes_s(passes: Sequence[PassTimes]) -> float:
    """Return the seconds from the begin of the first pass of a step to the end of the last one."""
    return passes[-1].sent_s - passes[0].ready_s if passes else 0.0


def _pass_s(stage: Stage, steps: Sequence[Steps], kind: str) -> float:
    """Return the mean seconds of a forward (or backward) of a stage on its slowest rank; 0 if no rank ran one."""
    means_s = []
    for rank in stage.ranks:
        passes = _passes_of_kind([rank], steps, kind)
        if passes:
            means_s.append(fmean(timed.sent_s - timed.begin_s for timed in passes))
    return max(means_s, default=0.0)


def _layers_share(stage: Stage, steps: Sequence[Steps]) -> float:
    """Return the share of a stage's forwards that its layers take; 1 if the layers were not timed."""
    timed = [forward for forward in _passes_of_kind(stage.ranks, steps, FORWARD) if forward.layers_s]
    if not timed:
        return 1.0
    return sum(forward.layers_s for forward in timed) / sum(forward.sent_s - forward.begin_s for forward in timed)


def _passes_of_kind(ranks: Sequence[int], steps: Sequence[Steps], kind: str) -> list[PassTimes]:
    """Return all forwards of these ranks in these steps, or all backwards, as ``kind`` says."""
    passes: list[PassTimes] = []
    for step in steps:
        for rank in ranks:
            passes += [timed for timed in step[rank].passes if timed.kind == kind]
    return passes


def _ahead_s(step: Steps, rank: int, other: int) -> float:
    """Return the seconds by which the clock of ``rank`` is ahead of that of ``other``."""
    return step[rank].joined_s - step[other].joined_s


def _hop_s(earlier: Stage, later: Stage, step: Steps) -> float:
    """Return the seconds of the fastest message of a step between two stages, from the end of a pass to its arrival.

    Slower messages are not used: they may have waited at the receiver, which still computed.
    """
    sender, receiver = earlier.ranks[0], later.ranks[0]
    passes_earlier = _by_pass(step[sender].passes)
    passes_later = _by_pass(step[receiver].passes)
    ahead_s = _ahead_s(step, receiver, sender)
    messages_s = []
    for kind, micro_batch in passes_earlier.keys() & passes_later.keys():
        upstream = passes_earlier[kind, micro_batch]
        downstream = passes_later[kind, micro_batch]
        if kind == FORWARD:  # an activation goes to the later stage
            messages_s.append(downstream.begin_s - upstream.end_s - ahead_s)
        else:  # a gradient comes back
            messages_s.append(upstream.begin_s - downstream.end_s + ahead_s)
    # Clocks are aligned to a short message only: a fast link may seem to take less than nothing.
    return max(0.0, min(messages_s, default=0.0))


def phases_of_rank(pipeline: Pipeline, stage_index: int, rank: int, step: Steps) -> dict[str, float]:
    """Return the seconds that a rank spends in each phase of a step, by the fields of `RankTimes`.

    Args:
        stage_index: of the rank's stage in ``pipeline``.
    """
    times = step[rank]
    # A forward waits for the stage before, a backward for the stage behind; the ends of a pipeline wait for nobody.
    sender_by_kind = {}
    for kind, neighbour in ((FORWARD, stage_index - 1), (BACKWARD, stage_index + 1)):
        if 0 <= neighbour < len(pipeline.stages):
            sender_by_kind[kind] = pipeline.stages[neighbour].ranks[0]
    sent_passes = {kind: _by_pass(step[sender].passes) for kind, sender in sender_by_kind.items()}
    compute_s = {FORWARD: 0.0, BACKWARD: 0.0}
    hop_s = bubble_s = 0.0
    for timed in times.passes:
        compute_s[timed.kind] += timed.end_s - timed.begin_s
        hop_s += timed.sent_s - timed.end_s
        upstream = sent_passes.get(timed.kind, {}).get((timed.kind, timed.micro_batch))
        if upstream is None:
            continue
        # ready      the sender still computes: bubble      sent      on the wire: hop      begin
        waited_s = timed.begin_s - timed.ready_s
        upstream_sent_s = upstream.end_s + _ahead_s(step, rank, sender_by_kind[timed.kind])  # on this rank's clock
        since_both_s = timed.begin_s - max(upstream_sent_s, timed.ready_s)
        on_wire_s = min(max(since_both_s, 0.0), waited_s)
        hop_s += on_wire_s
        bubble_s += waited_s - on_wire_s
    if times.passes:
        bubble_s += max(0.0, times.joined_s - times.passes[-1].sent_s)  # until the slowest rank has joined
    return {"forward_s": compute_s[FORWARD], "backward_s": compute_s[BACKWARD], "hop_s": hop_s, "bubble_s": bubble_s}


def _by_pass(passes: Sequence[PassTimes]) -> dict[tuple[str, int], PassTimes]:
    """Return the passes of one rank and step as a mapping: ("forward", 2) is the forward of micro-batch 2."""
    return {(timed.kind, timed.micro_batch): timed for timed in passes}
