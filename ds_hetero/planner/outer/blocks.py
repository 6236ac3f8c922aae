"""Blocks of devices: the sizes that they come in, the devices that a plan leaves idle, and the ranks that they get."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from ds_hetero.cost.stages.stage import Block, Pool, Pools

__all__ = ["MAX_SIZE", "block_of", "cut_pool", "idle_devices", "ranks_of_blocks", "sizes_up_to"]

MAX_SIZE = 8  # devices of a block


def sizes_up_to(devices: int, max_size: int = MAX_SIZE) -> tuple[int, ...]:
    """Return the powers of two that fit, ascending."""
    return tuple(1 << power for power in range(min(devices, max_size).bit_length()))


def block_of(pool: Pool, size: int, inner: str = "tensor") -> Block:
    """Return a block of a pool; a single device needs no inner parallelism."""
    return Block(pool.kind, pool.node, size, "one" if size == 1 else inner)


def cut_pool(pool: Pool, devices: int, size: int, inner: str = "tensor") -> list[Block]:
    """Cut ``devices`` devices of a pool into blocks of ``size``, and the rest into smaller powers of two."""
    blocks = []
    while devices:
        taken = size if devices >= size else 1 << (devices.bit_length() - 1)
        blocks.append(block_of(pool, taken, inner))
        devices -= taken
    return blocks


def idle_devices(pools: Pools, pipelines: Iterable[Sequence[Block]]) -> list[int]:
    """Return the devices without work, by pool."""
    used: Counter[tuple[int, int]] = Counter()
    for blocks in pipelines:
        for block in blocks:
            for part in block.parts:
                used[part.kind, part.node] += part.size
    return [len(pool.ranks) - used[pool.kind, pool.node] for pool in pools.pools]


def ranks_of_blocks(pools: Pools, pipelines: Sequence[Sequence[Block]]) -> list[list[tuple[int, ...]]]:
    """Give every block ranks of its pool: large blocks first, neighbours together.

    Returns:
        ranks of every block, part by part, by pipeline.
    """
    places = [(i, j) for i, blocks in enumerate(pipelines) for j in range(len(blocks))]
    free = {(pool.kind, pool.node): list(pool.ranks) for pool in pools.pools}
    ranks: list[list[tuple[int, ...]]] = [[()] * len(blocks) for blocks in pipelines]
    for i, j in sorted(places, key=lambda place: (-pipelines[place[0]][place[1]].size, place)):
        for part in pipelines[i][j].parts:
            pool = free[part.kind, part.node]
            ranks[i][j] += tuple(pool[: part.size])
            del pool[: part.size]
    return ranks
