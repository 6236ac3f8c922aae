"""The true optimum of small cases: what the search is measured against.

The space is every partition of the ranks into groups, every ring order, every split of the heads inside each group and
every split of the sequence in whole token units, zero included. Heads are cut in canonical rank order (fastest
first), as the search does. The objective is the cost model itself: a combination is evaluated with it unless its
compute alone takes longer than the best one known, so the result is the model's optimum and not the bound's.

Dimension key: D ranks, K groups, T token splits, H head splits, B combinations that survive the bound.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations, pairwise, permutations
from math import comb

import numpy as np

from ds_hetero.common.arrays import Floats, Ints
from ds_hetero.cost.terms.head_cuts import kv_heads_of_ranks
from ds_hetero.errors import PlanError
from ds_hetero.planner.search.interchangeable import distinct_partitions, interchangeable
from ds_hetero.planner.search.problem import Assignment, Problem

# Chosen, never measured: larger problems take minutes.
MAX_RANKS = 8
MAX_SPLITS = 2_000_000  # of the tokens, and of the heads of one partition
TABLE = 4_000_000  # bounds computed at a time
BATCH = 20_000  # combinations evaluated at a time


@dataclass(frozen=True, kw_only=True, slots=True)
class Exact:
    """The optimum, and how much work it was."""

    best: Assignment | None  # the optimum; None when nothing is below the upper bound, or nothing fits into memory
    combinations: int  # size of the space, ring orders not counted
    evaluated: int  # calls of the cost model that the bound did not save, ring orders counted
    complete: bool = True  # False where the search ended at its most calls; ``best`` is then the best of these


def solve_exact(problem: Problem, *, upper_bound_s: float = np.inf, most: float = np.inf) -> Exact:
    """The best assignment, or proof of none below ``upper_bound_s``. Raises `PlanError`: too much to go through.

    Args:
        problem: its ``token_unit`` and the smallest of its ``head_units`` are the granularity.
        upper_bound_s: time of a schedule known already; a good one saves most of the work.
        most: calls of the cost model after which the search ends.
    """
    num_ranks, head_unit = problem.num_ranks, min(problem.head_units)
    if num_ranks > MAX_RANKS:
        raise PlanError(f"the exact solver takes at most {MAX_RANKS} ranks, the cluster has {num_ranks}.")
    units, head_units = problem.seq_len // problem.token_unit, problem.num_heads // head_unit
    for what, total in (("token units", units), ("heads", head_units)):
        count = comb(total + num_ranks - 1, num_ranks - 1)
        if count > MAX_SPLITS:
            raise PlanError(
                f"{total} {what} can be split over {num_ranks} ranks in {count} ways, the exact solver goes through "
                f"{MAX_SPLITS}. Use coarser units or fewer ranks."
            )
    tokens_TD = problem.round(compositions(units, num_ranks).astype(np.float64) * problem.token_unit)
    best: Assignment | None = None
    limit, total, evaluated = upper_bound_s, 0, 0
    if limit <= problem.floor_s:
        return Exact(best=None, combinations=0, evaluated=0)
    for groups in distinct_partitions(problem, np.arange(num_ranks)):
        heads_HD = _head_splits(problem, groups, head_unit)
        total += len(heads_HD) * len(tokens_TD)
        rings = list(_ring_orders(problem, groups))
        for heads_BD, tokens_BD, least_B in _worth_a_look(problem, groups, heads_HD, tokens_TD, limit):
            if len(rings) > 1:
                free_B = problem.free_ring_s(problem.grouping(groups), tokens_BD, heads_BD)
                kept = np.flatnonzero(np.maximum(free_B, least_B) < limit)
                heads_BD, tokens_BD, least_B = heads_BD[kept], tokens_BD[kept], least_B[kept]
            for ring in rings:
                grouping = problem.grouping(ring)
                for first in range(0, len(least_B), BATCH):
                    if least_B[first] >= limit:
                        break
                    rows = slice(first, first + BATCH)
                    evaluated += len(tokens_BD[rows])
                    better = problem.best_row(grouping, tokens_BD[rows], heads_BD[rows], limit)
                    if better is not None:
                        best, limit = better, better.time_s
                    if evaluated >= most:
                        return Exact(best=best, combinations=total, evaluated=evaluated, complete=False)
    return Exact(best=best, combinations=total, evaluated=evaluated)


def compositions(total: int, parts: int) -> Ints:
    """Every way to write ``total`` as an ordered sum of ``parts`` whole numbers >= 0, one per row."""
    count = comb(total + parts - 1, parts - 1)
    bars = np.array(list(combinations(range(total + parts - 1), parts - 1)), dtype=np.int64).reshape(count, parts - 1)
    ends = np.full((count, 1), total + parts - 1)
    return np.diff(np.concatenate([np.full((count, 1), -1), bars, ends], axis=1), axis=1) - 1


def _head_splits(problem: Problem, groups: Sequence[Ints], unit: int) -> Ints:
    """Every way to split the heads inside every group, ``[H, D]``."""
    heads_HD = np.zeros((1, problem.num_ranks), dtype=np.int64)
    for group in groups:
        options = compositions(problem.num_heads // unit, len(group)) * unit
        count = len(heads_HD)
        heads_HD = np.repeat(heads_HD, len(options), axis=0)
        heads_HD[:, group] = np.tile(options, (count, 1))
    return heads_HD


def _worth_a_look(
    problem: Problem, groups: Sequence[Ints], heads_HD: Ints, tokens_TD: Floats, limit: float
) -> Iterator[tuple[Ints, Floats, Floats]]:
    """`_survivors`, most promising first, of two ranks alike only with the one's tokens not fewer than the other's.

    Alike are equal devices of one node and group that have as many heads and KV heads: the cost model adds up what
    they send and hold, so trading their tokens changes nothing.
    """
    name = interchangeable(problem)
    pairs = [(a, b) for group in groups for a, b in pairwise(group.tolist()) if name[a] == name[b]]
    first, second = np.array(pairs, dtype=np.int64).reshape(-1, 2).T
    kv_HD = kv_heads_of_ranks(problem.grouping(groups), heads_HD, problem.cost.model.queries_per_kv_head)
    alike_HP = (heads_HD[:, first] == heads_HD[:, second]) & (kv_HD[:, first] == kv_HD[:, second])
    patterns, pattern_H = np.unique(alike_HP, axis=0, return_inverse=True)
    waiting: list[tuple[Ints, Floats, Floats]] = []
    for i, alike in enumerate(patterns):
        once = (tokens_TD[:, first[alike]] >= tokens_TD[:, second[alike]]).all(axis=1)
        for rows in _survivors(problem, groups, heads_HD[pattern_H.reshape(-1) == i], tokens_TD[once], limit):
            waiting.append(rows)
            if sum(len(least) for _, _, least in waiting) >= BATCH:
                yield _most_promising_first(waiting)
                waiting = []
    if waiting:
        yield _most_promising_first(waiting)


def _most_promising_first(parts: Sequence[tuple[Ints, Floats, Floats]]) -> tuple[Ints, Floats, Floats]:
    heads_BD, tokens_BD, least_B = (np.concatenate(part) for part in zip(*parts, strict=True))
    order = np.argsort(least_B, kind="stable")
    return heads_BD[order], tokens_BD[order], least_B[order]


def _survivors(
    problem: Problem, groups: Sequence[Ints], heads_HD: Ints, tokens_TD: Floats, limit: float
) -> Iterator[tuple[Ints, Floats, Floats]]:
    """Combinations that compute alone does not rule out, with the time that it takes at least.

    A group is done no sooner than its slowest rank outside attention and its slowest rank in it, both at the speed of
    shapes without limit. Contiguous causal groups see at least their own block.
    """
    cost, seq_len = problem.cost, problem.seq_len
    head_HD = heads_HD * cost.least_attention_s_D
    sees_all = problem.sees_everything or len(groups) == 1
    groups_alone_T = np.zeros(len(tokens_TD))
    terms = []
    for group in groups:
        length_T = tokens_TD[:, group].sum(axis=1)
        pairs_T = length_T * (seq_len if sees_all else length_T)
        token_T = (tokens_TD[:, group] * cost.least_non_attention_s_per_token_D[group]).max(axis=1)
        slowest_H = head_HD[:, group].max(axis=1)
        terms.append((token_T, pairs_T, slowest_H))
        np.maximum(groups_alone_T, token_T + slowest_H.min(initial=np.inf) * pairs_T, out=groups_alone_T)
    promising = np.flatnonzero(groups_alone_T < limit)
    rows = max(1, TABLE // max(1, len(promising)))
    for first in range(0, len(heads_HD), rows):
        least_HT = np.zeros((len(heads_HD[first : first + rows]), len(promising)))
        for token_T, pairs_T, slowest_H in terms:
            attention_HT = slowest_H[first : first + rows, None] * pairs_T[promising]
            np.maximum(least_HT, token_T[promising] + attention_HT, out=least_HT)
        h, t = np.nonzero(least_HT < limit)
        if len(h):
            yield heads_HD[first + h], tokens_TD[promising[t]], least_HT[h, t]


def _ring_orders(problem: Problem, groups: Sequence[Ints]) -> Iterator[list[Ints]]:
    """All of them; where every group sees everything a rotation changes nothing."""
    fixed = 1 if problem.sees_everything else 0
    for rest in permutations(groups[fixed:]):
        yield [*groups[:fixed], *rest]
