"""Exhaustion with a bound: every combination of given head splits and token splits of every partition.

A combination is evaluated with the cost model unless its compute alone already takes longer than the best known time,
so the result is the optimum of the cost model over the combinations given, not of the bound. The exact solver gives
it everything; the search of small clusters gives it coarse tokens and likely heads.

Dimension key: D ranks, K groups, T token splits, H head splits, B combinations that survive the bound.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import combinations, permutations
from math import comb

import numpy as np
from numpy.typing import NDArray

from ds_hetero.planner.groupings import set_partitions
from ds_hetero.planner.problem import Assignment, Problem

__all__ = ["Sweep", "compositions", "sweep"]

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Blocks = list[list[int]]

_TABLE = 4_000_000  # bounds computed at a time
_BATCH = 20_000  # combinations evaluated at a time


@dataclass(kw_only=True, slots=True)
class Sweep:
    """What a sweep found and how much work it was.

    Args:
        best: the best assignment of every partition that beat the bound, in no particular order.
        combinations: head splits x token splits of all partitions, ring orders not counted.
        evaluated: calls that the bound did not save, ring orders counted.
    """

    best: list[Assignment] = field(default_factory=list)
    combinations: int = 0
    evaluated: int = 0


def sweep(
    problem: Problem, tokens_TD: Floats, head_splits: Callable[[Blocks], Ints], bound_s: float, slack: float = 0.0
) -> Sweep:
    """The best combination of every partition.

    Args:
        problem: gives the objective.
        tokens_TD: token splits to try.
        head_splits: from a partition to the head splits to try, ``[H, D]``.
        bound_s: time known to be reachable; only better ones are looked for.
        slack: keep partitions that are worse than the best one by up to this share, as starts for a descent.
    """
    out = Sweep()
    least = bound_s
    for blocks in _distinct_partitions(problem):
        heads_HD = head_splits(blocks)
        out.combinations += len(heads_HD) * len(tokens_TD)
        best: Assignment | None = None
        limit = least * (1 + slack)
        for heads_BD, tokens_BD, least_B in _survivors(problem, blocks, heads_HD, tokens_TD, limit):
            for ring in _ring_orders(blocks):
                grouping = problem.grouping(ring)
                for first in range(0, len(least_B), _BATCH):
                    if least_B[first] >= limit:
                        break
                    rows = slice(first, first + _BATCH)
                    out.evaluated += len(tokens_BD[rows])
                    found = problem.best_row(grouping, tokens_BD[rows], heads_BD[rows], limit)
                    if found is not None:
                        best, limit = found, found.time_s
        if best is not None:
            out.best.append(best)
            least = min(least, best.time_s)
    return out


def compositions(total: int, parts: int) -> Ints:
    """Every way to write ``total`` as an ordered sum of ``parts`` whole numbers >= 0, one per row."""
    count = comb(total + parts - 1, parts - 1)
    bars = np.array(list(combinations(range(total + parts - 1), parts - 1)), dtype=np.int64).reshape(count, parts - 1)
    ends = np.full((count, 1), total + parts - 1)
    return np.diff(np.concatenate([np.full((count, 1), -1), bars, ends], axis=1), axis=1) - 1


def _survivors(
    problem: Problem, blocks: Blocks, heads_HD: Ints, tokens_TD: Floats, limit: float
) -> Iterator[tuple[Ints, Floats, Floats]]:
    """Combinations that compute alone does not rule out, most promising first.

    A group is done no sooner than its slowest rank outside attention and its slowest rank in it, both at the speed of
    shapes without limit. Contiguous causal groups see at least their own block.
    """
    cost, seq_len = problem.cost, problem.seq_len
    token_TD = tokens_TD * cost.least_non_attention_s_per_token_D
    head_HD = heads_HD * cost.least_attention_s_D
    whole = problem.sees_everything or len(blocks) == 1
    rows = max(1, _TABLE // len(tokens_TD))
    for first in range(0, len(heads_HD), rows):
        least_HT = np.zeros((len(heads_HD[first : first + rows]), len(tokens_TD)))
        for block in blocks:
            length_T = tokens_TD[:, block].sum(axis=1)
            pairs_T = length_T * (seq_len if whole else length_T)
            slowest_H = head_HD[first : first + rows][:, block].max(axis=1)
            np.maximum(least_HT, token_TD[:, block].max(axis=1) + slowest_H[:, None] * pairs_T, out=least_HT)
        h, t = np.nonzero(least_HT < limit)
        least = least_HT[h, t]
        order = np.argsort(least, kind="stable")
        if len(order):
            yield heads_HD[first + h[order]], tokens_TD[t[order]], least[order]


def _distinct_partitions(problem: Problem) -> Iterator[Blocks]:
    """Partitions that differ in more than the names of interchangeable ranks."""
    name = problem.kind * problem.num_ranks + problem.node
    seen = set()
    for blocks in set_partitions(problem.num_ranks):
        key = tuple(sorted(tuple(sorted(name[block].tolist())) for block in blocks))
        if key not in seen:
            seen.add(key)
            yield blocks


def _ring_orders(blocks: Sequence[list[int]]) -> Iterator[list[Ints]]:
    for rest in permutations(blocks[1:]):
        yield [np.array(block) for block in (blocks[0], *rest)]
