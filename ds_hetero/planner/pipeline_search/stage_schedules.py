"""Schedules of stages on unlike devices: tokens and heads by speed, from the search of schedules."""

from __future__ import annotations

from ds_hetero.cluster.topology import Cluster
from ds_hetero.cost.calibrated import CalibratedCostModel
from ds_hetero.planner.search.budget import EvaluationBudget
from ds_hetero.planner.search.canonical import make_problem, schedule_of
from ds_hetero.planner.search.search import search
from ds_hetero.values.schedule import Schedule

# Parts of the budget of a search of schedules, of which a stage's search has one: stages are many. Chosen, never
# measured.
STAGE_PARTS = 4


class ScheduleFinder:
    """Finds schedules for the layers of one model and one length of sequences, each once."""

    def __init__(self) -> None:
        self._found: dict[Cluster, Schedule | None] = {}

    def __call__(self, cost: CalibratedCostModel) -> Schedule | None:
        """Return the fastest schedule of a few devices; None if nothing fits.

        Args:
            cost: the cost model of one layer on these devices.
        """
        if cost.cluster not in self._found:
            problem, rank_of = make_problem(cost)
            best_first = search(problem, EvaluationBudget.for_ranks(problem.num_ranks).split(STAGE_PARTS))
            self._found[cost.cluster] = schedule_of(problem, best_first[0], rank_of) if best_first else None
        return self._found[cost.cluster]
