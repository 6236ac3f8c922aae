"""The search: HexiSeq's three stages with its budgets, and what finds optima that a descent alone does not.

    step                what it is for                                                       module
    stage I             partitions into groups, and sets of working ranks                    partitions, working_sets
    stage II            heads by apportionment, tokens by closed forms; the best are starts  starts, closed_forms
    order               a ring over fewer slow links                                         ring_order
    caps                less sent over slow links                                            all_to_all_caps
    stage III           descent over heads and tokens, in three rounds of fewer starts       descent, moves
    regroup             before the third round: ranks change groups one by one               regroup
    order               another ring order where that has become better                      ring_order
    whole tokens        coarse units hide good partitions: search in tokens, and round       unit_moves
    other ranks         sets of working ranks that stage I had no budget for                 regroup
    once more           heads of whole kinds, for which a round's budget did not last        descent
    plainer             equal ranks get equal shares, slow ranks no more than fast ones      equal_ranks
    last descent        ridges of maxima, and the last 0.1 %                                 directions, descent

Every evaluation is a call of the cost model, counted against an `EvaluationBudget`. Nothing reads a clock, and ties go
to the earlier candidate. Steps after stage III have budgets of their own: they are few evaluations, and stage III
leaves none. Source: HexiSeq (arXiv:2605.07569), section 4.3 and Algorithm 1.

`benchmarks.search_steps` leaves out one step at a time; docs/measured.md has its table. On 35 clusters no plan was
slower by 0.01 % without one of these: of stage I merged nodes, groups of equal speed and sets of working ranks, both
ring orders, whole tokens, once more, plainer, all directions. They are kept: a step may stand in for another.
"""

from __future__ import annotations

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
from ds_hetero.planner.search.shortlist import Shortlist, best_of, working
from ds_hetero.planner.search.starts import starts
from ds_hetero.planner.search.unit_moves import round_to_units

M2 = 16  # plans refined by stage III; HexiSeq's value


class _Round(NamedTuple):
    """A round of stage III."""

    keep: int  # plans that go on
    slower: float  # how many times as slow as the best they may be
    steps: tuple[float, ...]  # of their descents


# Of a node or two of unlike cards, many starts are as good as each other: few go on, and the last ones have what the
# others saved. Chosen by `python -m benchmarks.planner exact --cards`.
STAGE_3 = (_Round(M2, 1.25, STEPS[:2]), _Round(6, 1.1, STEPS[1:4]), _Round(2, 1.03, STEPS))
STAGE_3_OF_FEW = (_Round(6, 1.15, STEPS[:2]), _Round(3, 1.05, STEPS[1:4]), _Round(1, 1.0, STEPS))
THOROUGH_STAGE_3 = (_Round(2 * M2, 1.4, STEPS[:2]), _Round(M2, 1.25, STEPS[1:4]), _Round(6, 1.1, STEPS))
SLOWEST_START = 1.4  # of the first round, times the best; chosen, never measured
FINE_STEPS = (1e-3, 3e-4, 1e-4)  # of the last descent, from the best assignment; chosen, never measured
NUM_ONCE_MORE = 2  # assignments that descend once more; chosen, never measured
AT_FLOOR = 1.0005  # times what no schedule can undercut: so close there is nothing to gain; chosen, never measured

# Parts of the budget: a third for the starts, of what is left a sixth for orders and caps, and the rest for the three
# rounds of stage III alike. Chosen, never measured.
_PARTS_OF_STARTS, _PARTS_OF_ORDERS = 3, 6


def search(problem: Problem, budget: EvaluationBudget | None = None) -> list[Assignment]:
    """The best assignments, best first, one per partition of the working ranks; none if nothing fits.

    Args:
        budget: of stages I to III; left out, `EvaluationBudget.for_ranks`.
    """
    if not has_room(problem.cost):
        return []
    budget = budget or EvaluationBudget.for_ranks(problem.num_ranks)
    rounds = _rounds(problem.num_ranks)
    started = starts(problem, budget.split(_PARTS_OF_STARTS), Shortlist(rounds[0].keep, SLOWEST_START))
    if started and started[0].time_s <= AT_FLOOR * problem.floor_s:
        best, *others = started
        return [in_all_directions(problem, best), *others]
    ordered = _with_orders_and_caps(problem, started, budget.split(_PARTS_OF_ORDERS))
    by_round = _stage_3(problem, ordered, rounds, budget)
    refined = [_reorder(problem, assignment) for assignment in by_round[-1]]
    refined = _with_whole_tokens(problem, refined)
    refined = with_other_ranks(problem, refined)
    refined = [*_once_more(problem, refined), *refined]
    plain = [share_equally(problem, trade_places(problem, assignment)) for assignment in refined]
    finished = best_of(plain, M2)
    if finished:
        finished[0] = _last_descent(problem, finished[0])
    return _filled_up(finished, [assignment for of_round in by_round for assignment in of_round])


def first_look(problem: Problem, budget: EvaluationBudget) -> Assignment | None:
    """The best start after a short descent, None if nothing fits; `search` improves on it, in little of its time."""
    if not has_room(problem.cost):
        return None
    started = starts(problem, budget.split(2), Shortlist(1))
    return descend(problem, started[0], STAGE_3_OF_FEW[0].steps, budget) if started else None


def _rounds(num_ranks: int) -> tuple[_Round, ...]:
    if num_ranks <= THOROUGH_RANKS:
        return THOROUGH_STAGE_3
    return STAGE_3_OF_FEW if num_ranks <= FEW_RANKS else STAGE_3


def _extra_budget(problem: Problem, parts: int) -> EvaluationBudget:
    """A part of a new budget, for a step after stage III; the caller's is not asked."""
    return EvaluationBudget.for_ranks(problem.num_ranks).split(parts)


def _with_orders_and_caps(
    problem: Problem, started: Sequence[Assignment], budget: EvaluationBudget
) -> list[Assignment]:
    """Every start in its best ring order, and with a shorter all-to-all where that is faster."""
    improved = []
    for start in started:
        ordered = best_order(problem, start, budget, thorough=True)
        improved.append(cap_all_to_all(problem, ordered, budget))
    return improved


def _stage_3(
    problem: Problem, ordered: list[Assignment], rounds: Sequence[_Round], budget: EvaluationBudget
) -> list[list[Assignment]]:
    """Descents in rounds, each from the best of the round before with finer steps; all of the budget.

    Returns:
        The results of every round.
    """
    results = []
    best = ordered
    for number, (this_round, of_round) in enumerate(zip(rounds, budget.split_all(len(rounds)), strict=True), start=1):
        best = best_of(best, this_round.keep, this_round.slower)
        is_last = number == len(rounds)
        if is_last and problem.num_ranks <= REGROUP_RANKS:  # half of the round's budget
            best = [regroup(problem, start, of_round.split(2 * len(best))) for start in best]
        descended = []
        for i, start in enumerate(best):
            of_start = of_round.split(len(best) - i)
            descended.append(descend(problem, start, this_round.steps, of_start))
        best = descended
        results.append(descended)
    return results


def _reorder(problem: Problem, start: Assignment) -> Assignment:
    """Another ring order where that has become better since stage II, and a descent from there."""
    budget = _extra_budget(problem, M2)
    ordered = best_order(problem, start, budget, thorough=True)
    return start if ordered is start else descend(problem, ordered, STEPS[2:], budget)


def _with_whole_tokens(problem: Problem, refined: list[Assignment]) -> list[Assignment]:
    """Add the results of a search in single tokens, rounded, where units are coarse and ranks few."""
    if not (problem.coarse and problem.num_ranks <= EXHAUSTIVE_RANKS):
        return refined
    return best_of([*refined, *_from_whole_tokens(problem)], M2)


def _from_whole_tokens(problem: Problem) -> Iterator[Assignment]:
    in_tokens = replace(problem, token_unit=1)
    if in_tokens.coarse:  # a search in tokens would round too
        return
    for start in search(in_tokens):
        rounded = round_to_units(problem, start)
        if rounded is not None:
            yield descend(problem, rounded, STEPS[3:], _extra_budget(problem, M2))


def _once_more(problem: Problem, refined: Sequence[Assignment]) -> Iterator[Assignment]:
    """Descents from the best with a budget of their own.

    A round's budget is spent on moves of tokens, which come first, before heads of whole kinds are tried.
    """
    for start in best_of(refined, NUM_ONCE_MORE):
        yield descend(problem, start, STEPS[1:4], _extra_budget(problem, NUM_ONCE_MORE))


def _last_descent(problem: Problem, best: Assignment) -> Assignment:
    """Move tokens of a few ranks in all directions, then by fine steps."""
    return descend(problem, in_all_directions(problem, best), FINE_STEPS, _extra_budget(problem, M2))


def _filled_up(finished: list[Assignment], passed: list[Assignment]) -> list[Assignment]:
    """Fill up to `M2` with results of earlier rounds in other partitions, which explain what was not chosen."""
    partitions = {working(assignment) for assignment in finished}
    others = [each for each in best_of(passed, M2) if working(each) not in partitions]
    return [*finished, *others][:M2]
