"""Sets of ranks that could do all the work: over slow links the optimum leaves devices idle."""

from __future__ import annotations

from itertools import product

import numpy as np

from ds_hetero.common.arrays import Bools, distinct
from ds_hetero.planner.search.budget import EXHAUSTIVE_RANKS
from ds_hetero.planner.search.interchangeable import interchangeable, once
from ds_hetero.planner.search.ladder import ladder
from ds_hetero.planner.search.problem import Problem

_MOST_SPEEDS = 8  # the slowest speeds, up to which ranks are left out; chosen, never measured
_MOST_SINGLE_NODES = 8  # up to which each node is left out, or works, alone; chosen, never measured


def working_sets(problem: Problem) -> list[Bools]:
    """Masks of sets, ``[D]`` each and each once: all ranks first.

    Then those without the slowest classes, single nodes, all but one node, of few ranks every set; the most powerful
    nodes, and the nodes nearest to the most powerful one.
    """
    num_nodes = int(problem.node.max()) + 1
    sets: list[Bools] = [np.ones(problem.num_ranks, dtype=bool)]
    sets += [problem.speed >= threshold for threshold in distinct(problem.speed)[1:][:_MOST_SPEEDS]]
    if num_nodes <= _MOST_SINGLE_NODES:
        sets += [problem.node == n for n in range(num_nodes)]
        sets += [problem.node != n for n in range(num_nodes)]
    if problem.num_ranks <= EXHAUSTIVE_RANKS:
        sets += _distinct_sets(problem)
    power = np.bincount(problem.node, weights=problem.speed)
    by_power = np.lexsort((np.arange(num_nodes), -power))
    sizes = ladder(num_nodes - 1)
    sets += [np.isin(problem.node, by_power[:size]) for size in sizes]
    sets += [_near(problem, int(by_power[0]), size) for size in sizes]
    return list(once((active for active in sets if active.any()), lambda active: active.tobytes()))


def _distinct_sets(problem: Problem) -> list[Bools]:
    """All sets of ranks that differ in more than the names of interchangeable ranks, the most powerful first."""
    every_choice = [np.array(bits, dtype=bool) for bits in product((True, False), repeat=problem.num_ranks)]
    masks = every_choice[:-1]  # the last one is nobody
    masks.sort(key=lambda active: -problem.speed[active].sum())
    name = interchangeable(problem)
    return list(once(masks, lambda active: tuple(sorted(name[active].tolist()))))


def _near(problem: Problem, center: int, size: int) -> Bools:
    """The ranks of the ``size`` nodes with the fastest links to ``center``, itself included."""
    distance = problem.inverse_bandwidth[center].copy()
    distance[center] = -1.0
    nearest = np.lexsort((np.arange(len(distance)), distance))[:size]
    return np.isin(problem.node, nearest)
