"""Stage III: descent over heads and tokens of one partition, by moves of ever smaller size.

HexiSeq moves a little between two devices and accepts what strictly lowers the block time. With equal
devices every bottleneck is a tie of many, and no move of a pair lowers a maximum; so sets of equal ranks move
together, heads and tokens move in one step, and single ranks move where there are few (`moves`).

One round tries all moves of one step size, evaluates them in one call and takes the best.

Dimension key: D ranks, X moves.
"""

from __future__ import annotations

import numpy as np

from ds_hetero.cost.terms.grouping import Grouping
from ds_hetero.planner.search.budget import EvaluationBudget
from ds_hetero.planner.search.moves import all_moves, is_paired
from ds_hetero.planner.search.problem import Assignment, Problem, Tried
from ds_hetero.planner.search.token_moves import scaled_to

IMAX = 100  # rounds; HexiSeq's value
LEAST_MOVE_GAIN = 1e-6  # of the time, that a move must save; less is rounding
ONE_ROUND = 0.25  # share of the remaining budget that one batch of moves may take; chosen, never measured
_MAX_TABLE = 4_000_000  # numbers in one call of the cost model, 32 MB; chosen, never measured
_FURTHER = (1, 2, 4, 8)  # times that a move is repeated at once, as exponents; chosen, never measured


def descend(problem: Problem, start: Assignment, steps: tuple[float, ...], budget: EvaluationBudget) -> Assignment:
    """The local optimum reached from ``start`` in at most `IMAX` rounds with moves of ever smaller size."""
    grouping = problem.grouping(start.groups)
    best = start
    step = 0
    for _ in range(IMAX):
        moved = _best_move(problem, grouping, best, steps[step], budget)
        if moved is not None:
            best = moved
        elif step + 1 < len(steps):
            step += 1
        else:
            break
    return best


def _best_move(
    problem: Problem, grouping: Grouping, at: Assignment, step: float, budget: EvaluationBudget
) -> Assignment | None:
    """The best assignment one move away; None if none is better, or the budget allows none."""
    place = (grouping.order.tobytes(), grouping.offsets.tobytes(), at.tokens.tobytes(), at.heads.tobytes())
    tried = problem.tried.setdefault(place, Tried())
    if step in tried.rows_of_step:  # in vain again; it counts as if it were evaluated
        budget.rows(grouping, tried.rows_of_step[step], ONE_ROUND)
        return None
    moves = all_moves(problem, grouping, at, step, tried)
    allowed = budget.rows(grouping, moves.count, ONE_ROUND)
    tokens_XD, heads_XD = moves.first(allowed)
    rows_of_call = max(1, _MAX_TABLE // max(grouping.num_groups**2, problem.num_ranks))
    best = at
    for first in range(0, len(tokens_XD), rows_of_call):
        rows = slice(first, first + rows_of_call)
        below_s = best.time_s * (1 - LEAST_MOVE_GAIN)
        best = problem.best_row(grouping, tokens_XD[rows], heads_XD[rows], below_s) or best
    if best is not at:
        return _further(problem, grouping, at, best, budget)
    if allowed == moves.count:
        tried.rows_of_step[step] = allowed
        if not is_paired(problem, step):
            tried.rows_of_heads = moves.rows_of_heads
    return None


def _further(
    problem: Problem, grouping: Grouping, at: Assignment, moved: Assignment, budget: EvaluationBudget
) -> Assignment:
    """Go on in the direction of a move of tokens alone, as far as that pays.

    Saves rounds: a start that is 30 % off would take ten moves of 3 %, and each round evaluates all moves.
    """
    if (moved.heads != at.heads).any():
        return moved
    ratio = np.divide(moved.tokens, at.tokens, out=np.ones_like(at.tokens), where=at.tokens > 0)
    exponent_X1 = np.array(_FURTHER)[:, None]
    tokens_XD = moved.tokens * ratio**exponent_X1
    tokens_XD = problem.round(scaled_to(tokens_XD, moved.tokens, problem.seq_len))
    tokens_XD = tokens_XD[: budget.rows(grouping, len(tokens_XD))]
    heads_XD = np.broadcast_to(at.heads, tokens_XD.shape)
    return problem.best_row(grouping, tokens_XD, heads_XD, moved.time_s) or moved
