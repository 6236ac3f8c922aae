"""Neighbours of a plan: every move changes the blocks of one or two pipelines, or of all pipelines of one makeup.

Stages of sequence parallelism over unlike devices: neighbours of a plan in which two stages are one.

Two stages that become one compute as fast as both together did. What they save is one place in the pipeline: less
filling and draining, one hop less. What they pay is the exchange of every layer. So a join is tried where the exchange,
at least the smaller side's queries once per pass, takes less than the filling that the plan has, the cheapest exchange
first. Every join has a schedule of its own, whose search takes longer than any other move, so few are tried.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from ds_hetero.cost.stages.stage import DeviceBlock, PoolPart, Pools, StageCosts
from ds_hetero.planner.pipeline_search.blocks import MAX_SIZE, block_of, idle_devices
from ds_hetero.planner.pipeline_search.evaluate import PlanCandidate, Shape, Shapes

PASSES = 3  # forward, and twice as much in the backward
ELEMENT_BYTES = 2


def joins(costs: StageCosts, plan: PlanCandidate) -> Iterator[tuple[Shape, ...]]:
    """Yield plans in which two stages of one makeup's pipelines share sequences, cheapest exchange first."""
    found: dict[tuple[object, ...], tuple[float, tuple[Shape, ...]]] = {}
    for shape, cut, number in zip(plan.shapes, plan.cuts, plan.micro_batches, strict=True):
        filling_s = cut.time_s(number) - number * cut.period_s
        for a, block in enumerate(shape.blocks):
            for c in range(a + 1, len(shape.blocks)):
                other = shape.blocks[c]
                if block.size + other.size > MAX_SIZE or (shape.blocks, a, c) in found:
                    continue
                exchange_s = _exchange_s(costs, block, other, shape.micro_batch_size)
                if exchange_s * (cut.layers[a] + cut.layers[c]) * number >= filling_s:
                    continue
                joined = (*shape.blocks[:a], _joined(block, other), *shape.blocks[a + 1 : c], *shape.blocks[c + 1 :])
                shapes = tuple(old._replace(blocks=joined) if old == shape else old for old in plan.shapes)
                found[shape.blocks, a, c] = exchange_s, shapes
    for _, shapes in sorted(found.values(), key=lambda each: each[0]):
        yield shapes


def _exchange_s(costs: StageCosts, a: DeviceBlock, b: DeviceBlock, micro_batch_size: int) -> float:
    """Least time of a layer's exchange between two blocks, over their slowest link and all its ports."""
    cluster = costs.cluster
    links = [cluster.link_classes[cluster.link_class[mine.node, theirs.node]] for mine in a.parts for theirs in b.parts]
    share, ports = min(a.size, b.size) / (a.size + b.size), min(a.size, b.size)
    volume = micro_batch_size * costs.seq_len * costs.model.hidden_size * ELEMENT_BYTES * share
    slowest = min(link.bytes_per_s for link in links)
    return float(PASSES * volume / ports / slowest)


def _joined(a: DeviceBlock, b: DeviceBlock) -> DeviceBlock:
    counts: dict[tuple[int, int], int] = {}
    for part in (*a.parts, *b.parts):
        counts[part.kind, part.node] = counts.get((part.kind, part.node), 0) + part.size
    if len(counts) == 1:
        return DeviceBlock(a.kind, a.node, a.size + b.size, "sequence")
    return DeviceBlock.of_parts([PoolPart(kind, node, size) for (kind, node), size in counts.items()])


def mixed_nodes(costs: StageCosts) -> Iterator[list[tuple[DeviceBlock, ...]]]:
    """Yield pipelines whose stages are whole nodes that share sequences, where a node has devices of several kinds."""
    of_node: dict[int, list[PoolPart]] = {}
    for pool in costs.pools.pools:
        of_node.setdefault(pool.node, []).append(PoolPart(pool.kind, pool.node, len(pool.ranks)))
    nodes = list(of_node.values())
    if all(len(parts) == 1 for parts in nodes) or max(sum(p.size for p in parts) for parts in nodes) > MAX_SIZE:
        return
    blocks = [
        DeviceBlock.of_parts(parts) if sum(part.size for part in parts) > 1 else DeviceBlock(*parts[0], "one")
        for parts in nodes
    ]
    count = 1
    while count <= len(blocks):
        yield [tuple(blocks[lane::count]) for lane in range(count)]
        count *= 2


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
                yield tuple(
                    shape._replace(micro_batch_size=size) if j in same else shape for j, shape in enumerate(shapes)
                )
    for size in sizes:
        yield tuple(shape._replace(micro_batch_size=size) for shape in shapes)


Makeup = tuple[tuple[object, ...], ...]


def _makeup(shape: Shape) -> Makeup:
    return tuple(
        (block.kind, block.size, block.inner, *((part.kind, part.size) for part in block.others))
        for block in shape.blocks
    )


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
