"""Where the search begins: uniform grids, lanes through all nodes, and groups of nodes.

grid     tensor x pipeline x data of equal sizes over consecutive ranks, as Megatron-LM runs it (order tp-dp-pp),
with equal layers and equal micro-batches
lanes    every node gives 1 / d of its devices to each of d pipelines, which are alike
groups   whole nodes shared by d pipelines, longest processing time first, so that pipelines are equally fast
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

from ds_hetero.cost.stage import Block, PlacedPipeline, Pool, Pools, StageCosts
from ds_hetero.planner.outer.blocks import block_of, cut_pool, sizes_up_to

__all__ = ["starts", "uniform_grids"]

MAX_SIZES = 256  # combinations of block sizes by kind
ALL_COUNTS = 16  # pipelines up to which every number is tried; powers of two above
LANES = (1, 2, 4, 8)
MAX_GROUPS = 8  # of nodes, of which each has its own lanes

Pipelines = list[tuple[Block, ...]]


def starts(pools: Pools, inner: str = "tensor") -> Iterator[Pipelines]:
    """Yield pipelines over all devices.

    Args:
        pools: the devices.
        inner: how blocks of several devices share their work.
    """
    for sizes in _sizes_by_kind(pools):
        for count in _counts(len(pools.pools)):
            groups = _balanced(pools, count)
            if groups is not None:
                yield [_pipeline(group, sizes, inner) for group in groups]
        for lanes in LANES[1:]:
            if any(len(pool.ranks) % lanes for pool in pools.pools):
                continue
            for count in range(1, min(len(pools.pools), MAX_GROUPS) + 1):
                groups = _balanced(pools, count)
                if groups is not None:
                    yield [_pipeline(group, sizes, inner, lanes) for group in groups for _ in range(lanes)]


def _sizes_by_kind(pools: Pools) -> Iterator[tuple[int, ...]]:
    """Sizes of blocks by kind; the same size for all kinds comes first."""
    choices = [sizes_up_to(len(pool.ranks)) for pool in pools.largest]
    ordered = sorted(itertools.islice(itertools.product(*choices), 4096), key=lambda sizes: max(sizes) / min(sizes))
    return iter(ordered[:MAX_SIZES])


def _counts(most: int) -> list[int]:
    return [count for count in range(1, most + 1) if count <= ALL_COUNTS or count & (count - 1) == 0]


def _pipeline(group: Sequence[Pool], sizes: tuple[int, ...], inner: str, lanes: int = 1) -> tuple[Block, ...]:
    """One of ``lanes`` equal pipelines through the pools of a group."""
    blocks = []
    for pool in group:
        devices = len(pool.ranks) // lanes
        blocks += cut_pool(pool, devices, min(sizes[pool.kind], devices), inner)
    return tuple(blocks)


def _balanced(pools: Pools, count: int) -> list[list[Pool]] | None:
    """Pools in ``count`` groups of about equal speed; kinds stay together within a group. None if one were empty."""
    speed = [pools.kinds[pool.kind].device.peak_flops_per_s * len(pool.ranks) for pool in pools.pools]
    load = [0.0] * count
    groups: list[list[Pool]] = [[] for _ in range(count)]
    for index in sorted(range(len(pools.pools)), key=lambda index: (-speed[index], index)):
        lightest = min(range(count), key=lambda group: load[group])
        load[lightest] += speed[index]
        groups[lightest].append(pools.pools[index])
    if not all(groups):
        return None
    return [sorted(group, key=lambda pool: (pool.kind, pool.node)) for group in groups]


def uniform_grids(costs: StageCosts, samples: int, sizes: Sequence[int]) -> Iterator[tuple[str, list[PlacedPipeline]]]:
    """Yield every grid of equal pipelines over all devices, by name ``tp2 pp4 dp2 b1``.

    Tensor-parallel groups that span kinds or nodes are left out; so are grids that do not divide layers or batch.

    Args:
        costs: gives devices and model.
        samples: the global batch.
        sizes: micro-batches to try.
    """
    pools, num_layers = costs.pools, costs.model.num_layers
    pool_of = {rank: pool for pool in pools.pools for rank in pool.ranks}
    num_ranks = costs.cluster.num_ranks
    for tensor in sizes_up_to(num_ranks):
        groups = [range(first, first + tensor) for first in range(0, num_ranks - tensor + 1, tensor)]
        if num_ranks % tensor or any(len({pool_of[rank] for rank in group}) > 1 for group in groups):
            continue
        blocks = [block_of(pool_of[group[0]], tensor) for group in groups]
        for stages in range(1, min(len(blocks), num_layers) + 1):
            if len(blocks) % stages or num_layers % stages:
                continue
            data = len(blocks) // stages
            layers = (num_layers // stages,) * stages
            pipelines = [tuple(blocks[lane::data]) for lane in range(data)]
            for size in sizes:
                if samples % (data * size) == 0:
                    name = f"tp{tensor} pp{stages} dp{data} b{size}"
                    number = samples // (data * size)
                    yield name, [PlacedPipeline(blocks, layers, size, number) for blocks in pipelines]
