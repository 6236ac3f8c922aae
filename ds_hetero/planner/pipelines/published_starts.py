"""Plans of published planners at which our search begins, so that its plan is never slower than theirs."""

from __future__ import annotations

from collections.abc import Sequence

from ds_hetero.cost.objective import TOO_LONG, Objective
from ds_hetero.cost.stages.stage import StageCosts
from ds_hetero.planner.pipeline_search.evaluate import PlanCandidate
from ds_hetero.planner.published.registry import PLANNERS


def published_starts(
    costs: StageCosts, objective: Objective, samples: int, sizes: Sequence[int]
) -> tuple[PlanCandidate, ...]:
    """Return the plans of published planners whose searches are cheap on this cluster, best first.

    Args:
        samples: global batch.
        sizes: samples of a micro-batch that are tried.
    """
    searches = [planner.first_pipelines for planner in reversed(PLANNERS)]
    plans = [search(costs, objective, samples, sizes) for search in searches if search is not None]
    fitting = [plan for plan in plans if plan is not None and plan.value < TOO_LONG]
    return tuple(sorted(fitting, key=lambda plan: plan.value))
