"""Neighbours of a plan in which two stages become one stage whose devices share sequences.

The new stage computes as fast as both stages together. The pipeline has one stage less, so it fills and drains faster
and sends once less; in return the devices of the new stage exchange tensors in every layer. Two stages are joined only
if a lower bound of the time of this exchange is less than the time in which the pipeline fills and drains. The bound
counts the queries of the stage with fewer devices, once in the forward and twice in the backward. The cheapest exchange
comes first. Every new stage needs a search for its schedule, which takes longer than any other move, so few are tried.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import combinations, product
from typing import NamedTuple

from ds_hetero.cost.stages.stage import DeviceBlock, PoolPart, StageCosts
from ds_hetero.planner.pipeline_search.blocks import MAX_SIZE
from ds_hetero.planner.pipeline_search.evaluate import PlanCandidate, Shape

EXCHANGES_PER_LAYER = 3  # once in the forward, twice as much in the backward
ELEMENT_BYTES = 2  # of 16-bit activations


class _Join(NamedTuple):
    """A plan in which two stages became one."""

    exchange_s: float  # lower bound of the exchange of one layer and micro-batch in the new stage
    shapes: tuple[Shape, ...]  # all pipelines of the plan


def joins(costs: StageCosts, plan: PlanCandidate) -> Iterator[tuple[Shape, ...]]:
    """Yield plans in which two stages became one, in every pipeline of equal shape; the cheapest exchange first."""
    # By blocks of a pipeline and indices of two stages, so that pipelines with equal blocks are tried once.
    join_by_stages: dict[tuple[tuple[DeviceBlock, ...], int, int], _Join] = {}
    for shape, cut, number in zip(plan.shapes, plan.cuts, plan.micro_batches, strict=True):
        blocks = shape.blocks
        fill_and_drain_s = cut.time_s(number) - number * cut.period_s
        for i, j in combinations(range(len(blocks)), 2):
            is_too_large = blocks[i].size + blocks[j].size > MAX_SIZE
            if is_too_large or (blocks, i, j) in join_by_stages:
                continue
            exchange_s = _least_exchange_s(costs, blocks[i], blocks[j], shape.micro_batch_size)
            num_layers = cut.layers[i] + cut.layers[j]
            if exchange_s * num_layers * number >= fill_and_drain_s:
                continue
            # The new stage takes the place of the first of the two: A B C D with i = 1, j = 3 becomes A BD C.
            joined = _join_blocks(blocks[i], blocks[j])
            blocks_between, blocks_after = blocks[i + 1 : j], blocks[j + 1 :]
            new_blocks = (*blocks[:i], joined, *blocks_between, *blocks_after)
            shapes = tuple(old._replace(blocks=new_blocks) if old == shape else old for old in plan.shapes)
            join_by_stages[blocks, i, j] = _Join(exchange_s, shapes)
    for join in sorted(join_by_stages.values(), key=lambda join: join.exchange_s):
        yield join.shapes


def _least_exchange_s(costs: StageCosts, a: DeviceBlock, b: DeviceBlock, micro_batch_size: int) -> float:
    """Return a lower bound of the seconds of the exchange between two blocks for one layer and micro-batch.

    The smaller block's queries cross the slowest link between the blocks; its devices send side by side. Forward and
    backward both count.
    """
    cluster = costs.cluster
    classes = [cluster.link_class[part_a.node, part_b.node] for part_a, part_b in product(a.parts, b.parts)]
    slowest_bytes_per_s = min(cluster.link_classes[link_class].bytes_per_s for link_class in classes)
    num_links = min(a.size, b.size)
    share = num_links / (a.size + b.size)
    num_bytes = micro_batch_size * costs.seq_len * costs.model.hidden_size * ELEMENT_BYTES * share
    return float(EXCHANGES_PER_LAYER * num_bytes / num_links / slowest_bytes_per_s)


def _join_blocks(a: DeviceBlock, b: DeviceBlock) -> DeviceBlock:
    """Return one block with the devices of both, which share sequences."""
    counts: dict[tuple[int, int], int] = {}
    for part in (*a.parts, *b.parts):
        counts[part.kind, part.node] = counts.get((part.kind, part.node), 0) + part.size
    if len(counts) == 1:
        return DeviceBlock(a.kind, a.node, a.size + b.size, "sequence")
    return DeviceBlock.of_parts([PoolPart(kind, node, size) for (kind, node), size in counts.items()])


def mixed_nodes(costs: StageCosts) -> Iterator[list[tuple[DeviceBlock, ...]]]:
    """Yield plans whose stages are whole nodes that share sequences; none if every node has devices of one kind.

    The nodes are dealt out to 1, 2, 4, ... pipelines, as long as each pipeline gets a node.
    """
    parts_of_node: dict[int, list[PoolPart]] = {}
    for pool in costs.pools.pools:
        parts_of_node.setdefault(pool.node, []).append(PoolPart(pool.kind, pool.node, len(pool.ranks)))
    nodes = list(parts_of_node.values())
    is_mixed = any(len(parts) > 1 for parts in nodes)
    if not is_mixed or max(map(_num_devices, nodes)) > MAX_SIZE:
        return
    blocks = [_node_block(parts) for parts in nodes]
    num_pipelines = 1
    while num_pipelines <= len(blocks):
        yield [tuple(blocks[first::num_pipelines]) for first in range(num_pipelines)]
        num_pipelines *= 2


def _node_block(parts: Sequence[PoolPart]) -> DeviceBlock:
    """Return one block with all devices of a node."""
    return DeviceBlock.of_parts(parts) if _num_devices(parts) > 1 else DeviceBlock(*parts[0], "one")


def _num_devices(parts: Sequence[PoolPart]) -> int:
    return sum(part.size for part in parts)
