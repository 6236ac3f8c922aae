"""Stages I and II: partitions, and for each the best of a few heads and tokens in closed form.

Ring order: in which order KV blocks pass through the groups when links differ.

Every block travels round the whole ring, so a slow link costs the same wherever it is; what an order can
change is how many slow links are in the ring, how well neighbouring head cuts match, and how many transfers share
a port at a time.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import permutations, product

import numpy as np

from ds_hetero.common.arrays import Bools, Floats, Ints, distinct
from ds_hetero.cost.terms.grouping import Grouping
from ds_hetero.planner.search.budget import EXHAUSTIVE_RANKS, EvaluationBudget, Shortlist
from ds_hetero.planner.search.memory_fit import fit_memory
from ds_hetero.planner.search.partitions import M1, active_sets, groupings, with_idle
from ds_hetero.planner.search.problem import LEAST_GAIN, Assignment, Problem
from ds_hetero.planner.search.shares import apportion, fill_groups, fill_ranks

ALL_ORDERS = 5  # groups up to which every order is tried
TOUR = 96  # groups up to which a tour is improved by 2-opt


def ring_orders(problem: Problem, groups: Sequence[Ints], thorough: bool) -> Iterator[list[Ints]]:
    """Orders worth trying other than the given one; the thorough ones take longer to find than to evaluate."""
    num = len(groups)
    if num < 3:
        return
    if thorough and num <= ALL_ORDERS:
        name = problem.kind * len(problem.inverse_bandwidth) + problem.node
        makeup = [tuple(np.sort(name[group]).tolist()) for group in groups]
        seen_makeups = {tuple(makeup[1:])}
        for rest in permutations(range(1, num)):
            key = tuple(makeup[k] for k in rest)
            if key not in seen_makeups:
                seen_makeups.add(key)
                yield [groups[0], *(groups[k] for k in rest)]
        return
    main = np.array([np.bincount(problem.node[group]).argmax() for group in groups])
    first = np.array([group[0] for group in groups])
    by_node = np.lexsort((first, main))
    place = np.empty(num, dtype=np.int64)
    place[by_node] = np.arange(num) - np.searchsorted(main[by_node], main[by_node])
    orders = [by_node, np.lexsort((main, place))]
    if thorough and num <= TOUR and len(distinct(main)) > 2:
        orders.append(_tour(_distance(problem, groups)))
    seen = {np.arange(num).tobytes()}
    for order in orders:
        if order.tobytes() not in seen:
            seen.add(order.tobytes())
            yield [groups[k] for k in order]


def _distance(problem: Problem, groups: Sequence[Ints]) -> Floats:
    """Mean seconds per byte between the ranks of two groups, ``[K, K]``."""
    nodes = len(problem.inverse_bandwidth)
    share = np.stack([np.bincount(problem.node[group], minlength=nodes) / len(group) for group in groups])
    return np.asarray(share @ problem.inverse_bandwidth @ share.T)


def _tour(distance: Floats) -> Ints:
    """Nearest neighbour, then 2-opt on the sum of link costs; links are symmetric."""
    num = len(distance)
    order = [0]
    free = set(range(1, num))
    while free:
        order.append(min(free, key=lambda k: (distance[order[-1], k], k)))
        free.remove(order[-1])
    tour = np.array(order)
    for _ in range(20):
        improved = False
        for i in range(num - 2):
            a, b = tour[i], tour[i + 1]
            c, d = tour[i + 2 :], np.append(tour[i + 3 :], tour[0])
            gain = distance[a, b] + distance[c, d] - distance[a, c] - distance[b, d]
            j = int(np.argmax(gain))
            if gain[j] > 1e-12 * distance.max():
                tour[i + 1 : i + 3 + j] = tour[i + 1 : i + 3 + j][::-1].copy()
                improved = True
        if not improved:
            break
    return tour


Mask = Bools

EXPONENTS = (1.0, 0.5, 0.0)  # heads in proportion to this power of speed: slow links favour equal ones
M1_IDLE = 12  # partitions tried where some ranks stay idle
ONE_PARTITION = 0.2  # share of the remaining budget that one partition may take


def starts(problem: Problem, budget: EvaluationBudget, shortlist: Shortlist) -> list[Assignment]:
    """The best of all partitions of stage I, for every set of working ranks that could still win.

    Fewer working ranks need at least the balanced time over their own speeds, which rules most sets out where links are
    fast.

    Args:
        problem: what to minimize.
        budget: how much may be evaluated.
        shortlist: an empty one, which says what is worth evaluating to the end.
    """
    least = np.inf
    all_ranks, *some_ranks = active_sets(problem)
    idle_budget = EvaluationBudget(budget.left_s / 3)
    for active in (all_ranks, *some_ranks):
        if problem.bound_s(active) >= least:
            continue
        idle = not active.all()
        of_set = idle_budget if idle else budget
        if of_set.is_spent(ONE_PARTITION):
            continue
        for groups in groupings(problem, active, M1_IDLE if idle and problem.num_ranks > EXHAUSTIVE_RANKS else M1):
            if of_set.is_spent(ONE_PARTITION):
                break
            groups = with_idle(problem, groups, active)
            assignment = best_assignment(problem, groups, active, of_set, shortlist.limit_s)
            if assignment is not None:
                shortlist.add(assignment)
                least = min(least, assignment.time_s)
    return shortlist.best


def best_assignment(
    problem: Problem, groups: Sequence[Ints], active: Mask, budget: EvaluationBudget, below_s: float = np.inf
) -> Assignment | None:
    """Heads and tokens of one partition by closed forms, the best by the cost model.

    None where a group has no working rank, nothing fits into memory, nothing takes less than ``below_s`` in any order
    of the groups, or the budget is used up.
    """
    if budget.is_spent(ONE_PARTITION) or not all(active[group].any() for group in groups):
        return None
    few = problem.num_ranks <= EXHAUSTIVE_RANKS
    best: Assignment | None = None
    for order in (groups, *ring_orders(problem, groups, thorough=True)) if few else (groups,):
        grouping = problem.grouping(order)
        options = list(_closed_forms(problem, grouping, order, active, EXPONENTS if few else EXPONENTS[:1]))
        options = options[: budget.rows(grouping, len(options), ONE_PARTITION)]
        if not options:
            continue
        rows, limit_s = problem.rows_of(options), best.time_s if best else np.inf
        time_B = problem.time_s(grouping, *rows, min(limit_s, below_s))
        best = problem.fastest_that_fits(grouping, *rows, time_B, limit_s) or best
        if best is None and np.isfinite(time_B).any():
            ends = (options[0], options[-1])
            fitted = [(fit_memory(problem.cost, grouping, tokens, heads), heads) for tokens, heads in ends]
            best = problem.best(grouping, [(tokens, heads) for tokens, heads in fitted if tokens is not None])
    return best if few or best is None else best_order(problem, best, budget, thorough=False)


def _closed_forms(
    problem: Problem, grouping: Grouping, groups: Sequence[Ints], active: Mask, exponents: Sequence[float]
) -> Iterator[tuple[Floats, Ints]]:
    """Tokens and heads, each ``[D]``, the likeliest first."""
    token_speed = np.where(active, problem.token_speed, 0.0)
    token_speed_K = grouping.by_group(np.add, token_speed)
    for exponent, unit in product(exponents, problem.head_units):
        heads_D = spread_heads(problem, groups, active, unit, exponent)
        attention_speed_K = 1 / grouping.by_group(np.maximum, heads_D * problem.attention_s)
        share_CK = fill_groups(token_speed_K, attention_speed_K, problem.sees_everything)
        weights = [token_speed]
        if len(exponents) > 1:  # what a rank computes itself it need not send
            weights.append(heads_D.astype(float))
        tokens_CWD = np.stack([fill_ranks(share_CK, grouping.group_of, each) for each in weights], axis=1)
        for tokens_D in tokens_CWD.reshape(-1, problem.num_ranks) * problem.seq_len:
            yield tokens_D, heads_D


def best_order(problem: Problem, start: Assignment, budget: EvaluationBudget, *, thorough: bool) -> Assignment:
    """The same assignment in the best of a few ring orders."""
    best = start
    for groups in ring_orders(problem, start.groups, thorough) if problem.order_matters(start) else ():
        grouping = problem.grouping(groups)
        if budget.rows(grouping, 1):
            best = problem.best(grouping, [(start.tokens, start.heads)], best.time_s * (1 - LEAST_GAIN)) or best
    return best


def spread_heads(problem: Problem, groups: Sequence[Ints], active: Mask, unit: int, exponent: float = 1.0) -> Ints:
    """Heads of every rank, in multiples of ``unit``: within each group the slowest finishes as early as it can.

    An ``exponent`` below 1 makes ranks more equal than their speeds are.
    """
    heads = np.zeros(problem.num_ranks, dtype=np.int64)
    speed = np.where(active, problem.speed**exponent, 0.0)
    for group in groups:
        heads[group] = apportion(tuple(speed[group].tolist()), problem.num_heads // unit)
    return heads * unit
