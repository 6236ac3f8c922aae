"""Starts of the search: the best closed form of every partition of stage I, for every set of working ranks."""

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

M1_IDLE = 12  # most partitions that are tried for a set with idle ranks; chosen, never measured
_IDLE_PARTS = 3  # all sets with idle ranks share one of so many parts of the budget; chosen, never measured


def starts(problem: Problem, budget: EvaluationBudget, shortlist: Shortlist) -> list[Assignment]:
    """Return the best starts over all sets of working ranks and partitions of stage I.

    A set of ranks is skipped if a lower bound of its time, perfect balance over these ranks, is no better than the best
    start so far. Where links are fast this rules out most sets.

    Args:
        shortlist: an empty shortlist; its limit decides which assignments are evaluated to the end.
    """
    best_s = np.inf
    idle_budget = EvaluationBudget(budget.left_s / _IDLE_PARTS)  # in addition to the budget of the set of all ranks
    for active in working_sets(problem):
        if problem.bound_s(active) >= best_s:
            continue
        has_idle = not active.all()
        num_partitions = M1_IDLE if has_idle and problem.num_ranks > EXHAUSTIVE_RANKS else M1
        set_budget = idle_budget if has_idle else budget
        for assignment in best_of_partitions(problem, active, num_partitions, set_budget, shortlist):
            best_s = min(best_s, assignment.time_s)
    return shortlist.best


def best_of_partitions(
    problem: Problem, active: Bools, keep: int, budget: EvaluationBudget, shortlist: Shortlist
) -> Iterator[Assignment]:
    """Yield the best assignment of each of ``keep`` partitions of the active ranks, and add it to the shortlist.

    The iterator ends early when the budget is used up. Otherwise it adds the set of ranks to `Problem.exhausted_sets`.

    Args:
        active: mask of the ranks that work, ``[D]``.
        keep: most partitions that are evaluated.
        shortlist: receives the assignments; its limit decides which of them are evaluated to the end.
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
    problem.exhausted_sets.add(active.tobytes())
