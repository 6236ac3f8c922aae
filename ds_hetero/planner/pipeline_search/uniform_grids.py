"""Uniform grids: tensor x pipeline x data of equal sizes over consecutive ranks, with equal layers and micro-batches.

Source: Megatron-LM's order tp-dp-pp.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ds_hetero.cost.stages.stage import PlacedPipeline, StageCosts
from ds_hetero.planner.pipeline_search.blocks import block_of, sizes_up_to


def uniform_grids(costs: StageCosts, samples: int, sizes: Sequence[int]) -> Iterator[tuple[str, list[PlacedPipeline]]]:
    """Yield every grid of equal pipelines over all devices, by name ``tp2 pp4 dp2 b1``.

    Tensor-parallel groups that span kinds or nodes are left out; so are grids that do not divide layers or batch.
    """
    pool_of_rank, num_layers = costs.pools.of_rank, costs.model.num_layers
    num_ranks = costs.cluster.num_ranks

    def is_in_one_pool(ranks: range) -> bool:
        return len({pool_of_rank[rank] for rank in ranks}) == 1

    for tensor in sizes_up_to(num_ranks):
        groups = [range(first, first + tensor) for first in range(0, num_ranks - tensor + 1, tensor)]
        if num_ranks % tensor or not all(map(is_in_one_pool, groups)):
            continue
        blocks = [block_of(pool_of_rank[group[0]], tensor) for group in groups]
        for stages in range(1, min(len(blocks), num_layers) + 1):
            if len(blocks) % stages or num_layers % stages:
                continue
            data = len(blocks) // stages
            layers = (num_layers // stages,) * stages
            pipelines = [tuple(blocks[lane::data]) for lane in range(data)]
            for size in sizes:
                if samples % (data * size) == 0:
                    name = f"tp{tensor} pp{stages} dp{data} b{size}"
                    number = samples // (data * size)
                    yield name, [PlacedPipeline(blocks, layers, size, number) for blocks in pipelines]
