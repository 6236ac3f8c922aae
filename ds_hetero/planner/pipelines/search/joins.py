"""Stages of sequence parallelism over unlike devices: neighbours of a plan in which two stages are one.

Two stages that become one compute as fast as both together did. What they save is one place in the pipeline: less
filling and draining, one hop less. What they pay is the exchange of every layer. So a join is tried where the exchange,
at least the smaller side's queries once per pass, takes less than the filling that the plan has, the cheapest exchange
first. Every join has a schedule of its own, whose search takes longer than any other move, so few are tried.
"""

from __future__ import annotations

from collections.abc import Iterator

from ds_hetero.cost.stages.stage import DeviceBlock, PoolPart, StageCosts
from ds_hetero.planner.pipelines.blocks import MAX_SIZE
from ds_hetero.planner.pipelines.search.evaluate import PlanCandidate, Shape

PASSES = 3  # forward, and twice as much in the backward
ELEMENT_BYTES = 2


def joins(costs: StageCosts, plan: PlanCandidate) -> Iterator[tuple[Shape, ...]]:
    """Yield plans in which two stages of the pipelines of one makeup share their sequences, cheapest exchange first.

    Args:
        costs: the cost model.
        plan: by its closed form.
    """
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
