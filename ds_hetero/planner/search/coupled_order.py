"""Of ring orders that are equally fast, choose one in which groups wait least for the groups that they send to.

If transfers hide behind attention, every order of a ring is predicted to be equally fast, since messages have
communicators by colour. In a coupled ring they are not: a group also waits for its receiver, which may still work on a
longer block (`ds_hetero.cost.terms.ring`). Lanes of documents between groups that are no neighbours are coupled. So the
order is chosen that would be fast in either ring; the prediction stays the same.

Example: tokens 4:4:1:1 on speeds 4:4:1:1. Coupled, the ring takes 12 in this order, and 10 as 4:1:4:1.

Dimension key: K groups, P orders.
"""

from __future__ import annotations

from itertools import combinations, permutations

import numpy as np

from ds_hetero.batch.ring_colours import EVEN_RING
from ds_hetero.common.arrays import Floats, Ints
from ds_hetero.planner.search.problem import LEAST_ORDER_GAIN, Assignment, Problem, without_last_bits

MAX_COUPLED_PERMUTED = 6  # most groups with which all orders are compared, at most 120; chosen, never measured
MAX_COUPLED_SWAPPED = 24  # most groups with which all swaps of two are compared, at most 276; chosen, never measured
MAX_COUPLED_GROUPS = 96  # most groups that are reordered at all; a longer ring takes too long; chosen, never measured
_SWAP_ROUNDS = 4  # most rounds of swaps; a round that improves nothing is the last; chosen, never measured
_ORDERS_TRIED = 24  # orders that are evaluated with their transfers: all of five groups; chosen, never measured
_ORDERS_KEPT = 4  # orders of a round of swaps that are added; chosen, never measured
_LEAST_COUPLED_GAIN = 1e-3  # smaller gains of the coupled ring keep the order; chosen, never measured


def least_coupled(problem: Problem, start: Assignment) -> Assignment:
    """Return the same assignment in an order that is as fast, and faster if the ring is coupled; or ``start``."""
    num_groups = len(start.groups)
    if not 3 <= num_groups <= MAX_COUPLED_GROUPS or not problem.sees_everything:
        return start
    length_K = np.array([start.tokens[group].sum() for group in start.groups])
    if length_K.max() <= EVEN_RING * length_K.min():
        return start
    orders_PK = _candidate_orders(length_K)
    coupled_P = _coupled_in_orders_s(problem, start, orders_PK)
    if coupled_P is None:
        return start
    if MAX_COUPLED_PERMUTED < num_groups <= MAX_COUPLED_SWAPPED:
        orders_PK, coupled_P = _with_swaps(problem, start, orders_PK, coupled_P)
    best, below_s = start, start.time_s * (1 + LEAST_ORDER_GAIN)
    least_s = _coupled_s(problem, start)
    for row in np.argsort(coupled_P, kind="stable")[:_ORDERS_TRIED]:
        grouping = problem.grouping([start.groups[k] for k in orders_PK[row]])
        reordered = problem.best(grouping, [(start.tokens, start.heads)], below_s)
        if reordered is None:
            continue
        seconds = _coupled_s(problem, reordered)
        if seconds < (1 - _LEAST_COUPLED_GAIN) * least_s:
            best, least_s = reordered, seconds
    return best


def _coupled_s(problem: Problem, assignment: Assignment) -> float:
    """Return the time of the coupled ring of an assignment, with its transfers."""
    grouping = problem.grouping(assignment.groups)
    seconds_1 = problem.cost.coupled_rings_s(grouping, assignment.tokens, assignment.heads)
    assert seconds_1 is not None
    return float(without_last_bits(seconds_1)[0])


def _coupled_in_orders_s(problem: Problem, start: Assignment, orders_PK: Ints) -> Floats | None:
    """Return the times of coupled rings in other orders of the groups of ``start``; None if there are none."""
    coupled_P = problem.cost.coupled_rings_s(problem.grouping(start.groups), start.tokens, start.heads, orders_PK)
    return None if coupled_P is None else without_last_bits(coupled_P)


def _candidate_orders(length_K: Floats) -> Ints:
    """Return orders of groups, the present one first: all of few groups, else by length in several ways.

    Every order begins with the first group, since a ring has no beginning. Of more groups than `MAX_COUPLED_PERMUTED`:
    the other way round, long and short in turn, up and down by length, and one by one up to the longest and down again.
    """
    num_groups = len(length_K)
    if num_groups <= MAX_COUPLED_PERMUTED:
        return np.array([(0, *later) for later in permutations(range(1, num_groups))])
    descending_K = np.argsort(-length_K, kind="stable")
    in_turn_K = np.empty(num_groups, dtype=np.intp)
    half = (num_groups + 1) // 2
    in_turn_K[0::2], in_turn_K[1::2] = descending_K[:half], descending_K[half:][::-1]
    there_and_back_K = np.concatenate([descending_K[0::2], descending_K[1::2][::-1]])
    present_K = np.arange(num_groups)
    orders = [present_K, present_K[::-1]]
    for order_K in (in_turn_K, descending_K, there_and_back_K):
        orders += [order_K, order_K[::-1]]
    return np.array([np.roll(order_K, -int(np.argmax(order_K == 0))) for order_K in orders])


def _with_swaps(problem: Problem, start: Assignment, orders_PK: Ints, coupled_P: Floats) -> tuple[Ints, Floats]:
    """Add orders that follow from the best one by swaps of two groups, the best swap of every round."""
    swaps = list(combinations(range(1, orders_PK.shape[1]), 2))
    for _ in range(_SWAP_ROUNDS):
        best = int(coupled_P.argmin())
        swapped_PK = np.repeat(orders_PK[best : best + 1], len(swaps), axis=0)
        for row, (one, other) in enumerate(swaps):
            swapped_PK[row, [one, other]] = swapped_PK[row, [other, one]]
        swapped_P = _coupled_in_orders_s(problem, start, swapped_PK)
        assert swapped_P is not None
        if swapped_P.min() > (1 - _LEAST_COUPLED_GAIN) * coupled_P[best]:
            break
        few = np.argsort(swapped_P, kind="stable")[:_ORDERS_KEPT]
        orders_PK = np.concatenate([orders_PK, swapped_PK[few]])
        coupled_P = np.concatenate([coupled_P, swapped_P[few]])
    return orders_PK, coupled_P
