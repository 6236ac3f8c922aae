"""Uniform grids as in Megatron-LM: equal pipelines of equal stages over consecutive ranks, with equal layers.

The ranks are numbered in Megatron-LM's order tp-dp-pp. Example: 8 ranks as tp2 pp2 dp2: tensor-parallel groups
(0, 1), (2, 3), (4, 5), (6, 7); the first two are the first stages of the two pipelines.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ds_hetero.cost.stages.stage import PlacedPipeline, StageCosts
from ds_hetero.planner.pipeline_search.blocks import block_of, sizes_up_to


def uniform_grids(costs: StageCosts, samples: int, sizes: Sequence[int]) -> Iterator[tuple[str, list[PlacedPipeline]]]:
    """Yield the name of every grid over all devices, such as ``tp2 pp4 dp2 b1``, and its pipelines.

    Left out are grids whose tensor-parallel groups span kinds of devices or nodes, and grids that do not divide the
    layers or the batch.

    Args:
        samples: global batch.
        sizes: samples of a micro-batch that are tried.
    """
    pool_of_rank, num_layers = costs.pools.of_rank, costs.model.num_layers
    num_ranks = costs.cluster.num_ranks

    def is_in_one_pool(ranks: range) -> bool:
        return len({pool_of_rank[rank] for rank in ranks}) == 1

    for tp_size in sizes_up_to(num_ranks):
        groups = [range(first, first + tp_size) for first in range(0, num_ranks - tp_size + 1, tp_size)]
        if num_ranks % tp_size or not all(map(is_in_one_pool, groups)):
            continue
        blocks = [block_of(pool_of_rank[group[0]], tp_size) for group in groups]
        for num_stages in range(1, min(len(blocks), num_layers) + 1):
            if len(blocks) % num_stages or num_layers % num_stages:
                continue
            dp_size = len(blocks) // num_stages
            layers = (num_layers // num_stages,) * num_stages
            pipelines = [tuple(blocks[lane::dp_size]) for lane in range(dp_size)]
            for size in sizes:
                if samples % (dp_size * size) == 0:
                    name = f"tp{tp_size} pp{num_stages} dp{dp_size} b{size}"
                    micro_batches = samples // (dp_size * size)
                    yield name, [PlacedPipeline(stages, layers, size, micro_batches) for stages in pipelines]
