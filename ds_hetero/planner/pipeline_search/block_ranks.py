"""Ranks that the blocks of a plan get, and devices that stay idle."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import chain

from ds_hetero.cost.stages.stage import DeviceBlock, Pools


def idle_devices(pools: Pools, pipelines: Iterable[Sequence[DeviceBlock]]) -> list[int]:
    """Return the devices without work, by pool."""
    used: Counter[tuple[int, int]] = Counter()
    for block in chain.from_iterable(pipelines):
        for part in block.parts:
            used[part.kind, part.node] += part.size
    return [len(pool.ranks) - used[pool.kind, pool.node] for pool in pools.pools]


def ranks_of_blocks(pools: Pools, pipelines: Sequence[Sequence[DeviceBlock]]) -> list[list[tuple[int, ...]]]:
    """Return the ranks of every block, part by part, by pipeline.

    Large blocks get theirs first, so that small ones do not tear consecutive ranks apart.
    """
    free = {(pool.kind, pool.node): list(pool.ranks) for pool in pools.pools}
    ranks: list[list[tuple[int, ...]]] = [[()] * len(blocks) for blocks in pipelines]
    places = [(i, j) for i, blocks in enumerate(pipelines) for j in range(len(blocks))]
    places.sort(key=lambda place: -pipelines[place[0]][place[1]].size)  # stable: ties in the order of the pipelines
    for i, j in places:
        for part in pipelines[i][j].parts:
            free_of_pool = free[part.kind, part.node]
            ranks[i][j] += tuple(free_of_pool[: part.size])
            del free_of_pool[: part.size]
    return ranks


def _are_consecutive(ranks: Iterable[int]) -> bool:
    """Whether ranks follow one another without a gap, as those of a schedule must."""
    ascending = sorted(ranks)
    return ascending[-1] - ascending[0] == len(ascending) - 1


def can_be_placed(pools: Pools, pipelines: Sequence[Sequence[DeviceBlock]]) -> bool:
    """Whether every stage that shares sequences gets consecutive ranks."""
    blocks = chain.from_iterable(pipelines)
    ranks = chain.from_iterable(ranks_of_blocks(pools, pipelines))
    pairs = zip(blocks, ranks, strict=True)
    return all(_are_consecutive(of_block) for block, of_block in pairs if block.inner == "sequence")
