"""A last descent in which the tokens of all of a few ranks move at once, by unlike shares.

The time of a ring is a maximum of sums: on its ridges no move of a pair or of a set lowers it, but many others do.

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

MAX_DIRECTED_RANKS = 5  # there are 2,100 directions of 5 ranks, 11,528 of 6; chosen, never measured
_SHARES = (-2.0, -1.0, 0.0, 1.0, 2.0)  # of a step, by rank; chosen, never measured


def in_all_directions(problem: Problem, start: Assignment) -> Assignment:
    """The local optimum of moves of the tokens of all ranks at once; ``start`` where there are many ranks.

    No budget counts its evaluations.
    """
    if problem.num_ranks > MAX_DIRECTED_RANKS:
        return start
    direction_XD, grouping, best = _directions(problem.num_ranks), problem.grouping(start.groups), start
    for step in STEPS[2:]:
        moved: Assignment | None = best
        while moved is not None:
            best = moved
            step_tokens = step * problem.seq_len / problem.num_ranks
            tokens_XD = problem.round(best.tokens + step_tokens * direction_XD)
            # A rank with tokens keeps some: which ranks work was tried by the sets of them.
            is_possible_XD = (tokens_XD >= 0) & ((tokens_XD > 0) | (best.tokens == 0))
            tokens_XD = tokens_XD[is_possible_XD.all(axis=1)]
            heads_XD = np.broadcast_to(best.heads, tokens_XD.shape)
            moved = problem.best_row(grouping, tokens_XD, heads_XD, best.time_s * (1 - LEAST_MOVE_GAIN))
    return best


@cache
def _directions(num_ranks: int) -> Floats:
    """Shares from -2 to 2 by rank that add up to 0 when their mean is taken off, each once, ``[X, D]``."""
    shares_XD = np.array(list(product(_SHARES, repeat=num_ranks)))
    # 0 1 and -1 0 are one direction, whose shares differ by a constant: the one whose least is -2 stands for all.
    is_first = shares_XD.min(axis=1) == -2
    is_a_move = shares_XD.max(axis=1) > -2
    shares_XD = shares_XD[is_first & is_a_move]
    return np.asarray(shares_XD - shares_XD.mean(axis=1, keepdims=True))
