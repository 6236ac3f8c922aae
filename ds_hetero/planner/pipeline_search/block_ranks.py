"""Assign ranks to the blocks of a plan, and count the devices that stay idle."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import chain

from ds_hetero.cost.stages.stage import DeviceBlock, Pools


def idle_devices(pools: Pools, pipelines: Iterable[Sequence[DeviceBlock]]) -> list[int]:
    """Return the number of devices without work, by pool."""
    num_busy: Counter[tuple[int, int]] = Counter()
    for block in chain.from_iterable(pipelines):
        for part in block.parts:
            num_busy[part.kind, part.node] += part.size
    return [len(pool.ranks) - num_busy[pool.kind, pool.node] for pool in pools.pools]


def ranks_of_blocks(pools: Pools, pipelines: Sequence[Sequence[DeviceBlock]]) -> list[list[tuple[int, ...]]]:
    """Return the ranks of every block, by pipeline and stage; ranks of a block over several pools come pool by pool.

    Large blocks get their ranks first, so that small blocks do not break up runs of consecutive ranks. Example: ranks 0
    to 3 are one pool, and a pipeline has blocks of 1, 2 and 1 devices. They get the ranks (2,), (0, 1) and (3,).
    """
    free_ranks = {(pool.kind, pool.node): list(pool.ranks) for pool in pools.pools}
    ranks: list[list[tuple[int, ...]]] = [[()] * len(blocks) for blocks in pipelines]
    stages = [(i, j, block) for i, blocks in enumerate(pipelines) for j, block in enumerate(blocks)]

    def largest_first(stage: tuple[int, int, DeviceBlock]) -> int:
        _, _, block = stage
        return -block.size

    for i, j, block in sorted(stages, key=largest_first):  # stable: ties in the order of the pipelines
        for part in block.parts:
            free_of_pool = free_ranks[part.kind, part.node]
            ranks[i][j] += tuple(free_of_pool[: part.size])
            del free_of_pool[: part.size]
    return ranks


def _are_consecutive(ranks: Iterable[int]) -> bool:
    """Whether the ranks follow one another without a gap, as the ranks of a schedule must."""
    ascending = sorted(ranks)
    return ascending[-1] - ascending[0] == len(ascending) - 1


def can_be_placed(pools: Pools, pipelines: Sequence[Sequence[DeviceBlock]]) -> bool:
    """Whether every stage that shares sequences gets consecutive ranks, as its schedule needs."""
    blocks = chain.from_iterable(pipelines)
    ranks = chain.from_iterable(ranks_of_blocks(pools, pipelines))
    pairs = zip(blocks, ranks, strict=True)
    return all(_are_consecutive(block_ranks) for block, block_ranks in pairs if block.inner == "sequence")
