"""The planner: which schedule is best for this cluster, model and workload, and why. It imports no torch.

`plan` searches; `strategy` makes a schedule by the name of a strategy; `solve_exact` computes the true optimum of small
cases.
"""

from ds_hetero.baselines import STRATEGIES
from ds_hetero.planner.exact import Exact, solve_exact
from ds_hetero.planner.hetero_ring import Formula, ProfileTable, fit_formula, profile_table
from ds_hetero.planner.planned_schedule import PlannedSchedule, Rejected
from ds_hetero.planner.planning import plan
from ds_hetero.planner.search.canonical import make_problem, schedule_of
from ds_hetero.planner.strategies import strategy

__all__ = [
    "STRATEGIES",
    "Exact",
    "Formula",
    "PlannedSchedule",
    "ProfileTable",
    "Rejected",
    "fit_formula",
    "make_problem",
    "plan",
    "profile_table",
    "schedule_of",
    "solve_exact",
    "strategy",
]
