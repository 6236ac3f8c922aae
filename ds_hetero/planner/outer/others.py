"""HexiScale's and Tangram's plans, at which our search begins wherever theirs are cheap, so that it is never worse."""

from __future__ import annotations

from collections.abc import Sequence

from ds_hetero.cost.objective import TOO_LONG, Objective
from ds_hetero.cost.stages.stage import StageCosts
from ds_hetero.planner.outer.hexiscale import plan_hexiscale
from ds_hetero.planner.outer.search.evaluate import Candidate
from ds_hetero.planner.outer.search.search import FEW_RANKS
from ds_hetero.planner.outer.tangram import composition_size, plan_tangram

__all__ = ["TANGRAM_S", "TANGRAM_SIZE", "other_plans"]

TANGRAM_SIZE = 800  # orders of islands x devices up to which Tangram's compositions take about 0.3 s
TANGRAM_S = 0.5  # of the last word on them, by a count of their actions


def other_plans(costs: StageCosts, objective: Objective, samples: int, sizes: Sequence[int]) -> tuple[Candidate, ...]:
    """Return the plans of other searches that are cheap on this cluster, best first.

    Args:
        costs: the cost model.
        objective: what is made small.
        samples: the global batch.
        sizes: of micro-batches that may be tried.
    """
    plans: list[Candidate | None] = []
    if composition_size(costs.pools) <= TANGRAM_SIZE:
        tangram = plan_tangram(costs, objective, samples, sizes, effort_s=TANGRAM_S)
        plans.append(None if tangram is None else tangram.candidate)
    if costs.cluster.num_ranks <= FEW_RANKS:
        plans.append(plan_hexiscale(costs, objective, samples, sizes))
    found = [plan for plan in plans if plan is not None and plan.value < TOO_LONG]
    return tuple(sorted(found, key=lambda plan: plan.value))
