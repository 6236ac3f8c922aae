"""A last descent for few ranks, in which the tokens of all ranks change at once, each by a different amount.

The time of a ring is a maximum of sums. Where several of these sums are equal, no move of tokens between two ranks, or
into a set of ranks, lowers the maximum; but a move that changes several ranks at once may.

Dimension key: D ranks, X directions.
"""

from __future__ import annotations

from functools import cache
from itertools import product

import numpy as np

from ds_hetero.common.arrays import Floats
from ds_hetero.planner.search.descent import LEAST_MOVE_GAIN
from ds_hetero.planner.search.moves import STEPS
from ds_hetero.planner.search.problem import Assignment, Problem

MAX_DIRECTED_RANKS = 5  # 5 ranks have 2,100 directions, 6 have 11,528; chosen, never measured
_CHANGES = (-2.0, -1.0, 0.0, 1.0, 2.0)  # of a rank's tokens, in steps; chosen, never measured


def in_all_directions(problem: Problem, start: Assignment) -> Assignment:
    """Return the local optimum under combined moves of all ranks' tokens; ``start`` itself if there are many ranks.

    These evaluations are not counted against a budget.
    """
    if problem.num_ranks > MAX_DIRECTED_RANKS:
        return start
    direction_XD, grouping, best = _directions(problem.num_ranks), problem.grouping(start.groups), start
    for step in STEPS[2:]:
        improved: Assignment | None = best
        while improved is not None:
            best = improved
            step_tokens = step * problem.seq_len / problem.num_ranks
            tokens_XD = problem.round(best.tokens + step_tokens * direction_XD)
            # A rank with tokens keeps some: sets of working ranks are tried in stage I.
            is_possible_XD = (tokens_XD >= 0) & ((tokens_XD > 0) | (best.tokens == 0))
            tokens_XD = tokens_XD[is_possible_XD.all(axis=1)]
            heads_XD = np.broadcast_to(best.heads, tokens_XD.shape)
            improved = problem.best_row(grouping, tokens_XD, heads_XD, best.time_s * (1 - LEAST_MOVE_GAIN))
    return best


@cache
def _directions(num_ranks: int) -> Floats:
    """Return directions: changes by rank that sum to 0, each direction once, ``[X, D]``.

    They are whole changes from -2 to 2, less their mean. Two ranks have (-0.5, 0.5), (-1, 1), (-1.5, 1.5), (-2, 2) and
    the same with other signs.
    """
    changes_XD = np.array(list(product(_CHANGES, repeat=num_ranks)))
    # (0, 1) and (-1, 0) differ by a constant and are one direction: of these the one with a minimum of -2 is kept.
    is_kept = changes_XD.min(axis=1) == -2
    is_a_move = changes_XD.max(axis=1) > -2
    changes_XD = changes_XD[is_kept & is_a_move]
    return np.asarray(changes_XD - changes_XD.mean(axis=1, keepdims=True))
