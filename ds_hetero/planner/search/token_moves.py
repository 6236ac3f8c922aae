"""Moves of tokens: from a set of ranks to all others, inside groups, between two ranks, and in step with heads.

Dimension key: D ranks, K groups, S sets of ranks, P pairs of ranks, X moves.
"""

from __future__ import annotations

import numpy as np

from ds_hetero.common.arrays import Bools, Floats, Ints
from ds_hetero.cost.terms.grouping import Grouping
from ds_hetero.planner.search.problem import Assignment, Problem
from ds_hetero.planner.search.rank_sets import FEW_SETS


def moves_of_sets(problem: Problem, grouping: Grouping, tokens: Floats, sets_SD: Bools, step: float) -> Floats:
    """Tokens after each set has a little more or less: at the expense of everybody, or of the rest of their groups.

    ``[X, D]``: two rows a set for everybody, then two for each set that is a part of some group. The second kind leaves
    the length of every group as it is, and with it the ring's steps.
    """
    factors = np.array([1 + step, 1 / (1 + step)])
    factor_S2D = np.where(sets_SD[:, None, :], factors[:, None], 1.0)
    scaled_XD = (tokens * factor_S2D).reshape(-1, problem.num_ranks)
    everybody_XD = scaled_to(scaled_XD, tokens, tokens.sum())
    some_of_group_SK = grouping.by_group(np.logical_or, sets_SD)
    all_of_group_SK = grouping.by_group(np.logical_and, sets_SD)
    is_part_S = (some_of_group_SK & ~all_of_group_SK).any(axis=1)
    scaled_XD = scaled_XD[np.repeat(is_part_S, 2)]
    return np.concatenate([everybody_XD, _with_group_lengths(grouping, scaled_XD, tokens)])


def _with_group_lengths(grouping: Grouping, moved_XD: Floats, tokens: Floats) -> Floats:
    """Scale the tokens of every group so that it has as many as before."""
    length_K = grouping.by_group(np.add, tokens)
    moved_length_XK = grouping.by_group(np.add, moved_XD)
    scale_XK = np.divide(length_K, moved_length_XK, out=np.ones_like(moved_length_XK), where=moved_length_XK > 0)
    return np.asarray(moved_XD * scale_XK[:, grouping.group_of])


def moves_of_pairs(tokens: Floats, step: float) -> Floats:
    """Tokens after one rank has given another one all of its own, or a share of the sequence; where ranks are few.

    Other moves scale what a rank has; these also give tokens to ranks that have none. The first half of the rows are
    the moves of all tokens, which do not depend on the step: ``[2 * P, D]``.
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


def attention_speedup(problem: Problem, grouping: Grouping, at: Assignment, heads_XD: Ints) -> Floats:
    """How much faster new heads make the slowest rank of every rank's group, ``[X, D]``: its group may have more."""
    before_K = grouping.by_group(np.maximum, at.heads * problem.attention_s)
    after_XK = grouping.by_group(np.maximum, heads_XD * problem.attention_s)
    return np.asarray((before_K / after_XK)[:, grouping.group_of])


def tokens_follow_heads(grouping: Grouping, at: Assignment, heads_XD: Ints) -> Floats:
    """Tokens of every rank scaled as its heads within its group: what a rank keeps it need not send."""
    ratio_XD = np.divide(heads_XD, at.heads, out=np.ones(heads_XD.shape), where=at.heads > 0)
    moved_XD = _with_group_lengths(grouping, at.tokens * ratio_XD, at.tokens)
    return scaled_to(moved_XD, at.tokens, at.tokens.sum())


def tokens_like_heads(grouping: Grouping, at: Assignment, heads_XD: Ints) -> Floats:
    """Tokens of every group shared in proportion to heads, the best where only links matter."""
    share_XD = heads_XD / grouping.by_group(np.add, heads_XD)[:, grouping.group_of]
    return np.asarray(share_XD * grouping.by_group(np.add, at.tokens)[grouping.group_of])


def scaled_to(share_XD: Floats, tokens: Floats, total: float) -> Floats:
    """``total`` tokens in proportion to every row; a row that lost all tokens is ``tokens`` again."""
    sum_X = share_XD.sum(axis=1)
    scale_X = np.divide(total, sum_X, out=np.zeros_like(sum_X), where=sum_X > 0)
    return np.asarray(np.where(sum_X[:, None] > 0, share_XD * scale_X[:, None], tokens))
