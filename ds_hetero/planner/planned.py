"""Result of the planner: a plan, its prediction, and how it compares with what was not chosen."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ds_hetero.cluster.topology import DeviceSpec
from ds_hetero.common.reading import JsonDict
from ds_hetero.cost.prediction import Prediction
from ds_hetero.cost.price import Objective, Price, price_of
from ds_hetero.values.plans import Plan
from ds_hetero.values.schedule import Schedule

if TYPE_CHECKING:
    from ds_hetero.cost.stages.stage import StageCosts
    from ds_hetero.planner.pipelines.finish import Finished
    from ds_hetero.planner.pipelines.search.evaluate import PlanCandidate


@dataclass(frozen=True, kw_only=True, slots=True)
class Rejected:
    """A candidate that was not chosen, and why.

    Args:
        name: what it is, for people.
        prediction: None where no such schedule exists.
        reason: one sentence.
    """

    name: str
    prediction: Prediction | None
    reason: str

    def to_dict(self) -> JsonDict:
        """Plain data for ``--json``."""
        return {"name": self.name, "block_s": self.prediction and self.prediction.block_s, "reason": self.reason}


@dataclass(frozen=True, kw_only=True, slots=True)
class Rival:
    """A plan that another planner would have made, under the same cost model.

    Args:
        name: what it is.
        step_s: its step; None if there is none.
        value: what the objective says of it; None if there is none.
        reason: why there is none.
        plan: itself, where it is kept.
    """

    name: str
    step_s: float | None = None
    value: float | None = None
    reason: str | None = None
    plan: Plan | None = None

    def to_dict(self) -> JsonDict:
        """Plain data for ``--json``."""
        return {"name": self.name, "step_s": self.step_s, "value": self.value, "reason": self.reason}


@dataclass(frozen=True, kw_only=True)
class Planned(ABC):
    """A plan as a search hands it out.

    Args:
        plan: what a job runs.
        search_s: time the search took.
        step_s: predicted time of an optimizer step.
        tokens: of a step.
        idle_ranks: without work.
        planner: the published planner whose plan it is; None for ours.
    """

    plan: Plan
    search_s: float
    step_s: float
    tokens: int
    idle_ranks: tuple[int, ...]
    planner: str | None = None

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
    """The chosen schedule of one replica, how long it takes, and how that compares.

    Args:
        prediction: of the schedule, with its bottleneck and the bound of perfect balance.
        name: what the schedule is, for people.
        baselines: the best legal schedule of ``ulysses``, ``ring`` and ``usp``; None where infeasible.
        baseline_names: which one that is, such as ``usp 2x8``.
        baseline_reasons: why, for those that are None.
        rejected: other candidates with reasons.
    """

    prediction: Prediction
    name: str
    baselines: dict[str, Prediction | None]
    baseline_names: dict[str, str]
    baseline_reasons: dict[str, str]
    rejected: tuple[Rejected, ...]

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
    """Share of a step that the ranks of pipelines compute.

    Args:
        plan: of pipelines.
        candidate: the same plan as the search sees it.
        step_s: time of the step.
    """
    return {
        rank: placed.micro_batches * (cut.forward_s[j] + cut.backward_s[j]) / step_s
        for pipeline, placed, cut in zip(plan.pipelines, candidate.placed, candidate.cuts, strict=True)
        for j, stage in enumerate(pipeline.stages)
        for rank in stage.ranks
    }


@dataclass(frozen=True, kw_only=True)
class PlannedPipelines(Planned):
    """Pipelines of unequal stages, what judged them, and how they compare.

    Args:
        costs: the cost model that judged it.
        finished: the plan as the search sees it; None where pure sequence parallelism won.
        objective: what was made small.
        value: of the plan under it.
        global_batch: samples per step.
        num_evaluated: plans looked at.
        interrupted: the search was stopped by the user.
        rivals: by name, such as the best uniform grid.
        reasons: sentences that say why the plan looks like this.
    """

    costs: StageCosts
    finished: Finished | None
    objective: Objective
    value: float
    global_batch: int
    num_evaluated: int
    interrupted: bool
    rivals: dict[str, Rival]
    reasons: tuple[str, ...]

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
