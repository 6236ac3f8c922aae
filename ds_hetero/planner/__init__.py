"""The planner: finds the best schedule for a cluster, a model and a workload, and says why. It imports no torch.

`plan` searches; `strategy` makes a schedule by the name of a strategy; `ds_hetero.planner.exact` computes the true
optimum of small problems.
"""

from ds_hetero.planner.planning import plan
from ds_hetero.planner.results.schedule import PlannedSchedule, Rejected
from ds_hetero.planner.search.canonical import make_problem, schedule_of
from ds_hetero.planner.strategies import strategy
from ds_hetero.values.baselines import STRATEGIES

__all__ = ["STRATEGIES", "PlannedSchedule", "Rejected", "make_problem", "plan", "schedule_of", "strategy"]
