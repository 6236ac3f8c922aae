"""A plan of pipelines of unequal stages, and the plans that other planners would have made."""

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


def busy_ranks(plan: Plan, candidate: PlanCandidate, step_s: float) -> dict[int, float]:
    """Share of a step of ``step_s`` that the ranks of a plan of pipelines, which is ``candidate``, compute."""
    busy = {}
    for pipeline, placed, cut in zip(plan.pipelines, candidate.placed, candidate.cuts, strict=True):
        for stage, forward_s, backward_s in zip(pipeline.stages, cut.forward_s, cut.backward_s, strict=True):
            share = placed.micro_batches * (forward_s + backward_s) / step_s
            busy.update(dict.fromkeys(stage.ranks, share))
    return busy


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
