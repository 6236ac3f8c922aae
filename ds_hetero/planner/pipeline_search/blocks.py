"""Blocks of devices, each of which runs one pipeline stage: powers of two, cut out of pools."""

from __future__ import annotations

from ds_hetero.cost.stages.stage import DeviceBlock, Pool

MAX_SIZE = 8  # devices of a block, as on a usual node: tensor parallelism stays on its fast links; never measured


def sizes_up_to(devices: int, max_size: int = MAX_SIZE) -> tuple[int, ...]:
    """Return the powers of two up to ``devices`` and ``max_size``, ascending."""
    return tuple(1 << power for power in range(min(devices, max_size).bit_length()))


def block_of(pool: Pool, size: int, inner: str = "tensor") -> DeviceBlock:
    """Return a block of ``size`` devices of a pool; a single device has no inner parallelism."""
    return DeviceBlock(pool.kind, pool.node, size, "one" if size == 1 else inner)


def cut_pool(pool: Pool, devices: int, size: int, inner: str = "tensor") -> list[DeviceBlock]:
    """Cut ``devices`` devices of a pool into blocks of ``size``, and the remaining devices into powers of two.

    Example: 7 devices with a size of 4 become blocks of 4, 2 and 1.

    Args:
        inner: how the devices of a block share the work of its stage.
    """
    blocks = []
    while devices:
        block_size = size if devices >= size else 1 << (devices.bit_length() - 1)
        blocks.append(block_of(pool, block_size, inner))
        devices -= block_size
    return blocks
