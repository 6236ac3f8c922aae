"""Where the time goes: of each rank, of each pipeline whose stages wait for each other, and of the job.

`events` say it to the monitors of the training, `times_table` says it to people.

Where the time of pipelines goes: from the moments of all ranks to phases of every rank and speeds of every stage.

    forward, backward   computing passes
    hop                 packing and sending, and waiting for what the neighbour had computed already
    bubble              waiting for a neighbour that still computed, and for the slowest rank at the end of the passes
    sync                gradients to their owners, the norm, new values back
    rest                the optimizer, the loader, the host

Clocks of ranks are brought together by the end of the passes, where all ranks add up the loss: it comes to all within
the time of a short message.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from itertools import pairwise
from math import hypot, log, sqrt
from statistics import fmean, median
from typing import Any, NamedTuple

import torch

from ds_hetero.cluster.catalogue import CATALOGUE
from ds_hetero.cluster.names import catalogue_name
from ds_hetero.common.text import framed_table, time_text
from ds_hetero.cost.stages.pipeline_time import run_pipeline
from ds_hetero.models.shapes import ModelSpec
from ds_hetero.planner.replan.policy import Observation
from ds_hetero.runtime.step_clock import PassTimes, StepTimes
from ds_hetero.values.plans import Pipeline, Plan, Stage
from ds_hetero.values.plans.timetable import BACKWARD, FORWARD

LEAST_ERROR_OF_COSTS = 0.003  # relative; few steps can agree by chance
_KEPT_CHANGES = 64
_SPREAD_OF_MEDIAN = 1.4826  # standard deviation over median absolute deviation, of a normal distribution
_ERROR_OF_MEDIAN = 1.2533  # its standard error over that of the mean


class UnitCost:
    """Seconds per unit of one kind of work on one rank.

    The spread is taken from the differences of successive steps, over many of them. Hence a change of speed, however
    large, is one difference among many, and does not pass for noise.
    """

    def __init__(self) -> None:
        self._costs: list[float] = []
        self._last: float | None = None
        self._changes: deque[float] = deque(maxlen=_KEPT_CHANGES)

    def add(self, seconds: float, units: float) -> None:
        """One step; a step without work, or too short to be measured, says nothing."""
        if seconds <= 0 or units <= 0:
            return
        cost = seconds / units
        if self._last is not None:
            self._changes.append(abs(log(cost / self._last)))
        self._last = cost
        self._costs.append(cost)

    def take(self) -> tuple[float | None, float]:
        """Median cost of the steps since the last call, and its relative standard error; None, 0 without any."""
        costs, self._costs = self._costs, []
        if not costs:
            return None, 0.0
        spread = _SPREAD_OF_MEDIAN / sqrt(2) * median(self._changes) if self._changes else 0.0
        return median(costs), max(_ERROR_OF_MEDIAN * spread / sqrt(len(costs)), LEAST_ERROR_OF_COSTS)

    def restart(self) -> None:
        """Forget the steps since the last `take`; what is known of the spread stays."""
        self._costs, self._last = [], None


SHARES = ("attention", "model", "all_to_all", "ring_wait", "idle")
"""Of a step of replicas; what they leave is ``"rest"``."""
PHASES = ("forward", "backward", "hop", "bubble", "sync")
"""Of a step of pipelines, see `ds_hetero.job.times`; what they leave is ``"rest"``."""
RECENT_STEPS = 10  # that minima, medians and maxima are of
# 4 operations forward and 8 backward per pair and element of a head count as useful (PaLM, arXiv:2204.02311,
# appendix B), of the 10 that a backward computes without the scores.
_USEFUL_PER_BACKWARD = 12 / 10
_MATMUL_FLOPS = 6  # forward and backward, per parameter and token


@dataclass(frozen=True, kw_only=True, slots=True)
class RankTimes:
    """Sums over ``steps`` steps of one rank, see `StepTimes`, and what a unit of its work costs it."""

    steps: float
    step_s: float
    attention_s: float
    model_s: float
    all_to_all_s: float
    ring_wait_s: float
    idle_s: float
    sync_s: float
    attention_flops: float
    attention_backward_flops: float
    tokens: float
    length: float  # median of the longest sequence of a step
    attention_s_per_flop: float  # see `Observation`; 0 stands for None
    model_s_per_token: float  # likewise
    error: float  # see `Observation`
    growth: float  # see `Observation`
    peak_flops_per_s: float  # of the device, 0 where it is not known
    own_min_s: float  # shortest computing time of the latest steps, at most `RECENT_STEPS`
    own_median_s: float
    own_max_s: float
    forward_s: float = 0.0  # of passes of pipelines, likewise those that follow
    backward_s: float = 0.0  # likewise
    hop_s: float = 0.0  # packing and sending, and waiting for what the neighbour had computed already
    bubble_s: float = 0.0  # waiting for a neighbour that still computed, and for the slowest rank at the passes' end

    @classmethod
    def of(
        cls,
        steps: Sequence[StepTimes],
        unit_costs: RankUnitCosts,
        growth: float,
        peak_flops_per_s: float,
        recent_s: Sequence[float],
    ) -> RankTimes:
        """Sum up steps of this rank.

        Args:
            unit_costs: which have been given the same steps.
            growth: by what factor the work on the rank may grow before its memory is full.
            peak_flops_per_s: of the device, 0 where it is not known.
            recent_s: computing time of the latest steps, see `own_s`.
        """
        (per_flop, flop_error), (per_token, token_error) = unit_costs.attention.take(), unit_costs.model.take()
        summed = sums_of(steps)
        own_s = summed["attention_s"] + summed["model_s"]
        error_s = hypot(flop_error * summed["attention_s"], token_error * summed["model_s"])
        return cls(
            **summed,
            steps=len(steps),
            length=median(step.length for step in steps) if steps else 0.0,
            attention_s_per_flop=per_flop or 0.0,
            model_s_per_token=per_token or 0.0,
            error=error_s / own_s if own_s else 0.0,
            growth=growth,
            peak_flops_per_s=peak_flops_per_s,
            own_min_s=min(recent_s, default=0.0),
            own_median_s=median(recent_s) if recent_s else 0.0,
            own_max_s=max(recent_s, default=0.0),
        )

    def __add__(self, later: RankTimes) -> RankTimes:
        sums = {name: getattr(self, name) + getattr(later, name) for name in ("steps", *_SUMMED, *_OF_PASSES)}
        latest = {f.name: getattr(later, f.name) for f in fields(later) if f.name not in sums}
        return RankTimes(**sums, **latest)

    def shares(self, names: Sequence[str]) -> dict[str, float]:
        """Shares of the steps' time by `SHARES` or `PHASES`, and the ``"rest"``; they add up to 1."""
        shares = {name: getattr(self, f"{name}_s") / self.step_s for name in names}
        return {**shares, "rest": 1 - sum(shares.values())}

    @property
    def own_s(self) -> float:
        """Seconds that the rank computes in a step, as far as they grow with its share."""
        return (self.attention_s + self.model_s) / self.steps

    @property
    def tokens_per_s(self) -> float:
        """Tokens of this rank."""
        return self.tokens / self.step_s

    def model_flops_utilization(self, model: ModelSpec | None, peak_flops_per_s: float) -> float | None:
        """Useful operations of this rank per second, over the peak of its device; None where either is not known.

        Useful are those of the model with causality counted, each once, however often they are computed.
        """
        peak = peak_flops_per_s or self.peak_flops_per_s
        if model is None or not peak:
            return None
        per_token = model.num_layers * model.active_layer_parameters + model.hidden_size * model.vocab_size
        useful = _MATMUL_FLOPS * per_token * self.tokens + _USEFUL_PER_BACKWARD * self.attention_backward_flops
        return useful / self.step_s / peak


_SUMMED = (
    "step_s",
    "attention_s",
    "model_s",
    "all_to_all_s",
    "ring_wait_s",
    "idle_s",
    "sync_s",
    "attention_flops",
    "attention_backward_flops",
    "tokens",
)
_OF_PASSES = ("forward_s", "backward_s", "hop_s", "bubble_s")


def sums_of(steps: Sequence[StepTimes]) -> dict[str, float]:
    """Sums over steps of one rank, by the fields of `RankTimes`."""
    return {name: float(sum(getattr(step, name) for step in steps)) for name in _SUMMED}


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


class JobTimes(NamedTuple):
    """Times of the job in one observation."""

    ranks: Sequence[RankTimes]
    pipelines: Sequence[MeasuredPipeline] = ()  # all, where stages wait for each other; else none

    @property
    def step_s(self) -> float:
        """A step of the slowest rank."""
        return max(rank.step_s / rank.steps for rank in self.ranks)

    @property
    def imbalance(self) -> float:
        """Computing time of the busiest rank over the mean; 1 is balanced."""
        own = [rank.own_s for rank in self.ranks]
        return max(own) * len(own) / sum(own) if any(own) else 1.0

    @property
    def parts_of_step(self) -> tuple[str, ...]:
        """Names of the shares of a step that ranks have."""
        return PHASES if self.pipelines else SHARES

    def tokens_per_s(self, plan: Plan) -> float:
        """Tokens of the job: of every rank of pipelines' first stages, of one rank where those are tensor-parallel."""
        first = [pipeline.stages[0] for pipeline in plan.pipelines]
        readers = [rank for stage in first for rank in (stage.ranks if stage.inner == "sequence" else stage.ranks[:1])]
        return sum(self.ranks[rank].tokens_per_s for rank in readers)


class RankUnitCosts:
    """Costs of attention and of the rest of a layer on this rank."""

    def __init__(self) -> None:
        self.attention, self.model = UnitCost(), UnitCost()

    def add(self, step: StepTimes) -> None:
        """Take one step into account."""
        self.attention.add(step.attention_s, step.attention_flops)
        self.model.add(step.model_s, step.tokens)

    def restart(self) -> None:
        """See `UnitCost.restart`."""
        self.attention.restart()
        self.model.restart()


def observation_of(ranks: Sequence[RankTimes]) -> Observation:
    """Return the observation of one replica, from the times of its ranks."""
    return Observation(
        attention_flops=tuple(rank.attention_flops / rank.steps for rank in ranks),
        tokens=tuple(rank.tokens / rank.steps for rank in ranks),
        attention_s_per_flop=tuple(rank.attention_s_per_flop or None for rank in ranks),
        model_s_per_token=tuple(rank.model_s_per_token or None for rank in ranks),
        error=tuple(rank.error for rank in ranks),
        growth=tuple(rank.growth for rank in ranks),
        step_s=max(rank.step_s / rank.steps for rank in ranks),
        length=round(median(rank.length for rank in ranks)),
    )


def peak_flops_per_s(device: torch.device) -> float:
    """The catalogue's for this device, 0 where it has none."""
    if device.type != "cuda":
        return 0.0
    properties = torch.cuda.get_device_properties(device)
    name = catalogue_name(properties.name, properties.total_memory)
    return CATALOGUE[name].device.peak_flops_per_s if name else 0.0


def planned_step_s(plan: Plan) -> float | None:
    """Predicted time of a step in the plan file, if it is there."""
    said: Any = (plan.predicted or {}).get("step_s")
    return float(said) if isinstance(said, int | float) and said > 0 else None


Steps = Mapping[int, StepTimes]
"""One step, by rank."""


def common_steps(by_rank: Sequence[Sequence[StepTimes]]) -> list[Steps]:
    """The steps that every rank has finished, in order."""
    numbered = [{step.number: step for step in steps} for steps in by_rank]
    numbers = set.intersection(*(set(steps) for steps in numbered))
    return [{rank: steps[number] for rank, steps in enumerate(numbered)} for number in sorted(numbers)]


def times_of_passes(plan: Plan, ranks: Sequence[RankTimes], steps: Sequence[Steps]) -> JobTimes:
    """Return where the time of pipelines went; ``ranks``: what each says, whatever steps it has finished."""
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
    """Return what one pipeline took in these steps of all ranks."""
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


_HEADINGS = {"all_to_all": "all-to-all", "ring_wait": "ring wait"}  # of a table, where they are not the share's name


def utilizations(seen: JobTimes, model: ModelSpec | None, peaks: Sequence[float]) -> list[float | None]:
    """See `RankTimes.model_flops_utilization`; None for every rank of pipelines, which have a part of the model.

    Args:
        model: what is trained; None where no cost model describes it.
        peaks: peak rates of the devices, 0 where unknown.
    """
    model = None if seen.pipelines else model
    return [rank.model_flops_utilization(model, peak) for rank, peak in zip(seen.ranks, peaks, strict=True)]


def events(
    seen: JobTimes, plan: Plan, utilization: Sequence[float | None], changes: int, samples: int
) -> list[tuple[str, float, int]]:
    """Events for DeepSpeed's monitor, per rank, per pipeline and of the job: (name, value, samples).

    Args:
        samples: trained on so far, which DeepSpeed's own events count in.
    """
    values: list[tuple[str, float]] = []
    for number, (rank, mfu) in enumerate(zip(seen.ranks, utilization, strict=True)):
        values += [(f"rank{number}/{name}_share", share) for name, share in rank.shares(seen.parts_of_step).items()]
        values.append((f"rank{number}/tokens_per_s", rank.tokens_per_s))
        if mfu is not None:
            values.append((f"rank{number}/mfu", mfu))
    for number, pipeline in enumerate(seen.pipelines):
        values.append((f"pipeline{number}/passes_s", pipeline.passes_s))
        values.append((f"pipeline{number}/predicted_s", pipeline.predicted_s))
    values.append(("step_s", seen.step_s))
    values.append(("tokens_per_s", seen.tokens_per_s(plan)))
    values.append(("imbalance", seen.imbalance))
    values.append(("schedule_changes", float(changes)))
    return [(f"Heterogeneity/{name}", value, samples) for name, value in values]


def times_table(seen: JobTimes, plan: Plan, utilization: Sequence[float | None], changes: int) -> str:
    """One line per rank, and prediction beside measurement for every pipeline and their step.

    Args:
        seen: of the ranks over all steps, of the pipelines in the latest observation.
    """
    steps, names = seen.ranks[0].steps, seen.parts_of_step
    title = (
        f"Where the time of {steps:.0f} steps went, {time_text(seen.step_s)} each: imbalance {seen.imbalance:.2f}, "
        f"{changes} changes of {'layers' if seen.pipelines else 'schedule'}"
    )
    rows: list[tuple[str, ...]] = []
    places = ("pipeline", "stage", "layers") if seen.pipelines else ()
    rates = () if seen.pipelines else ("tokens/s", "MFU")
    columns = ("rank", *places, *(_HEADINGS.get(name, name) for name in names), "rest", *rates)
    for number, (rank, mfu) in enumerate(zip(seen.ranks, utilization, strict=True)):
        cells = [f"{share:.1%}" for share in rank.shares(names).values()]
        if seen.pipelines:
            cells = [*_place_of(plan, number), *cells]
        else:
            cells += [f"{rank.tokens_per_s:,.0f}", "" if mfu is None else f"{mfu:.1%}"]
        rows.append((str(number), *cells))
    return "\n".join([framed_table(columns, rows, title, numbers=True, width=100), *_prediction_lines(seen, plan)])


def _prediction_lines(seen: JobTimes, plan: Plan) -> list[str]:
    """Prediction beside measurement, of pipelines; see `ds_hetero.job.monitor` for replicas."""
    lines = [
        f"passes of pipeline {number}: predicted {time_text(pipeline.predicted_s)} from the measured speeds of its "
        f"stages, measured {time_text(pipeline.passes_s)} "
        f"(prediction {pipeline.predicted_s / pipeline.passes_s - 1:+.1%})"
        for number, pipeline in enumerate(seen.pipelines)
    ]
    if seen.pipelines and (planned_s := planned_step_s(plan)) is not None:
        lines.append(
            f"step: the plan says {time_text(planned_s)}, measured {time_text(seen.step_s)} "
            f"(prediction {planned_s / seen.step_s - 1:+.1%})"
        )
    return lines


def _place_of(plan: Plan, rank: int) -> tuple[str, str, str]:
    place, stage = plan.place_of(rank), plan.stage_of(rank)
    if place is None or stage is None or stage.layers is None:
        return "", "", ""
    return str(place[0]), str(place[1]), f"{stage.layers[0]}-{stage.layers[1] - 1}"
