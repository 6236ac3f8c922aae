"""Moves of whole token units, for units so coarse that rounding would undo smaller moves.

Dimension key: D ranks, S sets of ranks, X moves.
"""

from __future__ import annotations

from itertools import permutations

import numpy as np

from ds_hetero.common.arrays import Floats, Ints
from ds_hetero.cost.terms.grouping import Grouping
from ds_hetero.planner.search.head_moves import MAX_PAIRED_RANKS
from ds_hetero.planner.search.problem import Assignment, Problem
from ds_hetero.planner.search.rank_sets import FEW_SETS, sets_of_labels


def unit_moves(problem: Problem, grouping: Grouping, rank_class: Ints) -> Floats:
    """Return changes in units from one set of ranks to another, ``[X, D]``; the ranks of a set change alike.

    Sets are classes, kinds and groups, and single ranks if there are few. Example: three ranks give two units each to
    two ranks, which take three each.
    """
    num_ranks = problem.num_ranks
    moves = [np.zeros((0, num_ranks))]
    if num_ranks <= FEW_SETS:
        moves += [units * _one_unit(num_ranks) for units in (1, 2, 3)]
    labels = ((rank_class, FEW_SETS), (problem.kind, FEW_SETS), (grouping.group_of, FEW_SETS))
    for givers, takers in permutations(sets_of_labels(labels, num_ranks), 2):
        if (givers & takers).any():
            continue
        num_units = np.lcm(givers.sum(), takers.sum())  # the fewest that both sets can share evenly
        units_gained = num_units // takers.sum() * takers
        units_lost = num_units // givers.sum() * givers.astype(float)
        moves.append((units_gained - units_lost)[None])
    return np.concatenate(moves)


def two_units(problem: Problem) -> Floats:
    """Return changes by one unit between two ranks, or by two such moves at once, ``[X, D]``; none for many ranks."""
    if problem.num_ranks > MAX_PAIRED_RANKS:
        return np.zeros((0, problem.num_ranks))
    single_XD = _one_unit(problem.num_ranks)
    i, j = np.triu_indices(len(single_XD))
    return np.asarray(np.concatenate([single_XD, single_XD[i] + single_XD[j]]))


def _one_unit(num_ranks: int) -> Floats:
    """Return the changes by one unit from every rank to every other, ``[X, D]``: of two ranks (-1, 1) and (1, -1)."""
    eye = np.eye(num_ranks)
    change_DDD = eye[None] - eye[:, None]  # by giver and taker
    is_other_rank = ~eye.astype(bool)
    return np.asarray(change_DDD[is_other_rank])


def round_to_units(problem: Problem, start: Assignment) -> Assignment | None:
    """Round an assignment in single tokens to whole units; None if no rounded assignment fits into memory.

    The result is the best of the nearest assignment in whole units and all within two moves of a unit from it.
    """
    nearest = problem.round(start.tokens)
    no_move = np.zeros((1, len(nearest)))
    tokens_XD = nearest + problem.token_unit * np.concatenate([no_move, two_units(problem)])
    tokens_XD = tokens_XD[(tokens_XD >= 0).all(axis=1)]
    heads_XD = np.broadcast_to(start.heads, tokens_XD.shape)
    return problem.best_row(problem.grouping(start.groups), tokens_XD, heads_XD, np.inf)
