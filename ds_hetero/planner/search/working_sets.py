"""Propose sets of ranks that do all the work: over slow links the best schedule leaves some devices idle.

Dimension key: D ranks.
"""

from __future__ import annotations

from itertools import product

import numpy as np

from ds_hetero.common.arrays import Bools, distinct
from ds_hetero.planner.search.budget import EXHAUSTIVE_RANKS
from ds_hetero.planner.search.interchangeable import device_labels, unique_by
from ds_hetero.planner.search.ladder import ladder
from ds_hetero.planner.search.problem import Problem

_MAX_SPEEDS = 8  # most of the slowest speeds whose ranks are left out; chosen, never measured
_MAX_SINGLE_NODES = 8  # most nodes with which every node works alone, or is left out alone; chosen, never measured


def working_sets(problem: Problem) -> list[Bools]:
    """Return sets of ranks to search schedules for, as masks, ``[D]`` each; the other ranks stay idle.

    No set occurs twice. The order is: all ranks; all without the slowest kinds; single nodes; all nodes but one; every
    set, if there are few ranks; the fastest nodes; the fastest node with the nodes that have the fastest links to it.
    """
    num_nodes = int(problem.node.max()) + 1
    sets: list[Bools] = [np.ones(problem.num_ranks, dtype=bool)]
    sets += [problem.speed >= threshold for threshold in distinct(problem.speed)[1:][:_MAX_SPEEDS]]
    if num_nodes <= _MAX_SINGLE_NODES:
        sets += [problem.node == n for n in range(num_nodes)]
        sets += [problem.node != n for n in range(num_nodes)]
    if problem.num_ranks <= EXHAUSTIVE_RANKS:
        sets += _distinct_sets(problem)
    node_speed = np.bincount(problem.node, weights=problem.speed)
    fastest_first = np.lexsort((np.arange(num_nodes), -node_speed))
    sizes = ladder(num_nodes - 1)
    sets += [np.isin(problem.node, fastest_first[:size]) for size in sizes]
    sets += [_nearest_nodes(problem, int(fastest_first[0]), size) for size in sizes]
    return list(unique_by((active for active in sets if active.any()), lambda active: active.tobytes()))


def _distinct_sets(problem: Problem) -> list[Bools]:
    """Return all sets of ranks, the fastest first, without those that only swap interchangeable ranks."""
    every_choice = [np.array(bits, dtype=bool) for bits in product((True, False), repeat=problem.num_ranks)]
    masks = every_choice[:-1]  # the last one is empty
    masks.sort(key=lambda active: -problem.speed[active].sum())
    labels = device_labels(problem)
    return list(unique_by(masks, lambda active: tuple(sorted(labels[active].tolist()))))


def _nearest_nodes(problem: Problem, center: int, size: int) -> Bools:
    """Return the ranks of node ``center`` and of the nodes with the fastest links to it, ``size`` nodes in all."""
    s_per_byte = problem.inverse_bandwidth[center].copy()
    s_per_byte[center] = -1.0  # the center itself comes first
    nearest = np.lexsort((np.arange(len(s_per_byte)), s_per_byte))[:size]
    return np.isin(problem.node, nearest)
