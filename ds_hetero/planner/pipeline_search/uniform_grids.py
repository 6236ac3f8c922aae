"""Uniform grids as in Megatron-LM: equal pipelines of equal stages over consecutive ranks, with equal layers.

A stage is one tensor-parallel group or, with context parallelism, several that share sequences equally.

The ranks are numbered in Megatron-LM's order tp-dp-pp. Example: 8 ranks as tp2 pp2 dp2: tensor-parallel groups
(0, 1), (2, 3), (4, 5), (6, 7); the first two are the first stages of the two pipelines. As tp2 cp2 pp2 dp1 they are one
pipeline of two stages, each of two groups.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from ds_hetero.cost.stages.stage import DeviceBlock, PlacedPipeline, PoolPart, StageCosts
from ds_hetero.planner.pipeline_search.block_ranks import can_be_placed
from ds_hetero.planner.pipeline_search.blocks import block_of, sizes_up_to

# Most ranks with which grids with context parallelism are tried, of which there are many. Chosen, never measured.
CONTEXT_PARALLEL_RANKS = 64


def uniform_grids(costs: StageCosts, samples: int, sizes: Sequence[int]) -> Iterator[tuple[str, list[PlacedPipeline]]]:
    """Yield the name of every grid over all devices, such as ``tp2 pp4 dp2 b1``, and its pipelines.

    Left out are grids whose tensor-parallel groups span kinds of devices or nodes, and grids that do not divide the
    layers or the batch.

    Args:
        samples: global batch.
        sizes: samples of a micro-batch that are tried.
    """
    pool_of_rank = costs.pools.of_rank
    for tp_size, groups in _tensor_parallel_groups(costs):
        blocks = [block_of(pool_of_rank[group[0]], tp_size) for group in groups]
        yield from _grids_of_blocks(costs, f"tp{tp_size}", blocks, samples, sizes)


def context_parallel_grids(
    costs: StageCosts, samples: int, sizes: Sequence[int]
) -> Iterator[tuple[str, list[PlacedPipeline]]]:
    """Yield grids whose stages share sequences between tensor-parallel groups, such as ``tp2 cp4 pp2 dp1 b1``.

    None with more than `CONTEXT_PARALLEL_RANKS` ranks. `uniform_grids` says what else is left out, and has the other
    arguments.

    Args:
        costs: a cost model with equal shares, see `StageCosts.with_even_shares`.
    """
    num_ranks = costs.cluster.num_ranks
    if "sequence" not in costs.inners or num_ranks > CONTEXT_PARALLEL_RANKS:
        return
    for tp_size, groups in _tensor_parallel_groups(costs):
        if tp_size > 1 and "tensor" not in costs.inners:
            continue
        for cp_size in sizes_up_to(len(groups), len(groups))[1:]:
            if len(groups) % cp_size:
                continue
            stages = [range(group[0], group[0] + tp_size * cp_size) for group in groups[::cp_size]]
            blocks = [_sharing_block(costs, stage, tp_size) for stage in stages]
            for name, grid in _grids_of_blocks(costs, f"tp{tp_size} cp{cp_size}", blocks, samples, sizes):
                if can_be_placed(costs.pools, [pipeline.blocks for pipeline in grid]):
                    yield name, grid


def _tensor_parallel_groups(costs: StageCosts) -> Iterator[tuple[int, list[range]]]:
    """Yield every degree of tensor parallelism with its groups of consecutive ranks, each of one kind on one node."""
    pool_of_rank, num_ranks = costs.pools.of_rank, costs.cluster.num_ranks

    def is_in_one_pool(ranks: range) -> bool:
        return len({pool_of_rank[rank] for rank in ranks}) == 1

    for tp_size in sizes_up_to(num_ranks):
        groups = [range(first, first + tp_size) for first in range(0, num_ranks - tp_size + 1, tp_size)]
        if num_ranks % tp_size == 0 and all(map(is_in_one_pool, groups)):
            yield tp_size, groups


def _sharing_block(costs: StageCosts, ranks: range, tp_size: int) -> DeviceBlock:
    """Return the block of consecutive ranks that share sequences between tensor groups of ``tp_size`` ranks."""
    sizes = Counter(costs.pools.of_rank[rank] for rank in ranks)
    return DeviceBlock.of_parts([PoolPart(pool.kind, pool.node, size) for pool, size in sizes.items()], tp_size)


def _grids_of_blocks(
    costs: StageCosts, name: str, blocks: Sequence[DeviceBlock], samples: int, sizes: Sequence[int]
) -> Iterator[tuple[str, list[PlacedPipeline]]]:
    """Yield the grids whose stages are these blocks, in Megatron-LM's order: dp before pp.

    Args:
        name: of the parallelism inside a block, with which the names of grids begin.
    """
    num_layers = costs.model.num_layers
    for num_stages in range(1, min(len(blocks), num_layers) + 1):
        if len(blocks) % num_stages or num_layers % num_stages:
            continue
        dp_size = len(blocks) // num_stages
        layers = (num_layers // num_stages,) * num_stages
        pipelines = [tuple(blocks[lane::dp_size]) for lane in range(dp_size)]
        for size in sizes:
            if samples % (dp_size * size) == 0:
                micro_batches = samples // (dp_size * size)
                grid = [PlacedPipeline(stages, layers, size, micro_batches) for stages in pipelines]
                yield f"{name} pp{num_stages} dp{dp_size} b{size}", grid
