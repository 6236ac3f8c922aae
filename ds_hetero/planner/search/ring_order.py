"""Order in which KV blocks pass through the groups of a ring.

Every block travels round the whole ring, so a slow link costs the same wherever it is; what an order can
change is how many slow links are in the ring, how well neighbouring head cuts match, and how many transfers share
a port at a time.

Dimension key: K groups.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import permutations

import numpy as np

from ds_hetero.common.arrays import Floats, Ints, distinct
from ds_hetero.planner.search.budget import EvaluationBudget
from ds_hetero.planner.search.problem import LEAST_ORDER_GAIN, Assignment, Problem

MOST_GROUPS_PERMUTED = 5  # groups up to which every order is tried, at most 24; chosen, never measured
MOST_GROUPS_TOURED = (
    96  # groups up to which a tour is improved by 2-opt, whose rounds are quadratic; chosen, never measured
)
_TOUR_ROUNDS = 20  # chosen, never measured: rounds end as soon as one improves nothing
_LEAST_TOUR_GAIN = 1e-12  # of the longest link; less is rounding


def best_order(problem: Problem, start: Assignment, budget: EvaluationBudget, *, thorough: bool) -> Assignment:
    """The same assignment in the best of a few ring orders."""
    best = start
    if not problem.order_matters(start):
        return best
    for groups in ring_orders(problem, start.groups, thorough):
        grouping = problem.grouping(groups)
        if budget.rows(grouping, 1):
            option = (start.tokens, start.heads)
            best = problem.best(grouping, [option], best.time_s * (1 - LEAST_ORDER_GAIN)) or best
    return best


def ring_orders(problem: Problem, groups: Sequence[Ints], thorough: bool) -> Iterator[list[Ints]]:
    """Orders worth trying other than the given one; the thorough ones take longer to find than to evaluate."""
    if len(groups) < 3:  # two groups pass blocks to each other in either order
        return
    if thorough and len(groups) <= MOST_GROUPS_PERMUTED:
        yield from _all_orders(problem, groups)
        return
    is_seen = {np.arange(len(groups)).tobytes()}
    for order in _promising_orders(problem, groups, thorough):
        if order.tobytes() not in is_seen:
            is_seen.add(order.tobytes())
            yield [groups[k] for k in order]


def _all_orders(problem: Problem, groups: Sequence[Ints]) -> Iterator[list[Ints]]:
    """Every order that begins with the first group and differs in more than groups of one makeup."""
    num_nodes = len(problem.inverse_bandwidth)
    name = problem.kind * num_nodes + problem.node  # equal devices of one node have one name
    makeup = [tuple(np.sort(name[group]).tolist()) for group in groups]
    is_seen = {tuple(makeup[1:])}
    for rest in permutations(range(1, len(groups))):
        makeups = tuple(makeup[k] for k in rest)
        if makeups not in is_seen:
            is_seen.add(makeups)
            yield [groups[0], *(groups[k] for k in rest)]


def _promising_orders(problem: Problem, groups: Sequence[Ints], thorough: bool) -> Iterator[Ints]:
    """Groups node by node; one group of each node in turn; and a short tour over the links.

    Node by node a ring has the fewest hops between nodes, in turn the most, with one hop out of each node at a time.
    Of groups on nodes 0 0 1 1: orders 0 1 2 3 and 0 2 1 3.
    """
    main_node = np.array([np.bincount(problem.node[group]).argmax() for group in groups])
    first_rank = np.array([group[0] for group in groups])
    by_node = np.lexsort((first_rank, main_node))
    sorted_nodes = main_node[by_node]
    place_on_node = np.empty(len(groups), dtype=np.int64)
    place_on_node[by_node] = np.arange(len(groups)) - np.searchsorted(sorted_nodes, sorted_nodes)
    yield by_node
    yield np.lexsort((main_node, place_on_node))
    if thorough and len(groups) <= MOST_GROUPS_TOURED and len(distinct(main_node)) > 2:
        yield _tour(_distance(problem, groups))


def _distance(problem: Problem, groups: Sequence[Ints]) -> Floats:
    """Mean seconds per byte between the ranks of two groups, ``[K, K]``."""
    num_nodes = len(problem.inverse_bandwidth)
    share = np.stack([np.bincount(problem.node[group], minlength=num_nodes) / len(group) for group in groups])
    return np.asarray(share @ problem.inverse_bandwidth @ share.T)


def _tour(distance: Floats) -> Ints:
    """A short round trip over symmetric distances: nearest neighbour, then 2-opt."""
    num_groups = len(distance)
    order = [0]
    free = set(range(1, num_groups))
    while free:
        order.append(min(free, key=lambda k: (distance[order[-1], k], k)))
        free.remove(order[-1])
    tour = np.array(order)
    for _ in range(_TOUR_ROUNDS):
        has_improved = False
        for i in range(num_groups - 2):
            # Links a-b and c-d become a-c and b-d when everything from b to c is turned round. All c at once.
            a, b = tour[i], tour[i + 1]
            c, d = tour[i + 2 :], np.append(tour[i + 3 :], tour[0])
            gain = distance[a, b] + distance[c, d] - distance[a, c] - distance[b, d]
            j = int(np.argmax(gain))
            if gain[j] > _LEAST_TOUR_GAIN * distance.max():
                b_to_c = slice(i + 1, i + 3 + j)
                tour[b_to_c] = tour[b_to_c][::-1].copy()
                has_improved = True
        if not has_improved:
            break
    return tour
