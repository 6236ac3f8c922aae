"""The true optimum of small cases: what the search is measured against.

The space is every partition of the ranks into groups, every ring order, every split of the heads inside each group and
every split of the sequence in whole token units, zero included. Heads are cut in canonical rank order (fastest
first), as the search does. The objective is the cost model itself, so the result is its optimum over that space.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import comb

import numpy as np
from numpy.typing import NDArray

from ds_hetero.errors import PlanError
from ds_hetero.planner.exhaustive import Blocks, compositions, sweep
from ds_hetero.planner.problem import Assignment, Problem

__all__ = ["MAX_RANKS", "Exact", "solve_exact"]

Ints = NDArray[np.int64]

MAX_RANKS = 8
MAX_SPLITS = 2_000_000  # of the tokens, and of the heads of one partition


@dataclass(frozen=True, kw_only=True, slots=True)
class Exact:
    """The optimum, and how much work it was.

    Args:
        best: the optimum; None when nothing is better than the upper bound, or nothing fits into memory.
        combinations: size of the space, ring orders not counted; evaluated: what the bound did not rule out.
    """

    best: Assignment | None
    combinations: int
    evaluated: int


def solve_exact(problem: Problem, *, upper_bound_s: float = np.inf) -> Exact:
    """The best assignment of all, or proof that none takes less than ``upper_bound_s``.

    Args:
        problem: its ``token_unit`` and the smallest of its ``head_units`` are the granularity.
        upper_bound_s: time of a schedule known already; a good one saves most of the work.

    Raises:
        PlanError: too many ranks, or a granularity too fine to go through.
    """
    num_ranks, units = problem.num_ranks, problem.seq_len // problem.token_unit
    head_unit = min(problem.head_units)
    if num_ranks > MAX_RANKS:
        raise PlanError(f"the exact solver takes at most {MAX_RANKS} ranks, the cluster has {num_ranks}.")
    for what, total in (("token units", units), ("heads", problem.num_heads // head_unit)):
        count = comb(total + num_ranks - 1, num_ranks - 1)
        if count > MAX_SPLITS:
            raise PlanError(
                f"{total} {what} can be split over {num_ranks} ranks in {count} ways, the exact solver goes through "
                f"{MAX_SPLITS}. Use coarser units or fewer ranks."
            )
    tokens_TD = problem.round(compositions(units, num_ranks).astype(float) * problem.token_unit)
    found = sweep(problem, tokens_TD, lambda blocks: _head_splits(problem, blocks, head_unit), upper_bound_s)
    best = min(found.best, key=lambda assignment: assignment.time_s, default=None)
    return Exact(best=best, combinations=found.combinations, evaluated=found.evaluated)


def _head_splits(problem: Problem, blocks: Blocks, unit: int) -> Ints:
    """Every way to split the heads inside every group, ``[H, D]``."""
    heads_HD = np.zeros((1, problem.num_ranks), dtype=np.int64)
    for block in blocks:
        options = compositions(problem.num_heads // unit, len(block)) * unit
        count = len(heads_HD)
        heads_HD = np.repeat(heads_HD, len(options), axis=0)
        heads_HD[:, block] = np.tile(options, (count, 1))
    return heads_HD
