"""Descent over partitions: ranks change groups one by one, where there are few; then other ranks work.

Stage I lists partitions by rules and looks at each once; the neighbours of a good one are often better.
"""

from __future__ import annotations

from ds_hetero.planner.search.budget import EXHAUSTIVE_RANKS, EvaluationBudget
from ds_hetero.planner.search.closed_forms import best_assignment
from ds_hetero.planner.search.descent import LEAST_MOVE_GAIN, descend
from ds_hetero.planner.search.moves import STEPS
from ds_hetero.planner.search.partitions import neighbours
from ds_hetero.planner.search.problem import Assignment, Problem
from ds_hetero.planner.search.shortlist import Shortlist
from ds_hetero.planner.search.starts import M1_IDLE, of_partitions
from ds_hetero.planner.search.working_sets import working_sets

# Chosen, never measured alone; `python -m benchmarks.planner exact --cards` compares the whole with the optimum.
REGROUP_RANKS = 32  # ranks up to which ranks change groups one by one
_REGROUP_ROUNDS = 4  # of neighbours of the best, and of other working ranks
_DESCENTS, _SLOWEST_DESCENT = 2, 1.1  # neighbours that are refined, and how much slower than the best they may be
_MOST_SETS = 12  # of working ranks that are tried once more, those of the best bounds
_LEAST_GAIN_OF_OTHERS = 1e-5  # of the time, that other working ranks must save


def regroup(problem: Problem, start: Assignment, budget: EvaluationBudget) -> Assignment:
    """Descend over partitions: the best neighbour with its own closed forms, as long as that gets better."""
    best = start
    for _ in range(_REGROUP_ROUNDS):
        active = best.tokens > 0
        shortlist = Shortlist(_DESCENTS, _SLOWEST_DESCENT)
        for groups in neighbours(problem, best.groups):
            assignment = best_assignment(problem, groups, active, budget, shortlist.limit_s)
            if assignment is not None:
                shortlist.add(assignment)
        refined = [descend(problem, option, STEPS[1:3], budget.split(4)) for option in shortlist.best]
        option = min(refined, key=lambda assignment: assignment.time_s, default=best)
        if option.time_s >= best.time_s * (1 - LEAST_MOVE_GAIN):
            break
        best = option
    return best


def with_other_ranks(problem: Problem, assignments: list[Assignment]) -> list[Assignment]:
    """Put a faster assignment in which other ranks work in front, if there is one.

    Stage I shares one small budget among all sets of working ranks: where links are slow, many of them could win, and
    most are not looked at. Here each has a part of a budget of its own, and so have those that work in the best one. Of
    up to `EXHAUSTIVE_RANKS` stage I looks at all.
    """
    if not assignments or not EXHAUSTIVE_RANKS < problem.num_ranks <= REGROUP_RANKS:
        return assignments
    best = min(assignments, key=lambda assignment: assignment.time_s)
    for _ in range(_REGROUP_ROUNDS):
        start = _start_of_other_ranks(problem, best)
        if start is None:
            break
        budget = EvaluationBudget.for_ranks(problem.num_ranks)
        regrouped = regroup(problem, start, budget.split(2))
        best = descend(problem, regrouped, STEPS, budget)
        assignments = [best, *assignments]
    return assignments


def _start_of_other_ranks(problem: Problem, best: Assignment) -> Assignment | None:
    """The fastest start of sets of working ranks that were not looked at whole, if it is faster than ``best``."""
    sets = [best.tokens > 0, *working_sets(problem)]
    new_sets = [active for active in sets if active.tobytes() not in problem.looked_at]
    promising = [active for active in new_sets if problem.bound_s(active) < best.time_s]
    promising = sorted(promising, key=problem.bound_s)[:_MOST_SETS]
    to_beat = best._replace(time_s=best.time_s * (1 - _LEAST_GAIN_OF_OTHERS))
    shortlist = Shortlist(1)
    shortlist.add(to_beat)
    budget = EvaluationBudget.for_ranks(problem.num_ranks)
    for i, active in enumerate(promising):
        budget_of_set = budget.split(len(promising) - i)
        for _ in of_partitions(problem, active, M1_IDLE, budget_of_set, shortlist):
            pass
        budget.left_s += budget_of_set.left_s
    (start,) = shortlist.best
    return None if start is to_beat else start
