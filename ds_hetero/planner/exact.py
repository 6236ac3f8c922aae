"""Compute the true optimum of small problems, with which the search is compared.

The solver goes through every partition of the ranks into groups, every ring order, every split of the heads inside each
group and every split of the sequence in whole token units, zero included. A combination is a partition with a split of
the heads and a split of the tokens. Heads are divided in canonical rank order (fastest first), as by the search. The
objective is the cost model itself: a combination is skipped only if a lower bound of its time, the compute alone, is
not below the best time so far. So the result is the optimum under the cost model.

Dimension key: D ranks, K groups, T token splits, H head splits, P pairs of neighbouring ranks that are equal devices,
B combinations whose bound is below the best time.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, combinations, pairwise, permutations
from math import comb

import numpy as np

from ds_hetero.common.arrays import Floats, Ints
from ds_hetero.cost.terms.head_cuts import kv_heads_of_ranks
from ds_hetero.errors import PlanError
from ds_hetero.planner.search.interchangeable import device_labels, distinct_partitions
from ds_hetero.planner.search.problem import Assignment, Problem

# Chosen, never measured: larger problems take minutes.
MAX_RANKS = 8
MAX_SPLITS = 2_000_000  # most splits of the tokens, and most splits of the heads of one partition
MAX_BOUNDS = 4_000_000  # bounds that are computed at a time
ROWS_OF_A_BATCH = 20_000  # combinations that are evaluated at a time


@dataclass(frozen=True, kw_only=True, slots=True)
class Exact:
    """Result of the exact solver: the optimum, and the numbers of combinations and evaluations it took."""

    best: Assignment | None  # the optimum; None if nothing is below the upper bound, or nothing fits into memory
    combinations: int  # number of combinations; all ring orders of a combination count once
    evaluated: int  # number of evaluations; every ring order of a combination counts
    complete: bool = True  # False if the solver stopped at the limit; ``best`` is then the best so far


def solve_exact(problem: Problem, *, upper_bound_s: float = np.inf, most: float = np.inf) -> Exact:
    """Find the best assignment, or prove that none is faster than ``upper_bound_s``.

    Args:
        problem: its ``token_unit`` and the smallest of its ``head_units`` are the granularity.
        upper_bound_s: time of a known schedule; a good one saves most of the work.
        most: number of evaluations after which the solver stops.

    Raises:
        PlanError: there are too many ranks or combinations.
    """
    num_ranks, head_unit = problem.num_ranks, min(problem.head_units)
    if num_ranks > MAX_RANKS:
        raise PlanError(
            f"the exact solver takes at most {MAX_RANKS} ranks, the cluster has {num_ranks}. Give a smaller cluster."
        )
    units, head_units = problem.seq_len // problem.token_unit, problem.num_heads // head_unit
    for what, total in (("token units", units), ("heads", head_units)):
        count = comb(total + num_ranks - 1, num_ranks - 1)
        if count > MAX_SPLITS:
            raise PlanError(
                f"{total} {what} can be split over {num_ranks} ranks in {count} ways; the exact solver tries at most "
                f"{MAX_SPLITS}. Use coarser units or fewer ranks."
            )
    tokens_TD = problem.round(compositions(units, num_ranks).astype(np.float64) * problem.token_unit)
    best: Assignment | None = None
    limit_s, num_combinations, num_evaluations = upper_bound_s, 0, 0
    if limit_s <= problem.floor_s:
        return Exact(best=None, combinations=0, evaluated=0)
    for groups in distinct_partitions(problem, np.arange(num_ranks)):
        heads_HD = _head_splits(problem, groups, head_unit)
        num_combinations += len(heads_HD) * len(tokens_TD)
        rings = list(_ring_orders(problem, groups))
        for heads_BD, tokens_BD, bound_B in _promising_combinations(problem, groups, heads_HD, tokens_TD, limit_s):
            if len(rings) > 1:  # one more bound, which holds for all ring orders, before each of them is evaluated
                any_order_B = problem.free_ring_s(problem.grouping(groups), tokens_BD, heads_BD)
                promising = np.flatnonzero(np.maximum(any_order_B, bound_B) < limit_s)
                heads_BD, tokens_BD, bound_B = heads_BD[promising], tokens_BD[promising], bound_B[promising]
            for ring in rings:
                grouping = problem.grouping(ring)
                for first in range(0, len(bound_B), ROWS_OF_A_BATCH):
                    if bound_B[first] >= limit_s:  # bounds ascend
                        break
                    rows = slice(first, first + ROWS_OF_A_BATCH)
                    num_evaluations += len(tokens_BD[rows])
                    better = problem.best_row(grouping, tokens_BD[rows], heads_BD[rows], limit_s)
                    if better is not None:
                        best, limit_s = better, better.time_s
                    if num_evaluations >= most:
                        return Exact(
                            best=best, combinations=num_combinations, evaluated=num_evaluations, complete=False
                        )
    return Exact(best=best, combinations=num_combinations, evaluated=num_evaluations)


def compositions(total: int, parts: int) -> Ints:
    """Return all ways to write ``total`` as an ordered sum of ``parts`` whole numbers >= 0, one in each row.

    A row is a choice of bars among stars: of 2 in 2 parts, |** is (0, 2), *|* is (1, 1) and **| is (2, 0).
    """
    count = comb(total + parts - 1, parts - 1)
    bars = np.array(list(combinations(range(total + parts - 1), parts - 1)), dtype=np.int64).reshape(count, parts - 1)
    ends = np.full((count, 1), total + parts - 1)
    return np.diff(np.concatenate([np.full((count, 1), -1), bars, ends], axis=1), axis=1) - 1


def _head_splits(problem: Problem, groups: Sequence[Ints], unit: int) -> Ints:
    """Return all ways to split the heads inside every group, ``[H, D]``."""
    heads_HD = np.zeros((1, problem.num_ranks), dtype=np.int64)
    for group in groups:
        options = compositions(problem.num_heads // unit, len(group)) * unit
        count = len(heads_HD)
        heads_HD = np.repeat(heads_HD, len(options), axis=0)
        heads_HD[:, group] = np.tile(options, (count, 1))
    return heads_HD


def _promising_combinations(
    problem: Problem, groups: Sequence[Ints], heads_HD: Ints, tokens_TD: Floats, limit: float
) -> Iterator[tuple[Ints, Floats, Floats]]:
    """Yield batches of combinations that may take less than ``limit`` seconds: heads, tokens and lower bounds.

    The lowest bounds of a batch come first. Of combinations that only swap the tokens of two interchangeable ranks, the
    one is kept in which the first rank has at least as many tokens as the second. Two ranks are interchangeable here if
    they are equal devices of one node and group with the same number of heads and KV heads: the cost model adds up what
    they send and hold, so a swap changes nothing.
    """
    labels = device_labels(problem)
    neighbours = chain.from_iterable(pairwise(group.tolist()) for group in groups)
    pairs = [(a, b) for a, b in neighbours if labels[a] == labels[b]]
    first, second = np.array(pairs, dtype=np.int64).reshape(-1, 2).T
    kv_HD = kv_heads_of_ranks(problem.grouping(groups), heads_HD, problem.cost.model.queries_per_kv_head)
    can_swap_HP = (heads_HD[:, first] == heads_HD[:, second]) & (kv_HD[:, first] == kv_HD[:, second])
    # Splits of heads with the same interchangeable pairs have the same token splits: they are handled together.
    patterns, pattern_H = np.unique(can_swap_HP, axis=0, return_inverse=True)
    batch: list[tuple[Ints, Floats, Floats]] = []
    for i, can_swap_P in enumerate(patterns):
        is_kept_T = (tokens_TD[:, first[can_swap_P]] >= tokens_TD[:, second[can_swap_P]]).all(axis=1)
        pattern_heads_HD = heads_HD[pattern_H.reshape(-1) == i]
        for rows in _combinations_below(problem, groups, pattern_heads_HD, tokens_TD[is_kept_T], limit):
            batch.append(rows)
            if sum(len(bounds) for _, _, bounds in batch) >= ROWS_OF_A_BATCH:
                yield _most_promising_first(batch)
                batch = []
    if batch:
        yield _most_promising_first(batch)


def _most_promising_first(parts: Sequence[tuple[Ints, Floats, Floats]]) -> tuple[Ints, Floats, Floats]:
    """Concatenate combinations (heads, tokens, bounds) and sort them by their bounds."""
    heads_BD, tokens_BD, bound_B = (np.concatenate(arrays) for arrays in zip(*parts, strict=True))
    order = np.argsort(bound_B, kind="stable")
    return heads_BD[order], tokens_BD[order], bound_B[order]


def _combinations_below(
    problem: Problem, groups: Sequence[Ints], heads_HD: Ints, tokens_TD: Floats, limit: float
) -> Iterator[tuple[Ints, Floats, Floats]]:
    """Yield heads and tokens whose compute alone takes less than ``limit`` seconds, with this time as a lower bound.

    A group takes at least the time of its slowest rank outside attention plus that of its slowest rank in attention, at
    the speeds of very large shapes. Contiguous groups with causal attention see at least their own block.
    """
    cost, seq_len = problem.cost, problem.seq_len
    attention_s_HD = heads_HD * cost.least_attention_s_D  # per query-key pair
    sees_all = problem.sees_everything or len(groups) == 1
    # Bound of a token split under its best split of the heads, so that most token splits are left out at once.
    any_heads_T = np.zeros(len(tokens_TD))
    terms = []
    for group in groups:
        length_T = tokens_TD[:, group].sum(axis=1)
        pairs_T = length_T * (seq_len if sees_all else length_T)
        linear_s_T = (tokens_TD[:, group] * cost.least_non_attention_s_per_token_D[group]).max(axis=1)
        slowest_s_H = attention_s_HD[:, group].max(axis=1)
        terms.append((linear_s_T, pairs_T, slowest_s_H))
        np.maximum(any_heads_T, linear_s_T + slowest_s_H.min(initial=np.inf) * pairs_T, out=any_heads_T)
    promising = np.flatnonzero(any_heads_T < limit)
    num_rows = max(1, MAX_BOUNDS // max(1, len(promising)))
    for first in range(0, len(heads_HD), num_rows):
        rows = slice(first, first + num_rows)
        bound_HT = np.zeros((len(heads_HD[rows]), len(promising)))
        for linear_s_T, pairs_T, slowest_s_H in terms:
            attention_s_HT = slowest_s_H[rows, None] * pairs_T[promising]
            np.maximum(bound_HT, linear_s_T[promising] + attention_s_HT, out=bound_HT)
        h, t = np.nonzero(bound_HT < limit)
        if len(h):
            yield heads_HD[first + h], tokens_TD[promising[t]], bound_HT[h, t]


def _ring_orders(problem: Problem, groups: Sequence[Ints]) -> Iterator[list[Ints]]:
    """Yield all ring orders; if every group sees all others, without rotations, which change nothing."""
    num_fixed = 1 if problem.sees_everything else 0
    for later_groups in permutations(groups[num_fixed:]):
        yield [*groups[:num_fixed], *later_groups]
