"""Neighbours of a plan: every move changes the blocks of one or two pipelines, or of all pipelines of one makeup."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from ds_hetero.cost.stages.stage import DeviceBlock, Pools
from ds_hetero.planner.pipelines.blocks import MAX_SIZE, block_of, idle_devices
from ds_hetero.planner.pipelines.search.evaluate import Shape

ALL_PIPELINES = 12  # up to so many pipelines, all are changed in turn; of more, a sample
PARTNERS = 6  # pipelines that one exchanges blocks with

Shapes = tuple[Shape, ...]
Blocks = tuple[DeviceBlock, ...]


def neighbouring_plans(
    shapes: Shapes, pools: Pools, sizes: Sequence[int], inners: Sequence[str], rng: np.random.Generator
) -> Iterator[Shapes]:
    """Yield plans that are one move away.

    Args:
        shapes: the plan.
        pools: the devices.
        sizes: of micro-batches that may be tried.
        inners: ways in which blocks of several devices may share their work.
        rng: draws the pipelines to change, where there are many.
    """
    count = len(shapes)
    drawn = range(count) if count <= ALL_PIPELINES else rng.permutation(count)[:ALL_PIPELINES].tolist()
    alike = _alike(shapes)
    for i in drawn:
        blocks = shapes[i].blocks
        for edit in _own_edits(blocks, inners):
            yield _with(shapes, {i: edit})
        same = alike[_makeup(shapes[i])]
        if len(same) > 1:
            every = [list(_own_edits(shapes[j].blocks, inners)) for j in same]
            for edits in zip(*every, strict=False) if len({len(edits) for edits in every}) == 1 else ():
                yield _with(shapes, dict(zip(same, edits, strict=True)))
        yield from _exchanges(shapes, i, rng)
        yield from _take_idle(shapes, i, pools, inners)
        for at in range(1, len(blocks)):
            parts = Shape(blocks[:at], shapes[i].micro_batch_size), Shape(blocks[at:], shapes[i].micro_batch_size)
            yield shapes[:i] + parts + shapes[i + 1 :]
        for size in sizes:
            if size != shapes[i].micro_batch_size:
                yield tuple(shape._replace(micro_batch_size=size) if j in same else shape for j, shape in _at(shapes))
    for size in sizes:
        yield tuple(shape._replace(micro_batch_size=size) for shape in shapes)


def _at(shapes: Shapes) -> Iterator[tuple[int, Shape]]:
    return iter(enumerate(shapes))


Makeup = tuple[tuple[object, ...], ...]


def _makeup(shape: Shape) -> Makeup:
    return tuple((block.kind, block.size, block.inner, *_of_kinds(block)) for block in shape.blocks)


def _of_kinds(block: DeviceBlock) -> list[tuple[int, int]]:
    return [(part.kind, part.size) for part in block.others]


def _alike(shapes: Shapes) -> dict[Makeup, list[int]]:
    """Pipelines by makeup: kinds and sizes of their blocks in order."""
    alike: dict[Makeup, list[int]] = {}
    for i, shape in enumerate(shapes):
        alike.setdefault(_makeup(shape), []).append(i)
    return alike


def _with(shapes: Shapes, changes: Mapping[int, Blocks]) -> Shapes:
    """The plan with other blocks in some pipelines; pipelines without any are gone."""
    changed = [shape._replace(blocks=changes[i]) if i in changes else shape for i, shape in enumerate(shapes)]
    return tuple(shape for shape in changed if shape.blocks)


def _own_edits(blocks: Blocks, inners: Sequence[str]) -> Iterator[Blocks]:
    """Split, merge, drop or reorder blocks of one pipeline, or run one in another way."""
    for a, block in enumerate(blocks):
        before, after = blocks[:a], blocks[a + 1 :]
        if block.others:
            yield before + separated(block) + after
        elif block.size > 1:
            half = _resized(block, block.size // 2)
            yield before + (half, _resized(block, block.size - block.size // 2)) + after
            for inner in inners:
                if inner != block.inner:
                    yield before + (block._replace(inner=inner),) + after
        yield before + after
        twin = next((c for c in range(a + 1, len(blocks)) if blocks[c] == block), None)
        if twin is not None and 2 * block.size <= MAX_SIZE and not block.others:
            yield before + (_resized(block, 2 * block.size),) + blocks[a + 1 : twin] + blocks[twin + 1 :]
        for c in range(a + 1, len(blocks)):
            if blocks[c] != block:
                yield before + (blocks[c],) + blocks[a + 1 : c] + (block,) + blocks[c + 1 :]


def separated(block: DeviceBlock) -> Blocks:
    """The parts of a block of several pools as blocks of their own."""
    return tuple(DeviceBlock(*part, "one" if part.size == 1 else block.inner) for part in block.parts)


def _resized(block: DeviceBlock, size: int) -> DeviceBlock:
    inner = "one" if size == 1 else "tensor" if block.inner == "one" else block.inner
    return block._replace(size=size, inner=inner)


def _exchanges(shapes: Shapes, i: int, rng: np.random.Generator) -> Iterator[Shapes]:
    """Move a block to another pipeline, swap two, or join the pipelines."""
    count, blocks = len(shapes), shapes[i].blocks
    others = range(count) if count <= PARTNERS else rng.permutation(count)[:PARTNERS].tolist()
    for j in others:
        if j == i:
            continue
        theirs = shapes[j].blocks
        for a, block in enumerate(blocks):
            without = blocks[:a] + blocks[a + 1 :]
            beside = next((c for c, other in enumerate(theirs) if other.node == block.node), len(theirs))
            for at in sorted({0, beside, len(theirs)}):
                yield _with(shapes, {i: without, j: theirs[:at] + (block,) + theirs[at:]})
            if j > i:
                for c, other in enumerate(theirs):
                    if other != block:
                        swapped = blocks[:a] + (other,) + blocks[a + 1 :]
                        yield _with(shapes, {i: swapped, j: theirs[:c] + (block,) + theirs[c + 1 :]})
        yield _with(shapes, {i: blocks + theirs, j: ()})


def _take_idle(shapes: Shapes, i: int, pools: Pools, inners: Sequence[str]) -> Iterator[Shapes]:
    """Give idle devices to a pipeline: as a block of their own, beside equal ones, or instead of others."""
    blocks = shapes[i].blocks
    for pool, idle in zip(pools.pools, idle_devices(pools, [shape.blocks for shape in shapes]), strict=True):
        size = min(1 << (idle.bit_length() - 1), MAX_SIZE) if idle else 0
        while size:
            for inner in inners if size > 1 else inners[:1]:
                new = block_of(pool, size, inner)
                for at in range(len(blocks) + 1):
                    yield _with(shapes, {i: blocks[:at] + (new,) + blocks[at:]})
                for a, block in enumerate(blocks):
                    if block == new and 2 * size <= MAX_SIZE:
                        yield _with(shapes, {i: blocks[:a] + (_resized(block, 2 * size),) + blocks[a + 1 :]})
                    elif block != new:
                        yield _with(shapes, {i: blocks[:a] + (new,) + blocks[a + 1 :]})
            yield (*shapes, Shape((block_of(pool, size, inners[0]),), shapes[i].micro_batch_size))
            size //= 2
