"""Groups of pools of about equal speed, and the lanes that a group divides into."""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Mapping, Sequence

from ds_hetero.cost.stages.stage import Pool, Pools

# Chosen, never measured alone; `python -m benchmarks.pipelines_planner growth` says the gap to the bound with them.
ALL_COUNTS = 16  # pipelines up to which every number is tried; powers of two above
LANES = (1, 2, 4, 8)  # pipelines that a group of nodes is divided into
MAX_GROUPS = 8  # of nodes, of which each has its own lanes


def pool_speeds(pools: Pools, used: Iterable[Pool]) -> dict[Pool, float]:
    """Peaks of all devices of every pool, FLOP/s."""
    return {pool: pools.kinds[pool.kind].device.peak_flops_per_s * len(pool.ranks) for pool in used}


def lane_counts(pools: Sequence[Pool]) -> list[int]:
    """Numbers of pipelines that every pool can give equally many devices to."""
    return [lanes for lanes in LANES if all(len(pool.ranks) % lanes == 0 for pool in pools)]


def pipeline_counts(most: int) -> list[int]:
    """Numbers of pipelines up to ``most`` that are tried: all small ones, then powers of two."""
    return [count for count in range(1, most + 1) if count <= ALL_COUNTS or count & (count - 1) == 0]


def balanced_groups(speed: Mapping[Pool, float], count: int) -> list[list[Pool]]:
    """Pools in ``count`` groups of about equal speed; kinds stay together within a group."""
    pools = sorted(speed, key=lambda pool: (pool.node, pool.kind))
    groups = []
    for indices in lightest_first([speed[pool] for pool in pools], count):
        members = [pools[i] for i in indices]
        groups.append(sorted(members, key=lambda pool: (pool.kind, pool.node)))
    return groups


def lightest_first(loads: Sequence[float], count: int) -> list[list[int]]:
    """Indices in ``count`` groups of about equal sums: the largest first, each to the group with the least.

    Loads of 5, 4, 3, 3 and 3 in two groups: 5 to the first, 4 to the second, 3 to the second (7), 3 to the first (8), 3
    to the second (10).
    """
    heap = [(0.0, group) for group in range(count)]
    groups: list[list[int]] = [[] for _ in range(count)]
    for index in sorted(range(len(loads)), key=lambda index: (-loads[index], index)):
        least, group = heap[0]
        heapq.heapreplace(heap, (least + loads[index], group))
        groups[group].append(index)
    return groups
