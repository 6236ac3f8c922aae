"""Moves of whole token units, where units are coarse and rounding would undo smaller moves.

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
    """Changes in units from one set of ranks to another, every rank of a set giving or taking alike, ``[X, D]``.

    Sets are classes, kinds and groups, and single ranks where there are few. Three ranks give two units each to two
    ranks, which take three each.
    """
    num_ranks = problem.num_ranks
    moves = [np.zeros((0, num_ranks))]
    if num_ranks <= FEW_SETS:
        moves += [units * _one_unit(num_ranks) for units in (1, 2, 3)]
    labels = ((rank_class, FEW_SETS), (problem.kind, FEW_SETS), (grouping.group_of, FEW_SETS))
    for givers, takers in permutations(sets_of_labels(labels, num_ranks), 2):
        if (givers & takers).any():
            continue
        units = np.lcm(givers.sum(), takers.sum())
        taken = units // takers.sum() * takers
        given = units // givers.sum() * givers.astype(float)
        moves.append((taken - given)[None])
    return np.concatenate(moves)


def two_units(problem: Problem) -> Floats:
    """Changes by one unit from a rank to another, or by two such moves at once, where there are few, ``[X, D]``."""
    if problem.num_ranks > MAX_PAIRED_RANKS:
        return np.zeros((0, problem.num_ranks))
    single_XD = _one_unit(problem.num_ranks)
    i, j = np.triu_indices(len(single_XD))
    return np.asarray(np.concatenate([single_XD, single_XD[i] + single_XD[j]]))


def _one_unit(num_ranks: int) -> Floats:
    """One unit from every rank to every other one, ``[X, D]``; of two ranks -1 1 and 1 -1."""
    eye = np.eye(num_ranks)
    change_DDD = eye[None] - eye[:, None]  # by giver and taker
    is_other_rank = ~eye.astype(bool)
    return np.asarray(change_DDD[is_other_rank])


def round_to_units(problem: Problem, start: Assignment) -> Assignment | None:
    """The best whole units near an assignment in single tokens, up to two units from the nearest, if any fits."""
    nearest = problem.round(start.tokens)
    no_move = np.zeros((1, len(nearest)))
    around_XD = nearest + problem.token_unit * np.concatenate([no_move, two_units(problem)])
    around_XD = around_XD[(around_XD >= 0).all(axis=1)]
    heads_XD = np.broadcast_to(start.heads, around_XD.shape)
    return problem.best_row(problem.grouping(start.groups), around_XD, heads_XD, np.inf)
