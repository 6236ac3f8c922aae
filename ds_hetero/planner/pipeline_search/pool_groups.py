"""Divide pools of devices into groups of about equal speed, and a group into equal lanes.

A group of 2 nodes with 8 devices each can be one pipeline, or for example 4 equal lanes: pipelines with 2 devices of
each node.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Mapping, Sequence

from ds_hetero.cost.stages.stage import Pool, Pools

# Chosen, never measured alone; `python -m benchmarks.pipelines_planner growth` says the gap to the bound with them.
ALL_COUNTS = 16  # number of pipelines up to which every number is tried; beyond it, powers of two
LANES = (1, 2, 4, 8)  # numbers of equal pipelines into which a group of nodes is divided
MAX_GROUPS = 8  # most groups of nodes with which a group is divided into several lanes


def pool_speeds(pools: Pools, selected: Iterable[Pool]) -> dict[Pool, float]:
    """Return the peak FLOP/s of all devices of a pool together, for every selected pool."""
    return {pool: pools.kinds[pool.kind].device.peak_flops_per_s * len(pool.ranks) for pool in selected}


def lane_counts(pools: Sequence[Pool]) -> list[int]:
    """Return those of `LANES` that divide the number of devices of every pool."""
    return [lanes for lanes in LANES if all(len(pool.ranks) % lanes == 0 for pool in pools)]


def pipeline_counts(max_count: int) -> list[int]:
    """Return the numbers of pipelines up to ``max_count`` that are tried: all small ones, then powers of two."""
    return [count for count in range(1, max_count + 1) if count <= ALL_COUNTS or count & (count - 1) == 0]


def balanced_groups(speed: Mapping[Pool, float], count: int) -> list[list[Pool]]:
    """Divide pools into ``count`` groups of about equal speed; pools of a group are sorted by kind, then by node.

    Args:
        speed: FLOP/s of all devices of a pool together, by pool.
    """
    pools = sorted(speed, key=lambda pool: (pool.node, pool.kind))
    groups = []
    for indices in lightest_first([speed[pool] for pool in pools], count):
        members = [pools[i] for i in indices]
        groups.append(sorted(members, key=lambda pool: (pool.kind, pool.node)))
    return groups


def lightest_first(loads: Sequence[float], count: int) -> list[list[int]]:
    """Divide loads into ``count`` groups of about equal sums; return the indices of the loads, by group.

    The largest load comes first, and each load goes to the group with the smallest sum so far. Example: loads of 5, 4,
    3, 3 and 3 in two groups. 5 goes to the first group, 4 to the second, 3 to the second (sum 7), 3 to the first (sum
    8), 3 to the second (sum 10).
    """
    heap = [(0.0, group) for group in range(count)]
    groups: list[list[int]] = [[] for _ in range(count)]
    for index in sorted(range(len(loads)), key=lambda index: (-loads[index], index)):
        load, group = heap[0]
        heapq.heapreplace(heap, (load + loads[index], group))
        groups[group].append(index)
    return groups
