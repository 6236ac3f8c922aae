"""Find the schedule of a pipeline stage whose devices share sequences: tokens and heads of every device."""

from __future__ import annotations

from ds_hetero.cluster.topology import Cluster
from ds_hetero.cost.calibrated import CalibratedCostModel
from ds_hetero.models.shapes import ModelSpec
from ds_hetero.planner.search.budget import EvaluationBudget
from ds_hetero.planner.search.canonical import make_problem, schedule_of
from ds_hetero.planner.search.search import search
from ds_hetero.values.schedule import Schedule

# The search of a stage's schedule gets one of so many parts of a usual budget, since there are many stages. Chosen,
# never measured.
STAGE_PARTS = 4


class ScheduleFinder:
    """Finds schedules for a sequence length; every set of devices is searched once for each model.

    A model is another one for tensor groups, whose devices compute a part of it.
    """

    def __init__(self) -> None:
        self._schedules: dict[tuple[Cluster, ModelSpec], Schedule | None] = {}

    def __call__(self, cost: CalibratedCostModel) -> Schedule | None:
        """Return the fastest schedule of the devices of a stage; None if nothing fits into memory.

        Args:
            cost: the cost model of one layer on these devices.
        """
        key = cost.cluster, cost.model
        if key not in self._schedules:
            problem, rank_of = make_problem(cost)
            assignments = search(problem, EvaluationBudget.for_ranks(problem.num_ranks).split(STAGE_PARTS))
            self._schedules[key] = schedule_of(problem, assignments[0], rank_of) if assignments else None
        return self._schedules[key]
