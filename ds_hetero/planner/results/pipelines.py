"""Result of the search for pipelines: the plan, its prediction, and the baselines that it was compared with."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from ds_hetero.common.reading import JsonDict
from ds_hetero.cost.objective import Objective
from ds_hetero.planner.results.planned import Planned
from ds_hetero.values.plans import Plan

if TYPE_CHECKING:
    from ds_hetero.cost.stages.stage import StageCosts
    from ds_hetero.planner.pipeline_search.evaluate import PlanCandidate
    from ds_hetero.planner.pipeline_search.finish import Finished


class BaselinePlan(NamedTuple):
    """Plan of another planner under the same cost model, or the reason why that planner has none."""

    name: str  # name of planner and plan for people, such as "uniform grid, tp2 pp4 dp1 b1"
    step_s: float | None = None  # predicted time of a step; None without a plan
    value: float | None = None  # value of the objective; None without a plan
    reason: str | None = None  # why there is no plan; None if there is one
    plan: Plan | None = None  # the plan, if a job can be started with it; else None

    def to_dict(self) -> JsonDict:
        """Return plain data for ``--json``."""
        return {"name": self.name, "step_s": self.step_s, "value": self.value, "reason": self.reason}


def busy_ranks(plan: Plan, candidate: PlanCandidate, step_s: float) -> dict[int, float]:
    """Return the share of a step, 0 to 1, in which each rank with work computes.

    Args:
        candidate: the same plan as the search evaluates it, with times of passes.
        step_s: time of the step.
    """
    share_by_rank: dict[int, float] = {}
    for pipeline, placed, cut in zip(plan.pipelines, candidate.placed, candidate.cuts, strict=True):
        for stage, forward_s, backward_s in zip(pipeline.stages, cut.forward_s, cut.backward_s, strict=True):
            share = placed.micro_batches * (forward_s + backward_s) / step_s
            share_by_rank.update(dict.fromkeys(stage.ranks, share))
    return share_by_rank


@dataclass(frozen=True, kw_only=True)
class PlannedPipelines(Planned):
    """The best plan of pipelines, with its prediction and with the baselines."""

    costs: StageCosts  # the cost model that predicted it
    finished: Finished | None  # the plan as the search evaluated it; None if pure sequence parallelism is faster
    objective: Objective  # what the search minimized
    value: float  # value of the objective
    global_batch: int  # samples per step
    num_evaluated: int  # plans that the search evaluated
    interrupted: bool  # True: the user stopped the search
    baselines: dict[str, BaselinePlan]  # by key: "grid" (best uniform grid), "sequence" (pure sequence parallelism)
    reasons: tuple[str, ...]  # sentences that say why the plan looks like this

    @property
    def busy(self) -> dict[int, float]:
        """Share of the step in which each rank with work computes; 1 for pure sequence parallelism."""
        if self.finished is None:
            return {rank: 1.0 for rank in self.plan.ranks if rank not in self.idle_ranks}
        return busy_ranks(self.plan, self.finished.candidate, self.step_s)

    def to_dict(self) -> JsonDict:
        """Return plain data for ``--json``."""
        return {
            "plan": self.plan.to_dict(),
            "planner": self.planner,
            "predicted": self.plan.predicted,
            "objective": self.objective.name,
            "value": self.value,
            "search_s": self.search_s,
            "num_evaluated": self.num_evaluated,
            "interrupted": self.interrupted,
            "baselines": {name: baseline.to_dict() for name, baseline in self.baselines.items()},
            "idle_ranks": list(self.idle_ranks),
            "reasons": list(self.reasons),
        }
