"""Plans of published planners, at which our search begins wherever theirs are cheap, so that it is never worse."""

from __future__ import annotations

from collections.abc import Sequence

from ds_hetero.cost.price import TOO_LONG, Objective
from ds_hetero.cost.stages.stage import StageCosts
from ds_hetero.planner.pipelines.search.evaluate import PlanCandidate
from ds_hetero.planner.published.registry import PLANNERS


def other_plans(
    costs: StageCosts, objective: Objective, samples: int, sizes: Sequence[int]
) -> tuple[PlanCandidate, ...]:
    """Return the plans of other searches that are cheap on this cluster, best first.

    Args:
        costs: the cost model.
        objective: what is made small.
        samples: the global batch.
        sizes: of micro-batches that may be tried.
    """
    searches = [planner.first_pipelines for planner in reversed(PLANNERS)]
    plans = [search(costs, objective, samples, sizes) for search in searches if search is not None]
    fitting = [plan for plan in plans if plan is not None and plan.value < TOO_LONG]
    return tuple(sorted(fitting, key=lambda plan: plan.value))
