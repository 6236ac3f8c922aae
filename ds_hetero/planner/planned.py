"""Result of the planner: a plan, its prediction, and how it compares with what was not chosen.

Candidates of the planner: the best schedules of the search and every baseline, all under one cost model.

Sentences about schedules: what one is, why another was not chosen, why none fits.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from ds_hetero.cluster.topology import Cluster, DeviceSpec
from ds_hetero.common.arrays import Floats
from ds_hetero.common.reading import JsonDict
from ds_hetero.cost.model import CostModel, Prediction
from ds_hetero.cost.price import Objective, Price, price_of
from ds_hetero.cost.terms.memory_parts import MemoryParts
from ds_hetero.planner.search.memory_fit import longest_of_assignment
from ds_hetero.values.baselines import COMPARED, all_baselines
from ds_hetero.values.plans import Plan
from ds_hetero.values.schedule import Schedule

if TYPE_CHECKING:
    from ds_hetero.cost.stages.stage import StageCosts
    from ds_hetero.planner.pipeline_search.evaluate import PlanCandidate
    from ds_hetero.planner.pipeline_search.finish import Finished

SIMPLER = 1e-6  # a baseline whose time is this close to the best of the search is preferred


class ScheduleCandidate(NamedTuple):
    """A schedule and its prediction."""

    name: str  # what it is, for people
    schedule: Schedule  # ranks as in the cluster
    prediction: Prediction  # of the schedule under the planner's cost model

    @classmethod
    def of(cls, schedule: Schedule, cost: CostModel) -> ScheduleCandidate:
        """A schedule of no strategy, by what it is."""
        return cls(describe(schedule, cost.cluster), schedule, cost.predict(schedule))

    @property
    def kind(self) -> str:
        """The strategy that a baseline belongs to: ``usp`` for ``usp 4x2``."""
        return self.name.split()[0]


@dataclass(frozen=True, slots=True)
class Baselines:
    """Ulysses, Ring and all USP meshes under one cost model."""

    candidates: tuple[ScheduleCandidate, ...]  # those that exist, whether they fit into memory or not
    missing: dict[str, str]  # the reason for each of `COMPARED` that does not exist

    @classmethod
    def under(cls, cost: CostModel) -> Baselines:
        """Predict every baseline of the cost model's cluster and model."""
        num_ranks, seq_len = cost.cluster.num_ranks, cost.workload.seq_len
        if seq_len < num_ranks:
            return cls((), dict.fromkeys(COMPARED, f"{num_ranks} ranks cannot share {seq_len} tokens"))
        schedules, missing = all_baselines(num_ranks, cost.model.num_heads, cost.model.num_kv_heads)
        candidates = tuple(
            ScheduleCandidate(name, schedule, cost.predict(schedule)) for name, schedule in schedules.items()
        )
        return cls(candidates, missing)

    def of_kind(self, kind: str) -> tuple[ScheduleCandidate, ...]:
        """All candidates of one of `COMPARED`."""
        return tuple(candidate for candidate in self.candidates if candidate.kind == kind)

    def best(self, kind: str) -> ScheduleCandidate | None:
        """The fastest one of a kind that fits into memory; None if there is none."""
        feasible = [candidate for candidate in self.of_kind(kind) if candidate.prediction.feasible]
        return min(feasible, key=lambda candidate: candidate.prediction.iteration_s, default=None)

    def why_not(self, kind: str) -> str:
        """Why `best` is None: no such schedule exists, or none fits."""
        if kind in self.missing:
            return self.missing[kind]
        predictions = [candidate.prediction for candidate in self.of_kind(kind)]
        return str(min(predictions, key=lambda prediction: max(prediction.memory_bytes)).reason)


def fastest(searched: Sequence[ScheduleCandidate], baselines: Sequence[ScheduleCandidate]) -> ScheduleCandidate | None:
    """The fastest candidate that fits into memory; a baseline if it is as fast as any; None if nothing fits."""
    candidates = [*searched, *baselines]
    feasible = [(i, candidate) for i, candidate in enumerate(candidates) if candidate.prediction.feasible]
    if not feasible:
        return None
    least_s = min(candidate.prediction.iteration_s for _, candidate in feasible)
    close = [(i, each) for i, each in feasible if each.prediction.iteration_s <= least_s * (1 + SIMPLER)]
    return min(close, key=lambda item: (item[0] < len(searched), item[1].prediction.iteration_s, item[0]))[1]


class Rejected(NamedTuple):
    """A candidate that was not chosen, and why."""

    name: str  # what it is, for people
    prediction: Prediction | None  # None where no such schedule exists
    reason: str  # one sentence

    def to_dict(self) -> JsonDict:
        """Plain data for ``--json``."""
        return {"name": self.name, "block_s": self.prediction and self.prediction.block_s, "reason": self.reason}


class Rival(NamedTuple):
    """A plan that another planner would have made, under the same cost model."""

    name: str  # what it is
    step_s: float | None = None  # its step; None if there is none
    value: float | None = None  # what the objective says of it; None if there is none
    reason: str | None = None  # why there is none
    plan: Plan | None = None  # itself, where it is kept

    def to_dict(self) -> JsonDict:
        """Plain data for ``--json``."""
        return {"name": self.name, "step_s": self.step_s, "value": self.value, "reason": self.reason}


@dataclass(frozen=True, kw_only=True)
class Planned(ABC):
    """A plan as a search hands it out."""

    plan: Plan  # what a job runs
    search_s: float  # time the search took
    step_s: float  # predicted time of an optimizer step
    tokens: int  # of a step
    idle_ranks: tuple[int, ...]  # without work
    planner: str | None = None  # the published planner whose plan it is; None for ours

    @abstractmethod
    def to_dict(self) -> JsonDict:
        """Plain data for ``--json``."""

    @property
    @abstractmethod
    def busy(self) -> dict[int, float]:
        """Share of the step that every rank with work computes."""

    @property
    def tokens_per_s(self) -> float:
        """Tokens of a step over its time."""
        return self.tokens / self.step_s

    def price(self, devices: Sequence[DeviceSpec], flops_per_token: float) -> Price:
        """Price a step on the devices of all ranks, see `price_of`."""
        return price_of(devices, self.busy, self.step_s, self.tokens, flops_per_token)


@dataclass(frozen=True, kw_only=True)
class PlannedSchedule(Planned):
    """The chosen schedule of one replica, how long it takes, and how that compares."""

    prediction: Prediction  # of the schedule, with its bottleneck and the bound of perfect balance
    name: str  # what the schedule is, for people
    baselines: dict[str, Prediction | None]  # the best ``ulysses``, ``ring`` and ``usp``; None where infeasible
    baseline_names: dict[str, str]  # which one that is, such as ``usp 2x8``
    baseline_reasons: dict[str, str]  # why, for those that are None
    rejected: tuple[Rejected, ...]  # other candidates with reasons

    @property
    def busy(self) -> dict[int, float]:
        """Share of a block that every rank with work computes."""
        seconds, block_s = self.prediction.busy_s, self.prediction.block_s
        return {rank: busy_s / block_s for rank, busy_s in enumerate(seconds) if rank not in self.idle_ranks}

    @property
    def schedule(self) -> Schedule:
        """The schedule of the plan; ranks as in the cluster."""
        return self.plan.schedules[0]

    @property
    def gain(self) -> float | None:
        """Throughput over the strongest baseline; None where no baseline is feasible."""
        rates = [p.tokens_per_s for p in self.baselines.values() if p is not None]
        return self.prediction.tokens_per_s / max(rates) if rates else None

    @property
    def of_bound(self) -> float:
        """Share of the speed at perfect balance with free communication that the schedule reaches."""
        return self.prediction.bound_s / self.prediction.block_s

    def to_dict(self) -> JsonDict:
        """Plain data for ``--json``."""
        return {
            "schedule": self.schedule.to_dict(),
            "name": self.name,
            "planner": self.planner,
            "search_s": self.search_s,
            "predicted": self.prediction.to_dict(),
            "baselines": {name: p and p.to_dict() for name, p in self.baselines.items()},
            "baseline_names": self.baseline_names,
            "baseline_reasons": self.baseline_reasons,
            "gain": self.gain,
            "of_bound": self.of_bound,
            "idle_ranks": list(self.idle_ranks),
            "rejected": [rejected.to_dict() for rejected in self.rejected],
        }


def busy_ranks(plan: Plan, candidate: PlanCandidate, step_s: float) -> dict[int, float]:
    """Share of a step of ``step_s`` that the ranks of a plan of pipelines, which is ``candidate``, compute."""
    return {
        rank: placed.micro_batches * (cut.forward_s[j] + cut.backward_s[j]) / step_s
        for pipeline, placed, cut in zip(plan.pipelines, candidate.placed, candidate.cuts, strict=True)
        for j, stage in enumerate(pipeline.stages)
        for rank in stage.ranks
    }


@dataclass(frozen=True, kw_only=True)
class PlannedPipelines(Planned):
    """Pipelines of unequal stages, what judged them, and how they compare."""

    costs: StageCosts  # the cost model that judged it
    finished: Finished | None  # the plan as the search sees it; None where pure sequence parallelism won
    objective: Objective  # what was made small
    value: float  # of the plan under it
    global_batch: int  # samples per step
    num_evaluated: int  # plans looked at
    interrupted: bool  # the search was stopped by the user
    rivals: dict[str, Rival]  # by name, such as the best uniform grid
    reasons: tuple[str, ...]  # sentences that say why the plan looks like this

    @property
    def busy(self) -> dict[int, float]:
        """Share of the step that every rank with work computes; all of it where sequence parallelism alone won."""
        if self.finished is None:
            return {rank: 1.0 for rank in self.plan.ranks if rank not in self.idle_ranks}
        return busy_ranks(self.plan, self.finished.candidate, self.step_s)

    def to_dict(self) -> JsonDict:
        """Plain data for ``--json``."""
        return {
            "plan": self.plan.to_dict(),
            "planner": self.planner,
            "predicted": self.plan.predicted,
            "objective": self.objective.name,
            "value": self.value,
            "search_s": self.search_s,
            "num_evaluated": self.num_evaluated,
            "interrupted": self.interrupted,
            "baselines": {name: rival.to_dict() for name, rival in self.rivals.items()},
            "idle_ranks": list(self.idle_ranks),
            "reasons": list(self.reasons),
        }


AS_FAST = 1.0005  # times this close are the same in a table
_WORTH = 0.1  # of the missing memory: a change that saves less is not named


def idle_ranks(schedule: Schedule) -> tuple[int, ...]:
    """Ranks that get neither tokens nor heads, group after group."""
    return tuple(
        rank
        for group in schedule.groups
        for rank, tokens, heads in zip(group.ranks, group.tokens, group.heads, strict=True)
        if not tokens + heads
    )


def describe(schedule: Schedule, cluster: Cluster) -> str:
    """A schedule in a line: ``ring of 3 groups: 2 x (1 H100-SXM-80GB + 3 L40S), 8 A100-SXM-80GB``."""
    idle = idle_ranks(schedule)
    makeups: dict[str, int] = {}
    for group in schedule.ring_groups:
        names = [cluster.devices[rank].name for rank in group.ranks if rank not in idle]
        counts = {name: names.count(name) for name in dict.fromkeys(names)}
        makeup = " + ".join(f"{count} {name}" for name, count in counts.items())
        makeups[makeup] = makeups.get(makeup, 0) + 1
    listed = ", ".join(f"{count} x ({makeup})" if count > 1 else makeup for makeup, count in makeups.items())
    shape = "one group" if schedule.ring_size == 1 else f"ring of {schedule.ring_size} groups"
    return f"{shape}: {listed}" + (f"; {len(idle)} idle" if idle else "")


def compared(name: str, prediction: Prediction, best: Prediction) -> Rejected:
    """The candidate ``name`` with the reason why the one of prediction ``best`` is preferred."""
    if not prediction.feasible:
        reason = f"does not fit: {prediction.reason}"
    else:
        reason = f"{slower_text(prediction.iteration_s / best.iteration_s)}; {prediction.bottleneck.text}"
    return Rejected(name=name, prediction=prediction, reason=reason)


def slower_text(times: float) -> str:
    """How a candidate that takes ``times`` the time of the best one compares with it."""
    if times < AS_FAST:
        return "as fast"
    return f"{100 * (times - 1):.1f} % slower" if times < 2 else f"takes {times:.1f} times as long"


def does_not_fit(cost: CostModel, candidates: Sequence[ScheduleCandidate]) -> str:
    """By how much the best attempt misses, on which rank, and what would fit."""
    work = cost.workload

    def excess_D(candidate: ScheduleCandidate) -> Floats:
        return np.asarray(candidate.prediction.memory_bytes) - cost.capacity_bytes_D

    nearest = min(candidates, key=lambda candidate: float(excess_D(candidate).max()))
    over_D = excess_D(nearest)
    parts = cost.memory_parts(*cost.arrays(nearest.schedule)).of_rank(int(over_D.argmax()))
    longest = longest_of_assignment(cost)
    remedies = [f"sequences of up to about {longest} tokens"] if longest else []
    offloads = not cost.cluster.devices[int(over_D.argmax())].shares_host_memory
    remedies += _remedies(cost, parts, _WORTH * float(over_D.max()), offloads=offloads)
    return (
        f"no schedule of {cost.model.name} with {work.seq_len} tokens fits on {cost.cluster.num_ranks} devices. "
        f"At the nearest one {nearest.prediction.reason}. What would fit or help: "
        f"{', '.join((*remedies, 'more or larger devices'))}."
    )


def _remedies(cost: CostModel, parts: MemoryParts, least: float, *, offloads: bool) -> list[str]:
    """Changes by the names that ``fit`` gives them, those first that save the most.

    Args:
        least: bytes that a change has to be able to save.
        offloads: what is offloaded leaves the memory of that rank.
    """
    work = cost.workload
    states = parts.weights + parts.gradients + parts.optimizer_state
    may_step_there = offloads and work.zero_stage > 0 and not work.offload_optimizer
    saved = {
        "tiled loss": 0.0 if work.tiled_logits else parts.logits,
        "tiled MLP and loss": 0.0 if work.tiled_mlp else parts.layer + (0.0 if work.tiled_logits else parts.logits),
        "activation checkpointing": 0.0 if work.activation_checkpointing else parts.activations,
        "activation offload": parts.activations if offloads and not work.offload_activations else 0.0,
        "ZeRO stage 3": states if work.zero_stage < 3 else 0.0,
        "optimizer offload": parts.optimizer_state if may_step_there else 0.0,
        "smaller gradient buckets": parts.bucket if work.zero_stage else 0.0,
        "one sequence per micro-batch": parts.activations + parts.logits if work.micro_batch > 1 else 0.0,
    }
    by_size = sorted(saved.items(), key=lambda item: -item[1])
    return [name for name, size in by_size if size and size >= least]
