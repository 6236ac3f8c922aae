"""Stages I and II: partitions, and for each the best of a few heads and tokens in closed form.

Ring order: in which order KV blocks pass through the groups when links differ.

Every block travels round the whole ring, so a slow link costs the same wherever it is; what an order can
change is how many slow links are in the ring, how well neighbouring head cuts match, and how many transfers share
a port at a time.

Making an assignment fit into memory, and saying what would fit when nothing does.

Memory grows with a rank's own tokens (activations of every layer) and with its heads of its group's tokens (attention
of one layer); moving tokens from full ranks to ranks with room mends both.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import permutations, product

import numpy as np

from ds_hetero.common.arrays import Bools, Floats, Ints, distinct
from ds_hetero.cost import make_cost_model
from ds_hetero.cost.model import CostModel
from ds_hetero.cost.terms.grouping import Grouping
from ds_hetero.planner.search.partitions import M1, active_sets, groupings, with_idle
from ds_hetero.planner.search.problem import (
    EXHAUSTIVE_RANKS,
    LEAST_GAIN,
    Assignment,
    EvaluationBudget,
    Problem,
    Shortlist,
)
from ds_hetero.planner.search.shares import apportion, fill_groups, fill_ranks

ROUNDS = 30
MARGIN = 0.999  # of the room, so that rounding to whole tokens still fits


def fit_memory(cost: CostModel, grouping: Grouping, tokens: Floats, heads: Ints) -> Floats | None:
    """Tokens near the given ones with which every rank fits; None where there is no such.

    Full ranks give what they cannot hold to the others, in proportion to their room. A rank's memory grows with its own
    tokens and with those of its group; the first slope says what it can hold while the second stands still, and
    where tokens change their group it is computed again.
    """
    total, working = tokens.sum(), tokens > 0
    heads_of_both, direction = np.stack([heads, heads]), _exchanged(grouping)
    for _ in range(ROUNDS):
        step = tokens.sum() * 1e-6 * direction
        need, moved = cost.memory_bytes(grouping, np.stack([tokens, tokens + step]), heads_of_both)
        if (need <= cost.capacity_bytes_D).all():
            return tokens
        bytes_per_own_token = np.maximum((moved - need) / step, 1.0)
        spare = MARGIN * (cost.capacity_bytes_D - need) / bytes_per_own_token
        holds = np.where(working, np.maximum(tokens + spare, 0.0), 0.0)
        kept = np.minimum(tokens, holds)
        room = holds - kept
        missing = total - kept.sum()
        if room.sum() < missing:
            return None
        tokens = kept + room * (missing / room.sum())
    return None


def _exchanged(grouping: Grouping) -> Floats:
    """Tokens that half of a group's ranks give to the other half, ``[D]``, so that its length stays.

    What a small step in this direction needs is the slope of every rank's memory in its own tokens.
    """
    place = np.empty_like(grouping.order)
    place[grouping.order] = np.arange(len(place)) - np.repeat(grouping.offsets[:-1], grouping.sizes)
    size = grouping.sizes[grouping.group_of]
    return np.where(place < size // 2, -1.0 / np.maximum(size // 2, 1), 1.0 / (size - size // 2))


def has_room(cost: CostModel) -> bool:
    """Whether every rank can hold what it holds without tokens and heads, which no schedule makes less."""
    num_ranks = cost.cluster.num_ranks
    grouping = Grouping(cost.cluster, [range(num_ranks)])
    least_D = cost.memory_bytes(grouping, np.zeros(num_ranks), np.zeros(num_ranks, dtype=np.int64))
    return bool((least_D <= cost.capacity_bytes_D).all())


def longest_of_assignment(cost: CostModel) -> int:
    """About how many tokens of a sequence would fit on this cluster, by bisection; 0 if the model itself does not."""
    if not has_room(cost):
        return 0
    low, high = 0, cost.workload.seq_len
    while high - low > max(1, low // 50):
        middle = (low + high) // 2
        shorter = make_cost_model(cost.name, cost.cluster, cost.model, replace(cost.workload, seq_len=middle))
        if fits_somehow(shorter):
            low = middle
        else:
            high = middle
    return low


def fits_somehow(cost: CostModel) -> bool:
    """Whether one of three simple groupings fits, with the tokens that its ranks have room for."""
    fitted = (fit_memory(cost, *simple) for simple in _simple(cost))
    return any(tokens_D is not None and cost.host_has_room(tokens_D) for tokens_D in fitted)


def _simple(cost: CostModel) -> Iterator[tuple[Grouping, Floats, Ints]]:
    """The ring, one group per node and one group of all, with tokens by free memory."""
    num_ranks, num_heads = cost.cluster.num_ranks, cost.model.num_heads
    node = cost.cluster.node_of_rank
    by_node = [np.flatnonzero(node == n) for n in range(int(node.max()) + 1)]
    share = cost.capacity_bytes_D / cost.capacity_bytes_D.sum()
    for groups in (list(np.arange(num_ranks)[:, None]), by_node, [np.arange(num_ranks)]):
        heads = np.zeros(num_ranks, dtype=np.int64)
        for group in groups:
            heads[group] = apportion(tuple(share[group].tolist()), num_heads)
        yield Grouping(cost.cluster, groups), share * cost.workload.seq_len, heads


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
        shortlist: an empty one, which says what is worth evaluating to the end.
    """
    least = np.inf
    all_ranks, *some_ranks = active_sets(problem)
    idle_budget = EvaluationBudget(budget.left_s / 3)
    for active in (all_ranks, *some_ranks):
        if problem.bound_s(active) >= least:
            continue
        idle = not active.all()
        keep = M1_IDLE if idle and problem.num_ranks > EXHAUSTIVE_RANKS else M1
        for assignment in of_partitions(problem, active, keep, idle_budget if idle else budget, shortlist):
            least = min(least, assignment.time_s)
    return shortlist.best


def of_partitions(
    problem: Problem, active: Mask, keep: int, budget: EvaluationBudget, shortlist: Shortlist
) -> Iterator[Assignment]:
    """The best of each of ``keep`` partitions of a set of working ranks, as far as the budget goes; into the shortlist.

    A set whose partitions were all looked at is in `Problem.looked_at`: none of them has more to give.
    """
    if budget.is_spent(ONE_PARTITION):
        return
    for groups in groupings(problem, active, keep):
        if budget.is_spent(ONE_PARTITION):
            return
        groups = with_idle(problem, groups, active)
        assignment = best_assignment(problem, groups, active, budget, shortlist.limit_s)
        if assignment is not None:
            shortlist.add(assignment)
            yield assignment
    problem.looked_at.add(active.tobytes())


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
    made: dict[bytes, Floats] = {}  # tokens, by heads: other exponents and units often have the same
    for exponent, unit in product(exponents, problem.head_units):
        heads_D = spread_heads(problem, groups, active, unit, exponent)
        key = heads_D.tobytes()
        if key in made:
            yield from ((tokens_D, heads_D) for tokens_D in made[key])
            continue
        attention_speed_K = 1 / grouping.by_group(np.maximum, heads_D * problem.attention_s)
        share_CK = fill_groups(token_speed_K, attention_speed_K, problem.sees_everything)
        weights = [token_speed]
        if len(exponents) > 1:  # what a rank computes itself it need not send
            weights.append(heads_D.astype(float))
        tokens_CWD = np.stack([fill_ranks(share_CK, grouping.group_of, each) for each in weights], axis=1)
        made[key] = tokens_CWD.reshape(-1, problem.num_ranks) * problem.seq_len
        yield from ((tokens_D, heads_D) for tokens_D in made[key])


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
