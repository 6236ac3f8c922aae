"""Starts of the search: pipelines through groups of nodes, in lanes, and of blocks dealt out one by one.

lanes    every node gives 1 / d of its devices to each of d pipelines, which are alike
groups   whole nodes shared by d pipelines, longest processing time first, so that pipelines are equally fast
dealt    single blocks shared by d pipelines, whatever their nodes, of few devices
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
MAX_SIZES = 256  # combinations of block sizes by kind
MAX_KINDS = 4  # of devices up to which every choice of them is tried
FEW_DEVICES = 64  # up to which blocks are dealt out one by one


Pipelines = list[tuple[DeviceBlock, ...]]


def first_plans(pools: Pools, inner: str = "tensor") -> Iterator[Pipelines]:
    """Yield pipelines over all devices, and then over some kinds of them.

    Args:
        inner: how the devices of a block share their work.
    """
    kinds = range(len(pools.kinds))
    for size in reversed(range(1, len(kinds) + 1)):
        for chosen in itertools.combinations(kinds, size):
            yield from _over(pools, [pool for pool in pools.pools if pool.kind in chosen], inner)
        if len(kinds) > MAX_KINDS:
            return


def _over(pools: Pools, used: Sequence[Pool], inner: str) -> Iterator[Pipelines]:
    """Groups and lanes of some pools, and their blocks dealt out."""
    speed = pool_speeds(pools, used)
    num_devices = sum(len(pool.ranks) for pool in used)
    all_lanes = lane_counts(used)

    @cache
    def groups_of(count: int) -> list[list[Pool]]:
        return balanced_groups(speed, count)

    @cache
    def blocks_of(pool: Pool, devices: int, size: int) -> tuple[DeviceBlock, ...]:
        return tuple(cut_pool(pool, devices, size, inner))

    def pipeline(group: Sequence[Pool], lanes: int, sizes: Sequence[int]) -> tuple[DeviceBlock, ...]:
        """The blocks of one of a group's lanes."""
        blocks: list[DeviceBlock] = []
        for pool in group:
            devices = len(pool.ranks) // lanes
            blocks += blocks_of(pool, devices, min(sizes[pool.kind], devices))
        return tuple(blocks)

    for sizes in _sizes_by_kind(pools, {pool.kind for pool in used}):
        for count in pipeline_counts(len(used)):
            for lanes in all_lanes if count <= MAX_GROUPS else LANES[:1]:
                pipelines = [pipeline(group, lanes, sizes) for group in groups_of(count)]
                if all(pipelines):
                    yield list(_repeat_each(pipelines, lanes))
        if num_devices <= FEW_DEVICES:
            all_blocks = [blocks_of(pool, len(pool.ranks), sizes[pool.kind]) for pool in used]
            yield from _dealt(pools, list(itertools.chain.from_iterable(all_blocks)))


def _repeat_each(pipelines: Iterable[tuple[DeviceBlock, ...]], times: int) -> Iterator[tuple[DeviceBlock, ...]]:
    """Every pipeline so many times, equal ones beside each other."""
    for pipeline in pipelines:
        yield from itertools.repeat(pipeline, times)


def _dealt(pools: Pools, blocks: Sequence[DeviceBlock]) -> Iterator[Pipelines]:
    """Blocks dealt out to every number of pipelines, whatever their nodes."""
    speed = [pools.kinds[block.kind].device.peak_flops_per_s * block.size for block in blocks]
    for count in pipeline_counts(len(blocks)):
        groups = lightest_first(speed, count)
        yield [tuple(sorted(blocks[i] for i in group)) for group in groups]


def _sizes_by_kind(pools: Pools, used: AbstractSet[int]) -> Iterator[tuple[int, ...]]:
    """Sizes of blocks by kind, 1 where a kind is not used; sizes that are alike for all kinds come first."""
    choices = [sizes_up_to(len(pool.ranks)) if kind in used else (1,) for kind, pool in enumerate(pools.largest)]
    combinations = itertools.islice(itertools.product(*choices), 4096)  # which are sorted at once; never measured
    most_alike_first = sorted(combinations, key=lambda sizes: max(sizes) / min(sizes))
    return iter(most_alike_first[:MAX_SIZES])
