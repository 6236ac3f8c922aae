"""The search for a schedule: HexiSeq's three stages, and further steps that find what its descent misses.

    step                what it does                                                         module
    stage I             proposes partitions into groups, and sets of working ranks           partitions, working_sets
    stage II            computes heads and tokens in closed form; the best are starts        starts, closed_forms
    order               orders the ring so that it has fewer slow links                      ring_order
    caps                lowers what is sent over slow links                                  all_to_all_caps
    stage III           improves heads and tokens, in three rounds with ever fewer starts    descent, moves
    regroup             before the third round, moves ranks to other groups one by one       regroup
    order               reorders the ring where another order has become faster              ring_order
    whole tokens        if token units are coarse, searches in single tokens, and rounds     unit_moves
    other ranks         tries sets of working ranks for which stage I had no budget          regroup
    once more           moves heads of all ranks of a kind, if a round's budget ended before descent
    plainer             gives equal ranks equal shares, slow ranks no more than fast ones    equal_ranks
    last descent        moves all ranks at once where no pair helps; gains the last 0.1 %    directions, descent

Every evaluation is a call of the cost model and is counted against an `EvaluationBudget`. Nothing reads a clock, and
ties go to the earlier candidate. Steps after stage III have separate budgets, since stage III uses all of the first
one. Source: HexiSeq (arXiv:2605.07569), section 4.3 and Algorithm 1.

`benchmarks.search_steps` leaves out one step at a time; docs/evidence/planner.md has its table. On 35 clusters, without
one of the following steps, no plan was slower by more than 0.01 %: merged nodes, groups of equal speed and sets of
working ranks (all of stage I), both orders, whole tokens, once more, plainer, all directions. They are kept, since one
step may find what another one would have found.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

from ds_hetero.planner.search.all_to_all_caps import cap_all_to_all
from ds_hetero.planner.search.budget import EXHAUSTIVE_RANKS, FEW_RANKS, THOROUGH_RANKS, EvaluationBudget
from ds_hetero.planner.search.descent import descend
from ds_hetero.planner.search.directions import in_all_directions
from ds_hetero.planner.search.equal_ranks import share_equally, trade_places
from ds_hetero.planner.search.memory_fit import has_room
from ds_hetero.planner.search.moves import STEPS
from ds_hetero.planner.search.problem import Assignment, Problem
from ds_hetero.planner.search.regroup import REGROUP_RANKS, regroup, with_other_ranks
from ds_hetero.planner.search.ring_order import best_order
from ds_hetero.planner.search.shortlist import Shortlist, best_of, working_partition
from ds_hetero.planner.search.starts import starts
from ds_hetero.planner.search.unit_moves import round_to_units

M2 = 16  # plans refined by stage III; HexiSeq's value


class _Round(NamedTuple):
    """A round of stage III, in which some assignments descend."""

    keep: int  # most assignments that take part
    slower: float  # most time of such an assignment, as a multiple of the best one's
    steps: tuple[float, ...]  # step sizes of the descents


# On a node or two of unlike devices many starts are equally good. So few go on, and these have more budget each. Chosen
# by `python -m benchmarks.planner exact --cards`.
STAGE_3 = (_Round(M2, 1.25, STEPS[:2]), _Round(6, 1.1, STEPS[1:4]), _Round(2, 1.03, STEPS))
STAGE_3_OF_FEW = (_Round(6, 1.15, STEPS[:2]), _Round(3, 1.05, STEPS[1:4]), _Round(1, 1.0, STEPS))
THOROUGH_STAGE_3 = (_Round(2 * M2, 1.4, STEPS[:2]), _Round(M2, 1.25, STEPS[1:4]), _Round(6, 1.1, STEPS))
SLOWEST_START = 1.4  # most time of a start, as a multiple of the best one's; chosen, never measured
FINE_STEPS = (1e-3, 3e-4, 1e-4)  # step sizes of the last descent; chosen, never measured
NUM_ONCE_MORE = 2  # assignments that descend once more; chosen, never measured
NEAR_FLOOR = 1.0005  # a start this near to `Problem.floor_s`, as a ratio, cannot gain much; chosen, never measured

# Parts of the budget: a third for the starts; of the rest a sixth for orders and caps; then equal parts for the three
# rounds of stage III. Chosen, never measured.
_PARTS_OF_STARTS, _PARTS_OF_ORDERS = 3, 6


def search(problem: Problem, budget: EvaluationBudget | None = None) -> list[Assignment]:
    """Return the best assignments, best first, one for each partition of the working ranks; empty if nothing fits.

    Args:
        budget: for stages I to III; left out, `EvaluationBudget.for_ranks`.
    """
    if not has_room(problem.cost):
        return []
    budget = budget or EvaluationBudget.for_ranks(problem.num_ranks)
    rounds = _rounds(problem.num_ranks)
    first_plans = starts(problem, budget.split(_PARTS_OF_STARTS), Shortlist(rounds[0].keep, SLOWEST_START))
    if first_plans and first_plans[0].time_s <= NEAR_FLOOR * problem.floor_s:  # no search could gain more
        best, *slower_plans = first_plans
        return [in_all_directions(problem, best), *slower_plans]
    ordered = _with_orders_and_caps(problem, first_plans, budget.split(_PARTS_OF_ORDERS))
    results_by_round = _stage_3(problem, ordered, rounds, budget)
    refined = [_reorder(problem, assignment) for assignment in results_by_round[-1]]
    refined = _with_whole_tokens(problem, refined)
    refined = with_other_ranks(problem, refined)
    refined = [*_once_more(problem, refined), *refined]
    plainer = [share_equally(problem, trade_places(problem, assignment)) for assignment in refined]
    final = best_of(plainer, M2)
    if final:
        final[0] = _last_descent(problem, final[0])
    return _fill_up(final, list(itertools.chain.from_iterable(results_by_round)))


def first_look(problem: Problem, budget: EvaluationBudget) -> Assignment | None:
    """Return the best start after a short descent, in a fraction of the time of `search`; None if nothing fits."""
    if not has_room(problem.cost):
        return None
    best_starts = starts(problem, budget.split(2), Shortlist(1))
    return descend(problem, best_starts[0], STAGE_3_OF_FEW[0].steps, budget) if best_starts else None


def _rounds(num_ranks: int) -> tuple[_Round, ...]:
    """Return the rounds of stage III for a number of ranks."""
    if num_ranks <= THOROUGH_RANKS:
        return THOROUGH_STAGE_3
    return STAGE_3_OF_FEW if num_ranks <= FEW_RANKS else STAGE_3


def _extra_budget(problem: Problem, parts: int) -> EvaluationBudget:
    """Return one of ``parts`` equal parts of a new budget, for a step after stage III."""
    return EvaluationBudget.for_ranks(problem.num_ranks).split(parts)


def _with_orders_and_caps(
    problem: Problem, first_plans: Sequence[Assignment], budget: EvaluationBudget
) -> list[Assignment]:
    """Return every start in its best ring order, and with a shorter all-to-all if that is faster."""
    improved = []
    for start in first_plans:
        ordered = best_order(problem, start, budget, thorough=True)
        improved.append(cap_all_to_all(problem, ordered, budget))
    return improved


def _stage_3(
    problem: Problem, ordered: list[Assignment], rounds: Sequence[_Round], budget: EvaluationBudget
) -> list[list[Assignment]]:
    """Descend in rounds, each from the best assignments of the round before and with finer steps; use the whole budget.

    Returns:
        The results of every round.
    """
    results = []
    best = ordered
    budgets = budget.split_all(len(rounds))
    for number, (this_round, round_budget) in enumerate(zip(rounds, budgets, strict=True), start=1):
        best = best_of(best, this_round.keep, this_round.slower)
        is_last = number == len(rounds)
        if is_last and problem.num_ranks <= REGROUP_RANKS:  # half of the round's budget
            best = [regroup(problem, start, round_budget.split(2 * len(best))) for start in best]
        descended = []
        for i, start in enumerate(best):
            start_budget = round_budget.split(len(best) - i)
            descended.append(descend(problem, start, this_round.steps, start_budget))
        best = descended
        results.append(descended)
    return results


def _reorder(problem: Problem, start: Assignment) -> Assignment:
    """Reorder the ring if another order has become faster since stage II, and descend from there."""
    budget = _extra_budget(problem, M2)
    ordered = best_order(problem, start, budget, thorough=True)
    return start if ordered is start else descend(problem, ordered, STEPS[2:], budget)


def _with_whole_tokens(problem: Problem, refined: list[Assignment]) -> list[Assignment]:
    """Add results of a search in single tokens, rounded to token units, if units are coarse and ranks few."""
    if not (problem.coarse and problem.num_ranks <= EXHAUSTIVE_RANKS):
        return refined
    return best_of([*refined, *_from_whole_tokens(problem)], M2)


def _from_whole_tokens(problem: Problem) -> Iterator[Assignment]:
    """Search in single tokens, round to units, and descend from there."""
    in_tokens = replace(problem, token_unit=1)
    if in_tokens.coarse:  # a search in single tokens would round as well
        return
    for start in search(in_tokens):
        rounded = round_to_units(problem, start)
        if rounded is not None:
            yield descend(problem, rounded, STEPS[3:], _extra_budget(problem, M2))


def _once_more(problem: Problem, refined: Sequence[Assignment]) -> Iterator[Assignment]:
    """Descend once more from the best assignments, with a separate budget.

    In the rounds of stage III the budget often ends after the moves of tokens, before heads of whole kinds are tried.
    """
    for start in best_of(refined, NUM_ONCE_MORE):
        yield descend(problem, start, STEPS[1:4], _extra_budget(problem, NUM_ONCE_MORE))


def _last_descent(problem: Problem, best: Assignment) -> Assignment:
    """Move the tokens of few ranks in all directions, then by fine steps."""
    return descend(problem, in_all_directions(problem, best), FINE_STEPS, _extra_budget(problem, M2))


def _fill_up(final: list[Assignment], earlier: list[Assignment]) -> list[Assignment]:
    """Add ``earlier`` results in other partitions to the final ones, up to `M2` in all; plans list them as rejected."""
    partitions = {working_partition(assignment) for assignment in final}
    rejected = [assignment for assignment in best_of(earlier, M2) if working_partition(assignment) not in partitions]
    return [*final, *rejected][:M2]
