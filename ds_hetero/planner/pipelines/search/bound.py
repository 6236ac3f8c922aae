"""A step that no plan of pipelines undercuts."""

from __future__ import annotations

import itertools

import numpy as np

from ds_hetero.cost.stages.stage import NO_SYNC, StageCosts
from ds_hetero.planner.pipelines.blocks import sizes_up_to


def balance_bound_s(costs: StageCosts, global_batch: int, sizes: tuple[int, ...] = (1, 2, 4)) -> float:
    """Return the step at perfect balance with free communication: all layers of all samples over the sum of speeds.

    A device is as fast as in the most efficient block that it can be part of.
    """
    layers_per_s = 0.0
    for pool in costs.pools.pools:
        best_s = np.inf
        for size, samples in itertools.product(sizes_up_to(len(pool.ranks)), sizes):
            for inner in ("one",) if size == 1 else ("tensor", "sequence"):
                option = costs.stage(pool.kind, size, inner, samples, costs.cluster.num_ranks)
                if option is not None:
                    best_s = min(best_s, option.layer_s * size / samples)
        layers_per_s += len(pool.ranks) / best_s
    return costs.step_s(global_batch * costs.model.num_layers / layers_per_s, NO_SYNC, 0.0)
