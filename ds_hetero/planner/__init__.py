"""The planner: which schedule is best for this cluster, model and workload, and why. It imports no torch.

`plan` searches; `strategy` makes a schedule by the name of a strategy; `ds_hetero.planner.exact` computes the true
optimum of small cases.
"""

from ds_hetero.planner.planning import plan
from ds_hetero.planner.results.schedule import PlannedSchedule, Rejected
from ds_hetero.planner.search.canonical import make_problem, schedule_of
from ds_hetero.planner.strategies import strategy
from ds_hetero.values.baselines import STRATEGIES

__all__ = ["STRATEGIES", "PlannedSchedule", "Rejected", "make_problem", "plan", "schedule_of", "strategy"]
