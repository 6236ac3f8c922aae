"""Stage III: improve heads and tokens of one partition by moves of ever smaller size.

HexiSeq moves a little between two devices and accepts a move that lowers the block time. With equal devices many ranks
tie for the slowest, and no move between two of them lowers the maximum. So sets of equal ranks move together, heads and
tokens move in one step, and single ranks move where there are few (`moves`).

One round evaluates all moves of one step size in one call and takes the best.

Dimension key: D ranks, X moves.
"""

from __future__ import annotations

import numpy as np

from ds_hetero.cost.terms.grouping import Grouping
from ds_hetero.planner.search.budget import EvaluationBudget
from ds_hetero.planner.search.moves import all_moves, is_paired
from ds_hetero.planner.search.problem import Assignment, ExhaustedMoves, Problem
from ds_hetero.planner.search.token_moves import scaled_to

IMAX = 100  # most rounds; HexiSeq's value
LEAST_MOVE_GAIN = 1e-6  # relative gain of time that a move must have; less is rounding
ONE_ROUND = 0.25  # most of the remaining budget that one batch of moves may take, as a share; chosen, never measured
_MAX_TABLE = 4_000_000  # numbers of an array in one call of the cost model, 32 MB; chosen, never measured
_CONTINUE_EXPONENTS = (1, 2, 4, 8)  # how often a successful move is repeated at once; chosen, never measured


def descend(problem: Problem, start: Assignment, steps: tuple[float, ...], budget: EvaluationBudget) -> Assignment:
    """Return the local optimum reached from ``start`` in at most `IMAX` rounds.

    Args:
        steps: sizes of the moves, descending; see `moves.STEPS`.
    """
    grouping = problem.grouping(start.groups)
    best = start
    step_index = 0
    for _ in range(IMAX):
        improved = _best_move(problem, grouping, best, steps[step_index], budget)
        if improved is not None:
            best = improved
        elif step_index + 1 < len(steps):
            step_index += 1
        else:
            break
    return best


def _best_move(
    problem: Problem, grouping: Grouping, current: Assignment, step: float, budget: EvaluationBudget
) -> Assignment | None:
    """Return the best assignment one move away; None if none is better, or if the budget is used up."""
    point = (grouping.order.tobytes(), grouping.offsets.tobytes(), current.tokens.tobytes(), current.heads.tobytes())
    exhausted = problem.exhausted_moves.setdefault(point, ExhaustedMoves())
    # Descents from several starts may meet at one assignment. Moves that failed there would fail again, so they are not
    # evaluated; the budget counts them all the same.
    if step in exhausted.num_by_step:
        budget.rows(grouping, exhausted.num_by_step[step], ONE_ROUND)
        return None
    moves = all_moves(problem, grouping, current, step, exhausted)
    num_allowed = budget.rows(grouping, moves.count, ONE_ROUND)
    tokens_XD, heads_XD = moves.first(num_allowed)
    rows_of_call = max(1, _MAX_TABLE // max(grouping.num_groups**2, problem.num_ranks))
    best = current
    for first in range(0, len(tokens_XD), rows_of_call):
        rows = slice(first, first + rows_of_call)
        below_s = best.time_s * (1 - LEAST_MOVE_GAIN)
        best = problem.best_row(grouping, tokens_XD[rows], heads_XD[rows], below_s) or best
    if best is not current:
        return _continue_move(problem, grouping, current, best, budget)
    if num_allowed == moves.count:
        exhausted.num_by_step[step] = num_allowed
        if not is_paired(problem, step):
            exhausted.num_head_moves = moves.num_head_moves
    return None


def _continue_move(
    problem: Problem, grouping: Grouping, current: Assignment, moved: Assignment, budget: EvaluationBudget
) -> Assignment:
    """Return the best result of repeating a successful move of tokens 1, 2, 4 or 8 times more; heads do not move again.

    This saves rounds: a start that is 30 % off would take ten moves of 3 %, each in a round that evaluates all moves.

    Args:
        current: assignment before the move.
        moved: assignment after it.
    """
    if (moved.heads != current.heads).any():
        return moved
    ratio = np.divide(moved.tokens, current.tokens, out=np.ones_like(current.tokens), where=current.tokens > 0)
    exponent_X1 = np.array(_CONTINUE_EXPONENTS)[:, None]
    tokens_XD = moved.tokens * ratio**exponent_X1
    tokens_XD = problem.round(scaled_to(tokens_XD, moved.tokens, problem.seq_len))
    tokens_XD = tokens_XD[: budget.rows(grouping, len(tokens_XD))]
    heads_XD = np.broadcast_to(current.heads, tokens_XD.shape)
    return problem.best_row(grouping, tokens_XD, heads_XD, moved.time_s) or moved
