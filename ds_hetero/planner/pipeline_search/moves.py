"""Neighbours of a plan: every move changes the blocks of one or two pipelines, or of all pipelines of one makeup.

A plan with the pipelines (A, B) and (C), whose letters are blocks, has these neighbours, among others:

    (A1, A2, B)  (C)    A in two halves
    (B)  (A, C)         A moved to the other pipeline
    (C, B)  (A)         A and C swapped
    (A, B, C)           the pipelines joined
    (A)  (B)  (C)       the first one divided
"""

from __future__ import annotations

import itertools
from collections.abc import Container, Iterator, Mapping, Sequence

import numpy as np

from ds_hetero.cost.stages.stage import DeviceBlock, Pools
from ds_hetero.planner.pipeline_search.block_ranks import idle_devices
from ds_hetero.planner.pipeline_search.blocks import MAX_SIZE, block_of, sizes_up_to
from ds_hetero.planner.pipeline_search.evaluate import Shape, Shapes

# Chosen, never measured alone; `python -m benchmarks.pipelines_planner growth` says the gap to the bound with them.
ALL_PIPELINES = 12  # up to so many pipelines, all are changed in turn; of more, a sample
PARTNERS = 6  # pipelines that one exchanges blocks with

Blocks = tuple[DeviceBlock, ...]


def neighbouring_plans(
    shapes: Shapes, pools: Pools, sizes: Sequence[int], inners: Sequence[str], rng: np.random.Generator
) -> Iterator[Shapes]:
    """Yield plans that are one move away.

    Args:
        inners: ways in which blocks of several devices may share their work.
        rng: draws the pipelines to change, where there are many.
    """
    alike = _alike(shapes)
    for i in _drawn(len(shapes), ALL_PIPELINES, rng):
        same = alike[_makeup(shapes[i])]
        for blocks in _own_edits(shapes[i].blocks, inners):
            yield _with(shapes, {i: blocks})
        if len(same) > 1:
            yield from _edits_of_alike(shapes, same, inners)
        yield from _exchanges(shapes, i, rng)
        yield from _take_idle(shapes, i, pools, inners)
        yield from _divisions(shapes, i)
        for size in sizes:
            if size != shapes[i].micro_batch_size:
                yield _with_size(shapes, same, size)
    for size in sizes:
        yield _with_size(shapes, range(len(shapes)), size)


def _drawn(count: int, most: int, rng: np.random.Generator) -> Sequence[int]:
    """All numbers below ``count``; of more than ``most`` a sample."""
    return range(count) if count <= most else rng.permutation(count)[:most].tolist()


def _with_size(shapes: Shapes, pipelines: Container[int], size: int) -> Shapes:
    """The plan with micro-batches of ``size`` samples in some pipelines."""
    return tuple(shape._replace(micro_batch_size=size) if i in pipelines else shape for i, shape in enumerate(shapes))


def _edits_of_alike(shapes: Shapes, same: Sequence[int], inners: Sequence[str]) -> Iterator[Shapes]:
    """The same edit in all pipelines of one makeup."""
    edits_of = [list(_own_edits(shapes[j].blocks, inners)) for j in same]
    # Pipelines of one makeup over other nodes may have fewer twins, and so other edits: these do not correspond.
    if len({len(edits) for edits in edits_of}) > 1:
        return
    for edits in zip(*edits_of, strict=True):
        yield _with(shapes, dict(zip(same, edits, strict=True)))


def _divisions(shapes: Shapes, i: int) -> Iterator[Shapes]:
    """A pipeline in two, wherever it can be cut."""
    blocks, size = shapes[i].blocks, shapes[i].micro_batch_size
    for at in range(1, len(blocks)):
        yield (*shapes[:i], Shape(blocks[:at], size), Shape(blocks[at:], size), *shapes[i + 1 :])


Makeup = tuple[tuple[object, ...], ...]


def _makeup(shape: Shape) -> Makeup:
    """Kinds and sizes of a pipeline's blocks in order, without their nodes."""
    makeup: list[tuple[object, ...]] = []
    for block in shape.blocks:
        others = [(part.kind, part.size) for part in block.others]
        makeup.append((block.kind, block.size, block.inner, *others))
    return tuple(makeup)


def _alike(shapes: Shapes) -> dict[Makeup, list[int]]:
    """Pipelines by makeup."""
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
        for instead in _instead_of(block, inners):
            yield before + instead + after
        yield before + after  # its devices idle
        twin = next((c for c in range(a + 1, len(blocks)) if blocks[c] == block), None)
        if twin is not None and 2 * block.size <= MAX_SIZE and not block.others:
            yield _replaced(blocks, {a: (_resized(block, 2 * block.size),), twin: ()})
        for c in range(a + 1, len(blocks)):
            if blocks[c] != block:
                yield _replaced(blocks, {a: (blocks[c],), c: (block,)})


def _instead_of(block: DeviceBlock, inners: Sequence[str]) -> Iterator[Blocks]:
    """The devices of a block in two blocks, or as one with another inner parallelism."""
    if block.others:
        yield separated(block)
    elif block.size > 1:
        half = block.size // 2
        yield _resized(block, half), _resized(block, block.size - half)
        for inner in inners:
            if inner != block.inner:
                yield (block._replace(inner=inner),)


def _replaced(blocks: Blocks, changes: Mapping[int, Blocks]) -> Blocks:
    """The blocks with others at some places: of (A, B, C) with ``{0: (D,), 2: ()}``, (D, B)."""
    changed = (changes.get(i, (block,)) for i, block in enumerate(blocks))
    return tuple(itertools.chain.from_iterable(changed))


def separated(block: DeviceBlock) -> Blocks:
    """The parts of a block of several pools as blocks of their own."""
    return tuple(DeviceBlock(*part, "one" if part.size == 1 else block.inner) for part in block.parts)


def _resized(block: DeviceBlock, size: int) -> DeviceBlock:
    """The block with another number of devices; one that was a single device gets tensor parallelism."""
    if size == 1:
        return block._replace(size=size, inner="one")
    return block._replace(size=size, inner="tensor" if block.inner == "one" else block.inner)


def _exchanges(shapes: Shapes, i: int, rng: np.random.Generator) -> Iterator[Shapes]:
    """Move a block to another pipeline, swap two, or join the pipelines."""
    blocks = shapes[i].blocks
    for j in _drawn(len(shapes), PARTNERS, rng):
        if j == i:
            continue
        partner_blocks = shapes[j].blocks
        last = len(partner_blocks)
        for a, block in enumerate(blocks):
            # First, last, or before the first block of the same node, over whose links the hop is short.
            same_node = next((c for c, other in enumerate(partner_blocks) if other.node == block.node), last)
            for at in sorted({0, same_node, last}):
                longer = (*partner_blocks[:at], block, *partner_blocks[at:])
                yield _with(shapes, {i: _replaced(blocks, {a: ()}), j: longer})
            if j < i:  # every two pipelines swap once
                continue
            for c, other in enumerate(partner_blocks):
                if other != block:
                    swapped, partner_swapped = (
                        _replaced(blocks, {a: (other,)}),
                        _replaced(partner_blocks, {c: (block,)}),
                    )
                    yield _with(shapes, {i: swapped, j: partner_swapped})
        yield _with(shapes, {i: blocks + partner_blocks, j: ()})


def _take_idle(shapes: Shapes, i: int, pools: Pools, inners: Sequence[str]) -> Iterator[Shapes]:
    """Give idle devices to a pipeline: as a block of their own, beside equal ones, or instead of others."""
    idle = idle_devices(pools, [shape.blocks for shape in shapes])
    for pool, num_idle in zip(pools.pools, idle, strict=True):
        for size in reversed(sizes_up_to(num_idle)):
            for inner in inners if size > 1 else inners[:1]:
                for blocks in _with_block(shapes[i].blocks, block_of(pool, size, inner)):
                    yield _with(shapes, {i: blocks})
            yield (*shapes, Shape((block_of(pool, size, inners[0]),), shapes[i].micro_batch_size))


def _with_block(blocks: Blocks, new: DeviceBlock) -> Iterator[Blocks]:
    """A further block at every place of a pipeline, as one with an equal block, or instead of another one."""
    for at in range(len(blocks) + 1):
        yield (*blocks[:at], new, *blocks[at:])
    for a, block in enumerate(blocks):
        if block != new:
            yield _replaced(blocks, {a: (new,)})
        elif 2 * new.size <= MAX_SIZE:
            yield _replaced(blocks, {a: (_resized(block, 2 * new.size),)})
