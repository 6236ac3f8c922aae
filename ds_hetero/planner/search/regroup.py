"""Local search over partitions: move one rank to another group at a time; then try other sets of working ranks.

Stage I proposes partitions by rules and evaluates each once. The neighbours of a good partition are often better.
"""

from __future__ import annotations

from ds_hetero.planner.search.budget import EXHAUSTIVE_RANKS, EvaluationBudget
from ds_hetero.planner.search.closed_forms import best_assignment
from ds_hetero.planner.search.descent import LEAST_MOVE_GAIN, descend
from ds_hetero.planner.search.moves import STEPS
from ds_hetero.planner.search.partitions import neighbours
from ds_hetero.planner.search.problem import Assignment, Problem
from ds_hetero.planner.search.shortlist import Shortlist
from ds_hetero.planner.search.starts import M1_IDLE, best_of_partitions
from ds_hetero.planner.search.working_sets import working_sets

# Chosen, never measured alone; `python -m benchmarks.planner exact --cards` compares the whole with the optimum.
REGROUP_RANKS = 32  # most ranks with which partitions are searched in this way
_REGROUP_ROUNDS = 4  # most rounds over the neighbours of the best, and over other sets of working ranks
_REFINED_NEIGHBOURS = 2  # number of best neighbours that descend in heads and tokens
_SLOWEST_REFINED = 1.1  # most time of such a neighbour, as a multiple of the best neighbour's
_REFINED_PARTS = 4  # a descent gets one of so many parts of the remaining budget
_MAX_SETS_RETRIED = 12  # most sets of working ranks that are tried in a round, those with the best bounds
_LEAST_SET_GAIN = 1e-5  # relative gain of time that another set of working ranks must have


def regroup(problem: Problem, start: Assignment, budget: EvaluationBudget) -> Assignment:
    """Go from partition to partition as long as that saves time; return the best assignment.

    A round computes closed forms for every neighbour of the best partition (see `neighbours`), descends from the best
    two of them and goes on from the better one.
    """
    best = start
    for _ in range(_REGROUP_ROUNDS):
        refined = _best_neighbour(problem, best, budget)
        if refined is None or refined.time_s >= best.time_s * (1 - LEAST_MOVE_GAIN):
            break
        best = refined
    return best


def _best_neighbour(problem: Problem, current: Assignment, budget: EvaluationBudget) -> Assignment | None:
    """Return the best assignment in a neighbouring partition with the same working ranks; None if none fits."""
    active = current.tokens > 0
    shortlist = Shortlist(_REFINED_NEIGHBOURS, _SLOWEST_REFINED)
    for groups in neighbours(problem, current.groups):
        assignment = best_assignment(problem, groups, active, budget, shortlist.limit_s)
        if assignment is not None:
            shortlist.add(assignment)
    refined = []
    for assignment in shortlist.best:
        refined.append(descend(problem, assignment, STEPS[1:3], budget.split(_REFINED_PARTS)))
    return min(refined, key=lambda assignment: assignment.time_s, default=None)


def with_other_ranks(problem: Problem, assignments: list[Assignment]) -> list[Assignment]:
    """Try other sets of working ranks; return the assignments with those that are faster than the best in front.

    Stage I gives all sets with idle ranks one small budget, so over slow links, where many sets could win, most stay
    unevaluated. Here every such set has a separate budget; so has the set of the best assignment, if stage I did not
    evaluate all its partitions. Up to `EXHAUSTIVE_RANKS` ranks this is skipped, since stage I evaluates all sets.
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
    """Return the fastest start over sets that stage I did not fully evaluate; None if none is faster than ``best``."""
    sets = [best.tokens > 0, *working_sets(problem)]
    new_sets = [active for active in sets if active.tobytes() not in problem.exhausted_sets]
    possible_sets = [active for active in new_sets if problem.bound_s(active) < best.time_s]
    promising_sets = sorted(possible_sets, key=problem.bound_s)[:_MAX_SETS_RETRIED]
    # The shortlist has one place. It begins with the time to beat, so that slower starts are not evaluated to the end.
    time_to_beat = best._replace(time_s=best.time_s * (1 - _LEAST_SET_GAIN))
    shortlist = Shortlist(1)
    shortlist.add(time_to_beat)
    budget = EvaluationBudget.for_ranks(problem.num_ranks)
    for i, active in enumerate(promising_sets):
        set_budget = budget.split(len(promising_sets) - i)
        for _ in best_of_partitions(problem, active, M1_IDLE, set_budget, shortlist):
            pass  # the shortlist keeps the best
        budget.left_s += set_budget.left_s  # the next sets get what this one did not use
    (start,) = shortlist.best
    return None if start is time_to_beat else start
