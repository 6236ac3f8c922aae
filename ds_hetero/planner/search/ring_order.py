"""Ring order: in which order KV blocks pass through the groups when links differ.

Every block travels round the whole ring, so a slow link costs the same wherever it is; what an order can
change is how many slow links are in the ring, how well neighbouring head cuts match, and how many transfers share
a port at a time.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import permutations

import numpy as np

from ds_hetero.common.arrays import Floats, Ints, distinct
from ds_hetero.planner.search.problem import Problem

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
