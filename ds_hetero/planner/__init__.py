"""The searches: which schedule is best for this cluster, model and length, and why.

`plan` is the front door; `strategy` makes a schedule by the name of a strategy; `solve_exact` finds the true optimum of
small cases. Imports neither torch nor DeepSpeed.
"""

from ds_hetero.planner.planning import PlannedSchedule, Rejected, make_problem, plan, plan_workload, schedule_of
from ds_hetero.planner.search.exact import Exact, solve_exact
from ds_hetero.planner.strategies import STRATEGIES, Formula, ProfileTable, fit_formula, profile_table, strategy

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
    "plan_workload",
    "profile_table",
    "schedule_of",
    "solve_exact",
    "strategy",
]
