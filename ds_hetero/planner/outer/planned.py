"""What the search for pipelines hands out: the plan, what judged it, and what it is compared with."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ds_hetero.cost.objective import Objective
from ds_hetero.cost.stages.stage import StageCosts
from ds_hetero.planner.outer.finish import Finished
from ds_hetero.plans import Plan

__all__ = ["PlannedPipelines", "Rival"]


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

    def to_dict(self) -> dict[str, Any]:
        """Plain data for ``--json``."""
        return {"name": self.name, "step_s": self.step_s, "value": self.value, "reason": self.reason}


@dataclass(frozen=True, kw_only=True, slots=True)
class PlannedPipelines:
    """A plan, its prediction, and how it compares.

    Args:
        plan: the value of the plan file.
        costs: the cost model that judged it.
        finished: the plan as the search sees it; None where pure sequence parallelism won.
        objective: what was made small.
        value: of the plan under it.
        global_batch: samples per step.
        search_s: time the search took.
        num_evaluated: plans looked at.
        interrupted: the search was stopped by the user.
        rivals: by name, such as the best uniform grid.
        reasons: sentences that say why the plan looks like this.
    """

    plan: Plan
    costs: StageCosts
    finished: Finished | None
    objective: Objective
    value: float
    global_batch: int
    search_s: float
    num_evaluated: int
    interrupted: bool
    rivals: dict[str, Rival]
    reasons: tuple[str, ...]

    @property
    def step_s(self) -> float:
        """Predicted time of an optimizer step."""
        assert self.plan.predicted is not None
        return float(self.plan.predicted["step_s"])

    @property
    def tokens_per_s(self) -> float:
        """Tokens of the global batch over the time of a step."""
        return self.global_batch * self.costs.seq_len / self.step_s

    @property
    def idle_ranks(self) -> tuple[int, ...]:
        """Ranks without work."""
        return tuple(sorted(set(range(self.costs.cluster.num_ranks)) - set(self.plan.ranks)))

    def to_dict(self) -> dict[str, Any]:
        """Plain data for ``--json``."""
        return {
            "plan": self.plan.to_dict(),
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
