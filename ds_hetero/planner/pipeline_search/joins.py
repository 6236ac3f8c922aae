"""Stages of sequence parallelism over unlike devices: neighbours of a plan in which two stages are one.

Two stages that become one compute as fast as both together did. The join saves one place in the pipeline: less filling
and draining, and one send less. It pays the exchange of every layer. So a join is tried where the exchange, at least
the smaller side's queries once per pass, takes less than the filling that the plan has, the cheapest exchange first.
Every join has a schedule of its own, whose search takes longer than any other move, so few are tried.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import combinations, product
from operator import itemgetter

from ds_hetero.cost.stages.stage import DeviceBlock, PoolPart, StageCosts
from ds_hetero.planner.pipeline_search.blocks import MAX_SIZE
from ds_hetero.planner.pipeline_search.evaluate import PlanCandidate, Shape

PASSES = 3  # forward, and twice as much in the backward
ELEMENT_BYTES = 2  # of 16-bit activations


def joins(costs: StageCosts, plan: PlanCandidate) -> Iterator[tuple[Shape, ...]]:
    """Yield plans in which two stages of one makeup's pipelines share sequences, cheapest exchange first."""
    # By blocks and the two stages, so that pipelines of equal blocks are tried once: the exchange, and the plan.
    plans: dict[tuple[object, ...], tuple[float, tuple[Shape, ...]]] = {}
    for shape, cut, number in zip(plan.shapes, plan.cuts, plan.micro_batches, strict=True):
        blocks = shape.blocks
        filling_s = cut.time_s(number) - number * cut.period_s
        for a, c in combinations(range(len(blocks)), 2):
            if blocks[a].size + blocks[c].size > MAX_SIZE or (blocks, a, c) in plans:
                continue
            exchange_s = _exchange_s(costs, blocks[a], blocks[c], shape.micro_batch_size)
            exchanged_layers = cut.layers[a] + cut.layers[c]
            if exchange_s * exchanged_layers * number >= filling_s:
                continue
            # In the place of the first of the two stages; the second one is gone.
            one_less = (*blocks[:a], _joined(blocks[a], blocks[c]), *blocks[a + 1 : c], *blocks[c + 1 :])
            shapes = tuple(old._replace(blocks=one_less) if old == shape else old for old in plan.shapes)
            plans[blocks, a, c] = exchange_s, shapes
    for _, shapes in sorted(plans.values(), key=itemgetter(0)):
        yield shapes


def _exchange_s(costs: StageCosts, a: DeviceBlock, b: DeviceBlock, micro_batch_size: int) -> float:
    """Least time of a layer's exchange between two blocks: the smaller one's queries, over the slowest link.

    Every device of the smaller block has such a link.
    """
    cluster = costs.cluster
    classes = [cluster.link_class[part_a.node, part_b.node] for part_a, part_b in product(a.parts, b.parts)]
    slowest_bytes_per_s = min(cluster.link_classes[link_class].bytes_per_s for link_class in classes)
    links = min(a.size, b.size)
    share = links / (a.size + b.size)
    num_bytes = micro_batch_size * costs.seq_len * costs.model.hidden_size * ELEMENT_BYTES * share
    return float(PASSES * num_bytes / links / slowest_bytes_per_s)


def _joined(a: DeviceBlock, b: DeviceBlock) -> DeviceBlock:
    """One block of the devices of both."""
    counts: dict[tuple[int, int], int] = {}
    for part in (*a.parts, *b.parts):
        counts[part.kind, part.node] = counts.get((part.kind, part.node), 0) + part.size
    if len(counts) == 1:
        return DeviceBlock(a.kind, a.node, a.size + b.size, "sequence")
    return DeviceBlock.of_parts([PoolPart(kind, node, size) for (kind, node), size in counts.items()])


def mixed_nodes(costs: StageCosts) -> Iterator[list[tuple[DeviceBlock, ...]]]:
    """Yield pipelines whose stages are whole nodes that share sequences, where a node has devices of several kinds."""
    parts_of_node: dict[int, list[PoolPart]] = {}
    for pool in costs.pools.pools:
        parts_of_node.setdefault(pool.node, []).append(PoolPart(pool.kind, pool.node, len(pool.ranks)))
    nodes = list(parts_of_node.values())
    is_mixed = any(len(parts) > 1 for parts in nodes)
    if not is_mixed or max(map(_size, nodes)) > MAX_SIZE:
        return
    blocks = [_of_node(parts) for parts in nodes]
    num_pipelines = 1
    while num_pipelines <= len(blocks):
        yield [tuple(blocks[first::num_pipelines]) for first in range(num_pipelines)]
        num_pipelines *= 2


def _of_node(parts: Sequence[PoolPart]) -> DeviceBlock:
    """One block of all devices of a node."""
    return DeviceBlock.of_parts(parts) if _size(parts) > 1 else DeviceBlock(*parts[0], "one")


def _size(parts: Sequence[PoolPart]) -> int:
    return sum(part.size for part in parts)
