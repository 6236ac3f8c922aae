"""Lower bound of a step: perfect balance of all devices, and free communication."""

from __future__ import annotations

import itertools

import numpy as np

from ds_hetero.cost.stages.stage import NO_SYNC, Pool, StageCosts
from ds_hetero.planner.pipeline_search.blocks import sizes_up_to


def balance_bound_s(costs: StageCosts, global_batch: int, sizes: tuple[int, ...] = (1, 2, 4)) -> float:
    """Return the step at perfect balance with free communication: all layers of all samples over the sum of speeds.

    A device is as fast as in the most efficient block that it can be part of.

    Args:
        sizes: samples of a micro-batch.
    """
    layers_per_s = sum(len(pool.ranks) / _layer_s(costs, pool, sizes) for pool in costs.pools.pools)
    return costs.step_s(global_batch * costs.model.num_layers / layers_per_s, NO_SYNC, 0.0)


def _layer_s(costs: StageCosts, pool: Pool, sizes: tuple[int, ...]) -> float:
    """Least seconds of one device for a layer of one sample; infinite if no block can run a stage."""
    least_s = float(np.inf)
    for size, samples in itertools.product(sizes_up_to(len(pool.ranks)), sizes):
        for inner in ("one",) if size == 1 else ("tensor", "sequence"):
            option = costs.stage(pool.kind, size, inner, samples, costs.cluster.num_ranks)
            if option is not None:
                least_s = min(least_s, option.layer_s * size / samples)
    return least_s
