"""Blocks of devices, each of which runs one pipeline stage: powers of two, cut out of pools."""

from __future__ import annotations

from ds_hetero.cost.stages.stage import DeviceBlock, Pool

MAX_SIZE = 8  # devices of a block: those of a usual node, over whose links tensor parallelism stays; never measured


def sizes_up_to(devices: int, max_size: int = MAX_SIZE) -> tuple[int, ...]:
    """Return the powers of two that fit, ascending."""
    return tuple(1 << power for power in range(min(devices, max_size).bit_length()))


def block_of(pool: Pool, size: int, inner: str = "tensor") -> DeviceBlock:
    """Return a block of a pool; a single device needs no inner parallelism."""
    return DeviceBlock(pool.kind, pool.node, size, "one" if size == 1 else inner)


def cut_pool(pool: Pool, devices: int, size: int, inner: str = "tensor") -> list[DeviceBlock]:
    """Cut ``devices`` devices of a pool into blocks of ``size``, and the rest into smaller powers of two."""
    blocks = []
    while devices:
        taken = size if devices >= size else 1 << (devices.bit_length() - 1)
        blocks.append(block_of(pool, taken, inner))
        devices -= taken
    return blocks
