"""The searches: which schedule is best for this cluster, model and length, and why.

`plan` is the front door; `strategy` makes a schedule by the name of a strategy; `exact` finds the true optimum of small
cases. Imports neither torch nor DeepSpeed.
"""

from ds_hetero.planner.exact import Exact, exact
from ds_hetero.planner.plan import Plan, Rejected, make_problem, plan, schedule_of
from ds_hetero.planner.strategies import STRATEGIES, Formula, ProfileTable, fit_formula, profile_table, strategy

__all__ = [
    "STRATEGIES",
    "Exact",
    "Formula",
    "Plan",
    "ProfileTable",
    "Rejected",
    "exact",
    "fit_formula",
    "make_problem",
    "plan",
    "profile_table",
    "schedule_of",
    "strategy",
]
