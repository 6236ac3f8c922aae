"""Stage II: for one partition of the ranks into groups, compute shares of heads and tokens in closed form.

Heads are divided over the ranks of a group by speed (`spread_heads`). Tokens are divided over groups in several ways,
and over the ranks of a group by speed (`shares`). The cost model chooses the best of these assignments.

Dimension key: D ranks, K groups, C candidate shares of groups, W weights of ranks in a group.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import product

import numpy as np

from ds_hetero.common.arrays import Bools, Floats, Ints
from ds_hetero.cost.terms.grouping import Grouping
from ds_hetero.planner.search.budget import EXHAUSTIVE_RANKS, EvaluationBudget
from ds_hetero.planner.search.memory_fit import fit_rows
from ds_hetero.planner.search.problem import Assignment, Problem
from ds_hetero.planner.search.ring_order import best_order, ring_orders
from ds_hetero.planner.search.shares import apportion, fill_groups, fill_ranks

# Heads are shared in proportion to these powers of speed, the likeliest first: over slow links, more equal heads are
# better. With many ranks only the first power is tried. Chosen, never measured.
EXPONENTS = (1.0, 0.5, 0.0)
ONE_PARTITION = 0.2  # most of the remaining budget that one partition may take, as a share; chosen, never measured


def best_assignment(
    problem: Problem, groups: Sequence[Ints], active: Bools, budget: EvaluationBudget, below_s: float = np.inf
) -> Assignment | None:
    """Return the best assignment of one partition among closed forms, by the cost model.

    None if a group has no working rank, nothing fits into memory, nothing is faster than ``below_s`` in any order of
    the groups, or the budget is used up.

    Args:
        groups: the partition; all ranks, the idle ones included.
        active: mask of the ranks that work, ``[D]``.
        below_s: time that an assignment has to beat.
    """
    if budget.is_spent(ONE_PARTITION) or not all(active[group].any() for group in groups):
        return None
    is_small = problem.num_ranks <= EXHAUSTIVE_RANKS
    exponents = EXPONENTS if is_small else EXPONENTS[:1]
    best: Assignment | None = None
    for order in (groups, *ring_orders(problem, groups, thorough=True)) if is_small else (groups,):
        grouping = problem.grouping(order)
        options = list(_closed_forms(problem, grouping, order, active, exponents))
        options = options[: budget.rows(grouping, len(options), ONE_PARTITION)]
        if not options:
            continue
        tokens_BD, heads_BD = problem.as_rows(options)
        limit_s = best.time_s if best else np.inf
        time_B = problem.time_s(grouping, tokens_BD, heads_BD, min(limit_s, below_s))
        best = problem.fastest_that_fits(grouping, tokens_BD, heads_BD, time_B, limit_s) or best
        is_fast_enough = np.isfinite(time_B).any()
        if best is None and is_fast_enough:
            # No row fits into memory: move tokens of the likeliest row and of the least likely one until they fit.
            tokens_BD, heads_BD = (np.stack(pair) for pair in zip(options[0], options[-1], strict=True))
            fitted = zip(fit_rows(problem.cost, grouping, tokens_BD, heads_BD), heads_BD, strict=True)
            fitted_options = [(tokens_D, heads_D) for tokens_D, heads_D in fitted if tokens_D is not None]
            best = problem.best(grouping, fitted_options)
    if is_small or best is None:
        return best
    return best_order(problem, best, budget, thorough=False)


def _closed_forms(
    problem: Problem, grouping: Grouping, groups: Sequence[Ints], active: Bools, exponents: Sequence[float]
) -> Iterator[tuple[Floats, Ints]]:
    """Yield tokens and heads by rank, ``[D]`` each, the likeliest first."""
    token_speed = np.where(active, problem.token_speed, 0.0)
    token_speed_K = grouping.by_group(np.add, token_speed)
    tokens_by_heads: dict[bytes, Floats] = {}  # other exponents and units often have the same heads
    for exponent, unit in product(exponents, problem.head_units):
        heads_D = spread_heads(problem, groups, active, unit, exponent)
        key = heads_D.tobytes()
        if key not in tokens_by_heads:
            attention_speed_K = 1 / grouping.by_group(np.maximum, heads_D * problem.attention_s)
            share_CK = fill_groups(token_speed_K, attention_speed_K, problem.sees_everything)
            weights = [token_speed]
            if len(exponents) > 1:  # tokens in proportion to heads: a rank need not send the heads that it computes
                weights.append(heads_D.astype(float))
            share_CWD = np.stack([fill_ranks(share_CK, grouping.group_of, weight) for weight in weights], axis=1)
            tokens_by_heads[key] = share_CWD.reshape(-1, problem.num_ranks) * problem.seq_len
        for tokens_D in tokens_by_heads[key]:
            yield tokens_D, heads_D


def spread_heads(problem: Problem, groups: Sequence[Ints], active: Bools, unit: int, exponent: float = 1.0) -> Ints:
    """Return heads by rank, in multiples of ``unit``, with which every group's slowest rank ends as early as possible.

    An ``exponent`` below 1 makes the heads more equal than the speeds are.
    """
    heads = np.zeros(problem.num_ranks, dtype=np.int64)
    speed = np.where(active, problem.speed**exponent, 0.0)
    for group in groups:
        heads[group] = apportion(tuple(speed[group].tolist()), problem.num_heads // unit)
    return heads * unit
