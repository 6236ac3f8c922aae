"""Starts of the search: three ways to divide the devices over d pipelines.

lanes    every node gives 1 / d of its devices to each of d equal pipelines
groups   every pipeline gets whole nodes, the fastest nodes dealt out first, so that pipelines are about equally fast
dealt    every pipeline gets single blocks, whatever their nodes; only if there are few devices

Groups and lanes are also combined: a group of nodes is divided into several equal lanes.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from collections.abc import Set as AbstractSet
from functools import cache

from ds_hetero.cost.stages.stage import DeviceBlock, Pool, Pools
from ds_hetero.planner.pipeline_search.blocks import cut_pool, sizes_up_to
from ds_hetero.planner.pipeline_search.pool_groups import (
    LANES,
    MAX_GROUPS,
    balanced_groups,
    lane_counts,
    lightest_first,
    pipeline_counts,
    pool_speeds,
)

# Chosen, never measured alone; `python -m benchmarks.pipelines_planner exact` and ``growth`` say what plans with them
# miss.
MAX_COMBINATIONS = 4096  # most combinations of block sizes by kind that are sorted
MAX_SIZES = 256  # most combinations of block sizes by kind that are tried
MAX_KINDS = 4  # most kinds of devices with which pipelines over some of the kinds are tried
FEW_DEVICES = 64  # most devices with which blocks are dealt out one by one


Pipelines = list[tuple[DeviceBlock, ...]]


def first_plans(pools: Pools, inner: str = "tensor") -> Iterator[Pipelines]:
    """Yield plans over all devices, and then over the devices of some kinds.

    Args:
        inner: how the devices of a block share their work.
    """
    kinds = range(len(pools.kinds))
    for num_kinds in reversed(range(1, len(kinds) + 1)):
        for selected_kinds in itertools.combinations(kinds, num_kinds):
            selected_pools = [pool for pool in pools.pools if pool.kind in selected_kinds]
            yield from _plans_over(pools, selected_pools, inner)
        if len(kinds) > MAX_KINDS:
            return


def _plans_over(pools: Pools, selected: Sequence[Pool], inner: str) -> Iterator[Pipelines]:
    """Yield plans over the pools ``selected``: in groups and lanes, and with their blocks dealt out."""
    speed = pool_speeds(pools, selected)
    num_devices = sum(len(pool.ranks) for pool in selected)
    all_lanes = lane_counts(selected)

    @cache
    def groups_of(count: int) -> list[list[Pool]]:
        return balanced_groups(speed, count)

    @cache
    def blocks_of(pool: Pool, devices: int, size: int) -> tuple[DeviceBlock, ...]:
        return tuple(cut_pool(pool, devices, size, inner))

    def pipeline(group: Sequence[Pool], lanes: int, sizes: Sequence[int]) -> tuple[DeviceBlock, ...]:
        """Return one of the equal lanes of a group, as blocks."""
        blocks: list[DeviceBlock] = []
        for pool in group:
            devices = len(pool.ranks) // lanes
            blocks += blocks_of(pool, devices, min(sizes[pool.kind], devices))
        return tuple(blocks)

    for sizes in _sizes_by_kind(pools, {pool.kind for pool in selected}):
        for count in pipeline_counts(len(selected)):
            for lanes in all_lanes if count <= MAX_GROUPS else LANES[:1]:
                pipelines = [pipeline(group, lanes, sizes) for group in groups_of(count)]
                if all(pipelines):
                    yield list(_repeat_each(pipelines, lanes))
        if num_devices <= FEW_DEVICES:
            all_blocks = [blocks_of(pool, len(pool.ranks), sizes[pool.kind]) for pool in selected]
            yield from _deal_blocks(pools, list(itertools.chain.from_iterable(all_blocks)))


def _repeat_each(pipelines: Iterable[tuple[DeviceBlock, ...]], times: int) -> Iterator[tuple[DeviceBlock, ...]]:
    """Yield every pipeline ``times`` times in a row."""
    for pipeline in pipelines:
        yield from itertools.repeat(pipeline, times)


def _deal_blocks(pools: Pools, blocks: Sequence[DeviceBlock]) -> Iterator[Pipelines]:
    """Yield plans for every number of pipelines, with the blocks dealt out so that pipelines are about equally fast."""
    speed = [pools.kinds[block.kind].device.peak_flops_per_s * block.size for block in blocks]
    for count in pipeline_counts(len(blocks)):
        groups = lightest_first(speed, count)
        yield [tuple(sorted(blocks[i] for i in group)) for group in groups]


def _sizes_by_kind(pools: Pools, selected_kinds: AbstractSet[int]) -> Iterator[tuple[int, ...]]:
    """Yield combinations of block sizes by kind, with 1 for kinds that are not selected; like sizes come first."""
    choices = []
    for kind, pool in enumerate(pools.largest):
        choices.append(sizes_up_to(len(pool.ranks)) if kind in selected_kinds else (1,))
    combinations = itertools.islice(itertools.product(*choices), MAX_COMBINATIONS)
    most_alike_first = sorted(combinations, key=lambda sizes: max(sizes) / min(sizes))
    return iter(most_alike_first[:MAX_SIZES])
