"""Moves of tokens: between a set of ranks and all others, inside groups, between two ranks, and along with heads.

Dimension key: D ranks, K groups, S sets of ranks, P pairs of ranks, X moves.
"""

from __future__ import annotations

import numpy as np

from ds_hetero.common.arrays import Bools, Floats, Ints
from ds_hetero.cost.terms.grouping import Grouping
from ds_hetero.planner.search.problem import Assignment, Problem
from ds_hetero.planner.search.rank_sets import FEW_SETS


def moves_of_sets(problem: Problem, grouping: Grouping, tokens: Floats, sets_SD: Bools, step: float) -> Floats:
    """Return the tokens after each set of ranks got a little more or less, ``[X, D]``.

    The first rows are two for every set, more and less, in which all other ranks give or take. The other rows are two
    for every set that is a part of some group. In these only the other ranks of the same groups give or take, so that
    the length of every group stays, and with it the steps of the ring. Example: four ranks with 100 tokens each in the
    groups 01 and 23, the set {0}, a step of 10 %: rank 0 gets 110 of 410, scaled to 400, so 107.3, and the others get
    97.6 each; within its group it gets 110 / 210 of 200, so 104.8, and rank 1 gets 95.2.
    """
    factors = np.array([1 + step, 1 / (1 + step)])
    factor_S2D = np.where(sets_SD[:, None, :], factors[:, None], 1.0)
    scaled_XD = (tokens * factor_S2D).reshape(-1, problem.num_ranks)
    among_all_XD = scaled_to(scaled_XD, tokens, tokens.sum())
    has_any_of_group_SK = grouping.by_group(np.logical_or, sets_SD)
    has_all_of_group_SK = grouping.by_group(np.logical_and, sets_SD)
    is_part_S = (has_any_of_group_SK & ~has_all_of_group_SK).any(axis=1)
    scaled_XD = scaled_XD[np.repeat(is_part_S, 2)]
    return np.concatenate([among_all_XD, _with_group_lengths(grouping, scaled_XD, tokens)])


def _with_group_lengths(grouping: Grouping, moved_XD: Floats, tokens: Floats) -> Floats:
    """Scale the tokens of every group so that it has as many as in ``tokens``, ``[X, D]``."""
    length_K = grouping.by_group(np.add, tokens)
    moved_length_XK = grouping.by_group(np.add, moved_XD)
    scale_XK = np.divide(length_K, moved_length_XK, out=np.ones_like(moved_length_XK), where=moved_length_XK > 0)
    return np.asarray(moved_XD * scale_XK[:, grouping.group_of])


def moves_of_pairs(tokens: Floats, step: float) -> Floats:
    """Return the tokens after one rank gave another one all or some tokens, ``[2 * P, D]``; no rows for many ranks.

    Other moves scale the tokens of a rank; these also give tokens to ranks that have none. In the first P rows a rank
    gives all its tokens, whatever the step. In the others it gives ``step`` times the mean tokens of a rank, at most
    all it has.
    """
    num_ranks = len(tokens)
    if num_ranks > FEW_SETS:
        return np.zeros((0, num_ranks))
    has_tokens = tokens > 0
    is_other_rank = ~np.eye(num_ranks, dtype=bool)
    giver, taker = np.nonzero(is_other_rank & has_tokens[:, None])
    all_P = tokens[giver]
    step_P = np.minimum(all_P, step * tokens.sum() / num_ranks)
    amount_2P = np.array([all_P, step_P])
    moved_2PD = np.full((2, len(giver), num_ranks), tokens)
    pair = np.arange(len(giver))
    moved_2PD[:, pair, giver] -= amount_2P
    moved_2PD[:, pair, taker] += amount_2P
    return moved_2PD.reshape(-1, num_ranks)


def attention_speedup(problem: Problem, grouping: Grouping, current: Assignment, heads_XD: Ints) -> Floats:
    """Return the factor by which new heads speed up the slowest attention in every rank's group, ``[X, D]``."""
    before_K = grouping.by_group(np.maximum, current.heads * problem.attention_s)
    after_XK = grouping.by_group(np.maximum, heads_XD * problem.attention_s)
    return np.asarray((before_K / after_XK)[:, grouping.group_of])


def tokens_follow_heads(grouping: Grouping, current: Assignment, heads_XD: Ints) -> Floats:
    """Return tokens that grow on each rank by the ratio of its new heads to its present heads, ``[X, D]``.

    They are scaled so that every group keeps its number of tokens. A rank with more heads profits from more tokens,
    since it need not send these to another rank.
    """
    ratio_XD = np.divide(heads_XD, current.heads, out=np.ones(heads_XD.shape), where=current.heads > 0)
    moved_XD = _with_group_lengths(grouping, current.tokens * ratio_XD, current.tokens)
    return scaled_to(moved_XD, current.tokens, current.tokens.sum())


def tokens_like_heads(grouping: Grouping, current: Assignment, heads_XD: Ints) -> Floats:
    """Return the tokens of every group shared in proportion to heads, ``[X, D]``; best if only links limit the time."""
    share_XD = heads_XD / grouping.by_group(np.add, heads_XD)[:, grouping.group_of]
    return np.asarray(share_XD * grouping.by_group(np.add, current.tokens)[grouping.group_of])


def scaled_to(share_XD: Floats, tokens: Floats, total: float) -> Floats:
    """Scale every row to ``total`` tokens, ``[X, D]``; a row of zeros becomes ``tokens``."""
    sum_X = share_XD.sum(axis=1)
    scale_X = np.divide(total, sum_X, out=np.zeros_like(sum_X), where=sum_X > 0)
    return np.asarray(np.where(sum_X[:, None] > 0, share_XD * scale_X[:, None], tokens))
