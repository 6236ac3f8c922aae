"""Small clusters with coarse token units: every partition and ring order, by exhaustion.

Where a rank holds a handful of units, rounding decides more than speed does, and closed forms with a descent miss good
roundings. A few ranks can be gone through completely.
"""

from __future__ import annotations

from itertools import permutations

import numpy as np
from numpy.typing import NDArray

from ds_hetero.planner.exhaustive import compositions, sweep
from ds_hetero.planner.groupings import active_sets
from ds_hetero.planner.problem import Assignment, Problem
from ds_hetero.planner.starts import spread_heads

__all__ = ["SMALL", "small_starts"]

Ints = NDArray[np.int64]

SMALL = 5  # ranks
UNITS = (0, 1, 64, 48, 24, 12)  # units that the sequence is cut into, by number of ranks
SLACK = 0.02  # keep partitions up to this much slower than the best, as starts for a descent


def small_starts(problem: Problem, bound_s: float) -> list[Assignment]:
    """The best of every partition that takes less than ``bound_s``, with coarse tokens and likely heads."""
    units = min(UNITS[problem.num_ranks], problem.seq_len // problem.token_unit)
    tokens_TD = problem.round(compositions(units, problem.num_ranks).astype(np.float64) * (problem.seq_len / units))
    return sweep(problem, tokens_TD, lambda blocks: _likely_heads(problem, blocks), bound_s, SLACK).best


def _likely_heads(problem: Problem, blocks: list[list[int]]) -> Ints:
    """Apportioned heads of all sets of working ranks, and all that differ from one by a move or two, ``[H, D]``."""
    groups = [np.array(block) for block in blocks]
    spreads = [
        spread_heads(problem, groups, active, unit)
        for active in active_sets(problem)
        if all(active[group].any() for group in groups)
        for unit in problem.head_units
    ]
    moves = [np.zeros(problem.num_ranks, dtype=np.int64)]
    for group in groups:
        for giver, taker in permutations(group.tolist(), 2):
            for unit in problem.head_units:
                move = np.zeros(problem.num_ranks, dtype=np.int64)
                move[giver], move[taker] = -unit, unit
                moves.append(move)
    moves_XD = np.array(moves)
    twice_XD = np.unique((moves_XD[:, None] + moves_XD).reshape(-1, problem.num_ranks), axis=0)
    heads_HD = np.unique((np.array(spreads)[:, None] + twice_XD).reshape(-1, problem.num_ranks), axis=0)
    return np.asarray(heads_HD[(heads_HD >= 0).all(axis=1)])
