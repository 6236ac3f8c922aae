"""Neighbours of a plan: every move changes the blocks of one or two pipelines, or of all pipelines of one makeup.

The makeup of a pipeline is the kinds and sizes of its blocks, whatever their nodes. A plan with the pipelines (A, B)
and (C), whose letters are blocks of devices, has these neighbours, among others:

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
MAX_CHANGED_PIPELINES = 12  # most pipelines that are changed in turn; of more pipelines, a random sample
MAX_PARTNERS = 6  # most pipelines with which a pipeline exchanges blocks; of more, a random sample

Blocks = tuple[DeviceBlock, ...]


def neighbouring_plans(
    shapes: Shapes, pools: Pools, sizes: Sequence[int], inners: Sequence[str], rng: np.random.Generator
) -> Iterator[Shapes]:
    """Yield the plans that are one move away.

    Args:
        sizes: samples of a micro-batch that are tried.
        inners: ways in which blocks of several devices may share their work.
        rng: draws the pipelines to change, if there are many.
    """
    by_makeup = _pipelines_by_makeup(shapes)
    for i in _sample(len(shapes), MAX_CHANGED_PIPELINES, rng):
        alike = by_makeup[_makeup(shapes[i])]  # indices of the pipelines with the makeup of pipeline i, i included
        for blocks in _edits(shapes[i].blocks, inners):
            yield _with_blocks(shapes, {i: blocks})
        if len(alike) > 1:
            yield from _edits_of_alike(shapes, alike, inners)
        yield from _exchanges(shapes, i, rng)
        yield from _take_idle(shapes, i, pools, inners)
        yield from _divisions(shapes, i)
        for size in sizes:
            if size != shapes[i].micro_batch_size:
                yield _with_size(shapes, alike, size)
    for size in sizes:
        yield _with_size(shapes, range(len(shapes)), size)


def _sample(count: int, max_drawn: int, rng: np.random.Generator) -> Sequence[int]:
    """Return all numbers below ``count``, or a random sample of ``max_drawn`` if there are more."""
    return range(count) if count <= max_drawn else rng.permutation(count)[:max_drawn].tolist()


def _with_size(shapes: Shapes, pipelines: Container[int], size: int) -> Shapes:
    """Return the plan with micro-batches of ``size`` samples in the pipelines with these indices."""
    return tuple(shape._replace(micro_batch_size=size) if i in pipelines else shape for i, shape in enumerate(shapes))


def _edits_of_alike(shapes: Shapes, alike: Sequence[int], inners: Sequence[str]) -> Iterator[Shapes]:
    """Yield plans with the same edit in all pipelines of one makeup; ``alike`` has their indices."""
    edits_by_pipeline = [list(_edits(shapes[j].blocks, inners)) for j in alike]
    # On other nodes a pipeline of this makeup may have fewer equal blocks, and then its edits do not correspond.
    if len({len(edits) for edits in edits_by_pipeline}) > 1:
        return
    for edits in zip(*edits_by_pipeline, strict=True):
        yield _with_blocks(shapes, dict(zip(alike, edits, strict=True)))


def _divisions(shapes: Shapes, i: int) -> Iterator[Shapes]:
    """Yield plans in which pipeline ``i`` is divided into two pipelines, at every boundary of its blocks in turn."""
    blocks, size = shapes[i].blocks, shapes[i].micro_batch_size
    for boundary in range(1, len(blocks)):
        first, second = Shape(blocks[:boundary], size), Shape(blocks[boundary:], size)
        yield (*shapes[:i], first, second, *shapes[i + 1 :])


Makeup = tuple[tuple[object, ...], ...]


def _makeup(shape: Shape) -> Makeup:
    """Return the kinds, sizes and inner parallelism of a pipeline's blocks in order, without their nodes."""
    makeup: list[tuple[object, ...]] = []
    for block in shape.blocks:
        other_parts = [(part.kind, part.size) for part in block.others]
        makeup.append((block.kind, block.size, block.inner, block.tensor_size, *other_parts))
    return tuple(makeup)


def _pipelines_by_makeup(shapes: Shapes) -> dict[Makeup, list[int]]:
    """Return by makeup the indices of the pipelines that have it."""
    indices: dict[Makeup, list[int]] = {}
    for i, shape in enumerate(shapes):
        indices.setdefault(_makeup(shape), []).append(i)
    return indices


def _with_blocks(shapes: Shapes, changes: Mapping[int, Blocks]) -> Shapes:
    """Return the plan with other blocks in some pipelines, by index; remove pipelines without blocks."""
    changed = [shape._replace(blocks=changes[i]) if i in changes else shape for i, shape in enumerate(shapes)]
    return tuple(shape for shape in changed if shape.blocks)


def _edits(blocks: Blocks, inners: Sequence[str]) -> Iterator[Blocks]:
    """Yield the blocks of a pipeline after one edit.

    A block is split in two, gets another inner parallelism, is dropped, is merged with an equal one, or is swapped with
    another one.
    """
    for i, block in enumerate(blocks):
        blocks_before, blocks_after = blocks[:i], blocks[i + 1 :]
        for replacement in _replacements(block, inners):
            yield blocks_before + replacement + blocks_after
        yield blocks_before + blocks_after  # the block's devices stay idle
        equal = next((j for j in range(i + 1, len(blocks)) if blocks[j] == block), None)
        if equal is not None and 2 * block.size <= MAX_SIZE and not block.others:
            yield _replace_blocks(blocks, {i: (_resize(block, 2 * block.size),), equal: ()})
        for j in range(i + 1, len(blocks)):
            if blocks[j] != block:
                yield _replace_blocks(blocks, {i: (blocks[j],), j: (block,)})


def _replacements(block: DeviceBlock, inners: Sequence[str]) -> Iterator[Blocks]:
    """Yield replacements of a block: two blocks with its devices, or one with another inner parallelism."""
    if block.others:
        yield _separate_parts(block)
    elif block.size > 1:
        half = block.size // 2
        yield _resize(block, half), _resize(block, block.size - half)
        for inner in inners:
            if inner != block.inner:
                yield (block._replace(inner=inner),)


def _replace_blocks(blocks: Blocks, changes: Mapping[int, Blocks]) -> Blocks:
    """Return the blocks with others at some indices: (A, B, C) with changes ``{0: (D,), 2: ()}`` becomes (D, B)."""
    changed = (changes.get(i, (block,)) for i, block in enumerate(blocks))
    return tuple(itertools.chain.from_iterable(changed))


def _separate_parts(block: DeviceBlock) -> Blocks:
    """Return every part of a block over several pools as a separate block."""
    return tuple(DeviceBlock(*part, "one" if part.size == 1 else block.inner) for part in block.parts)


def _resize(block: DeviceBlock, size: int) -> DeviceBlock:
    """Return the block with another number of devices; a single device that becomes several gets tensor parallelism."""
    if size == 1:
        return block._replace(size=size, inner="one")
    return block._replace(size=size, inner="tensor" if block.inner == "one" else block.inner)


def _exchanges(shapes: Shapes, i: int, rng: np.random.Generator) -> Iterator[Shapes]:
    """Yield plans in which pipeline ``i`` gives a block to another one, swaps a block with it, or is joined with it."""
    blocks = shapes[i].blocks
    for j in _sample(len(shapes), MAX_PARTNERS, rng):
        if j == i:
            continue
        partner_blocks = shapes[j].blocks
        end = len(partner_blocks)
        for k, block in enumerate(blocks):
            # To the start, to the end, or before the first block on the same node, where sends are fast.
            on_same_node = next((c for c, other in enumerate(partner_blocks) if other.node == block.node), end)
            for place in sorted({0, on_same_node, end}):
                longer_partner = (*partner_blocks[:place], block, *partner_blocks[place:])
                yield _with_blocks(shapes, {i: _replace_blocks(blocks, {k: ()}), j: longer_partner})
            if j < i:  # every two pipelines swap once
                continue
            for c, partner_block in enumerate(partner_blocks):
                if partner_block != block:
                    new_blocks = _replace_blocks(blocks, {k: (partner_block,)})
                    new_partner_blocks = _replace_blocks(partner_blocks, {c: (block,)})
                    yield _with_blocks(shapes, {i: new_blocks, j: new_partner_blocks})
        yield _with_blocks(shapes, {i: blocks + partner_blocks, j: ()})


def _take_idle(shapes: Shapes, i: int, pools: Pools, inners: Sequence[str]) -> Iterator[Shapes]:
    """Yield plans in which idle devices work: in pipeline ``i``, as one more block or in place of one, or alone."""
    idle_by_pool = idle_devices(pools, [shape.blocks for shape in shapes])
    for pool, num_idle in zip(pools.pools, idle_by_pool, strict=True):
        for size in reversed(sizes_up_to(num_idle)):
            for inner in inners if size > 1 else inners[:1]:
                for blocks in _with_added_block(shapes[i].blocks, block_of(pool, size, inner)):
                    yield _with_blocks(shapes, {i: blocks})
            yield (*shapes, Shape((block_of(pool, size, inners[0]),), shapes[i].micro_batch_size))


def _with_added_block(blocks: Blocks, new: DeviceBlock) -> Iterator[Blocks]:
    """Yield the blocks of a pipeline with ``new``: inserted anywhere, merged with an equal block, or replacing one."""
    for place in range(len(blocks) + 1):
        yield (*blocks[:place], new, *blocks[place:])
    for i, block in enumerate(blocks):
        if block != new:
            yield _replace_blocks(blocks, {i: (new,)})
        elif 2 * new.size <= MAX_SIZE:
            yield _replace_blocks(blocks, {i: (_resize(block, 2 * new.size),)})
