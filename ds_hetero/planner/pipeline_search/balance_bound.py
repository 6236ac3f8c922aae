"""Lower bound of the time of a step: all devices perfectly balanced, communication free."""

from __future__ import annotations

import itertools

import numpy as np

from ds_hetero.cost.stages.stage import NO_SYNC, Pool, StageCosts
from ds_hetero.planner.pipeline_search.blocks import sizes_up_to


def balance_bound_s(costs: StageCosts, global_batch: int, sizes: tuple[int, ...] = (1, 2, 4)) -> float:
    """Return the step's time if all devices are perfectly balanced and communication is free.

    The time is layers times samples, divided by the sum of the devices' speeds in layers times samples per second.
    Every device counts with its speed in the most efficient block that it can be part of.

    Args:
        global_batch: samples of a step.
        sizes: samples of a micro-batch that are tried.
    """
    layers_per_s = sum(len(pool.ranks) / _layer_s(costs, pool, sizes) for pool in costs.pools.pools)
    return costs.step_s(global_batch * costs.model.num_layers / layers_per_s, NO_SYNC, 0.0)


def _layer_s(costs: StageCosts, pool: Pool, sizes: tuple[int, ...]) -> float:
    """Return the seconds of a device of the pool for one layer and sample, in its best block; infinite without one."""
    least_s = float(np.inf)
    for size, samples in itertools.product(sizes_up_to(len(pool.ranks)), sizes):
        for inner in ("one",) if size == 1 else ("tensor", "sequence"):
            option = costs.stage(pool.kind, size, inner, samples, costs.cluster.num_ranks)
            if option is not None:
                least_s = min(least_s, option.layer_s * size / samples)
    return least_s
