"""Where the search begins: closed forms of every partition of stage I, for every set of working ranks."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from ds_hetero.common.arrays import Bools
from ds_hetero.planner.search.budget import EXHAUSTIVE_RANKS, EvaluationBudget
from ds_hetero.planner.search.closed_forms import ONE_PARTITION, best_assignment
from ds_hetero.planner.search.partitions import M1, groupings, with_idle
from ds_hetero.planner.search.problem import Assignment, Problem
from ds_hetero.planner.search.shortlist import Shortlist
from ds_hetero.planner.search.working_sets import working_sets

M1_IDLE = 12  # partitions tried of a set in which some ranks stay idle; chosen, never measured
_IDLE_PARTS = 3  # sets with idle ranks have a third of the budget among them; chosen, never measured


def starts(problem: Problem, budget: EvaluationBudget, shortlist: Shortlist) -> list[Assignment]:
    """The best of all partitions of stage I, for every set of working ranks that could still win.

    Fewer working ranks need at least the balanced time over their own speeds, which rules most sets out where links are
    fast.

    Args:
        shortlist: an empty one, which says what is worth evaluating to the end.
    """
    best_s = np.inf
    idle_budget = EvaluationBudget(budget.left_s / _IDLE_PARTS)  # besides the one of all ranks
    for active in working_sets(problem):
        if problem.bound_s(active) >= best_s:
            continue
        has_idle = not active.all()
        keep = M1_IDLE if has_idle and problem.num_ranks > EXHAUSTIVE_RANKS else M1
        for assignment in of_partitions(problem, active, keep, idle_budget if has_idle else budget, shortlist):
            best_s = min(best_s, assignment.time_s)
    return shortlist.best


def of_partitions(
    problem: Problem, active: Bools, keep: int, budget: EvaluationBudget, shortlist: Shortlist
) -> Iterator[Assignment]:
    """The best of each of ``keep`` partitions of a set of working ranks, as far as the budget goes; into the shortlist.

    A set whose partitions were all looked at is in `Problem.looked_at`: none of them has more to give.
    """
    if budget.is_spent(ONE_PARTITION):
        return
    for groups in groupings(problem, active, keep):
        if budget.is_spent(ONE_PARTITION):
            return
        all_groups = with_idle(problem, groups, active)
        assignment = best_assignment(problem, all_groups, active, budget, shortlist.limit_s)
        if assignment is not None:
            shortlist.add(assignment)
            yield assignment
    problem.looked_at.add(active.tobytes())
