"""Choose the order of the groups in a ring, in which KV blocks pass from group to group.

Every block travels round the whole ring, so a slow link costs the same at any place. The order decides how many slow
links are in the ring, how well the divisions of heads of neighbouring groups match, and how many transfers share a NIC
port at a time.

Dimension key: K groups.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import permutations

import numpy as np

from ds_hetero.common.arrays import Floats, Ints, distinct
from ds_hetero.planner.search.budget import EvaluationBudget
from ds_hetero.planner.search.problem import LEAST_ORDER_GAIN, Assignment, Problem

MAX_GROUPS_PERMUTED = 5  # most groups with which every order is tried, at most 24 orders; chosen, never measured
MAX_GROUPS_TOURED = 96  # most groups with which a tour is improved by 2-opt, a quadratic search; chosen, never measured
_TOUR_ROUNDS = 20  # most rounds of 2-opt; a round that improves nothing is the last; chosen, never measured
_LEAST_TOUR_GAIN = 1e-12  # relative to the longest link; less is rounding


def best_order(problem: Problem, start: Assignment, budget: EvaluationBudget, *, thorough: bool) -> Assignment:
    """Return the same assignment in the fastest of a few ring orders.

    Args:
        thorough: see `ring_orders`.
    """
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
    """Yield promising ring orders other than the order of ``groups``.

    Args:
        thorough: True to also yield orders that take longer to find than to evaluate: all orders of up to
            `MAX_GROUPS_PERMUTED` groups, a tour of more groups.
    """
    if len(groups) < 3:  # two groups pass blocks to each other in either order
        return
    if thorough and len(groups) <= MAX_GROUPS_PERMUTED:
        yield from _all_orders(problem, groups)
        return
    orders_so_far = {np.arange(len(groups)).tobytes()}
    for order in _promising_orders(problem, groups, thorough):
        if order.tobytes() not in orders_so_far:
            orders_so_far.add(order.tobytes())
            yield [groups[k] for k in order]


def _all_orders(problem: Problem, groups: Sequence[Ints]) -> Iterator[list[Ints]]:
    """Yield every order that begins with the first group, without those that only swap groups of the same makeup."""
    num_nodes = len(problem.inverse_bandwidth)
    label = problem.kind * num_nodes + problem.node  # equal devices of a node have the same label
    makeup = [tuple(np.sort(label[group]).tolist()) for group in groups]
    makeups_so_far = {tuple(makeup[1:])}
    for later_groups in permutations(range(1, len(groups))):
        makeups = tuple(makeup[k] for k in later_groups)
        if makeups not in makeups_so_far:
            makeups_so_far.add(makeups)
            yield [groups[0], *(groups[k] for k in later_groups)]


def _promising_orders(problem: Problem, groups: Sequence[Ints], thorough: bool) -> Iterator[Ints]:
    """Yield orders, as indices of groups: node by node; one group of each node in turn; a short tour over the links.

    Node by node the ring has the fewest sends between nodes. In turn it has the most, but each node has one outgoing
    send at a time. Example: four groups on nodes 0, 0, 1 and 1 give the orders 0 1 2 3 and 0 2 1 3.
    """
    main_node = np.array([np.bincount(problem.node[group]).argmax() for group in groups])
    first_rank = np.array([group[0] for group in groups])
    by_node = np.lexsort((first_rank, main_node))
    sorted_nodes = main_node[by_node]
    place_on_node = np.empty(len(groups), dtype=np.int64)
    place_on_node[by_node] = np.arange(len(groups)) - np.searchsorted(sorted_nodes, sorted_nodes)
    yield by_node
    yield np.lexsort((main_node, place_on_node))
    if thorough and len(groups) <= MAX_GROUPS_TOURED and len(distinct(main_node)) > 2:
        yield _tour(_distance(problem, groups))


def _distance(problem: Problem, groups: Sequence[Ints]) -> Floats:
    """Return the mean seconds per byte between the ranks of two groups, ``[K, K]``."""
    num_nodes = len(problem.inverse_bandwidth)
    share = np.stack([np.bincount(problem.node[group], minlength=num_nodes) / len(group) for group in groups])
    return np.asarray(share @ problem.inverse_bandwidth @ share.T)


def _tour(distance: Floats) -> Ints:
    """Return a short round trip over symmetric distances ``[K, K]``: nearest neighbour first, then improved by 2-opt.

    2-opt exchanges two links of the trip for two shorter ones, by reversing the part between them.
    """
    num_groups = len(distance)
    order = [0]
    unvisited = set(range(1, num_groups))
    while unvisited:
        order.append(min(unvisited, key=lambda k: (distance[order[-1], k], k)))
        unvisited.remove(order[-1])
    tour = np.array(order)
    for _ in range(_TOUR_ROUNDS):
        has_improved = False
        for i in range(num_groups - 2):
            # Reversing the part from b to c replaces the links a-b and c-d by a-c and b-d. All c are compared at once.
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
