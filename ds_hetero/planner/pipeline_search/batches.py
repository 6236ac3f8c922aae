"""Micro-batches of pipelines that take ``fill + (m - 1) period`` seconds for m of them, so that the last ends soonest.

Every pipeline trains at least one micro-batch, and all together exactly the global batch.

A step that no plan of pipelines undercuts.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Sequence
from math import floor

import numpy as np

from ds_hetero.cost.stages.stage import NO_SYNC, StageCosts
from ds_hetero.planner.pipeline_search.blocks import sizes_up_to


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


TOLERANCE = 1e-9


def batch_bound_s(fill_s: Sequence[float], period_s: Sequence[float], sizes: Sequence[int], samples: int) -> float:
    """Return a time that no split undercuts: fractions of micro-batches, and negative ones, are allowed."""
    missing, rate = float(samples), 0.0
    for fill, period, size in zip(fill_s, period_s, sizes, strict=True):
        missing += size * (fill / period - 1)
        rate += size / period
    return max(missing / rate, max(fill_s))


def split_global_batch(
    fill_s: Sequence[float], period_s: Sequence[float], sizes: Sequence[int], samples: int
) -> list[int] | None:
    """Return the micro-batches of every pipeline; None if no numbers >= 1 of them make up the global batch.

    Exact where every size divides the next larger one, as powers of two do; other sizes may miss a split.

    Args:
        fill_s: time of the first micro-batch, by pipeline.
        period_s: of each following one.
    """
    if sum(sizes) > samples:
        return None
    bound = batch_bound_s(fill_s, period_s, sizes, samples)
    counts = _within(bound, fill_s, period_s)
    if len(set(sizes)) == 1:
        if samples % sizes[0]:
            return None
        return _exact_count(counts, samples // sizes[0], fill_s, period_s)
    return _mixed(bound, fill_s, period_s, sizes, samples)


def _within(limit_s: float, fill_s: Sequence[float], period_s: Sequence[float]) -> list[int]:
    """Micro-batches that end by ``limit_s``, at least one of each."""
    pairs = zip(fill_s, period_s, strict=True)
    return [max(1, floor((limit_s - fill) / period + TOLERANCE) + 1) for fill, period in pairs]


def _exact_count(counts: list[int], total: int, fill_s: Sequence[float], period_s: Sequence[float]) -> list[int]:
    """Add the micro-batches that end first, or take away those that end last, until there are ``total``."""
    missing = total - sum(counts)
    if missing > 0:
        ends = [(fill_s[i] + counts[i] * period_s[i], i) for i in range(len(counts))]
        heapq.heapify(ends)
        for _ in range(missing):
            end, i = ends[0]
            counts[i] += 1
            heapq.heapreplace(ends, (end + period_s[i], i))
    elif missing < 0:
        ends = [(-fill_s[i] - (counts[i] - 1) * period_s[i], i) for i in range(len(counts)) if counts[i] > 1]
        heapq.heapify(ends)
        for _ in range(-missing):
            end, i = ends[0]
            counts[i] -= 1
            if counts[i] > 1:
                heapq.heapreplace(ends, (end + period_s[i], i))
            else:
                heapq.heappop(ends)
    return counts


def _mixed(
    bound_s: float, fill_s: Sequence[float], period_s: Sequence[float], sizes: Sequence[int], samples: int
) -> list[int] | None:
    """The least limit under which exactly ``samples`` can be made up, by bisection."""
    low, high = bound_s, bound_s
    chosen = None
    for _ in range(40):  # the limit at which some pipeline could do all of it is enough
        chosen = _make_up(_within(high, fill_s, period_s), sizes, samples)
        if chosen is not None:
            break
        high = 1.1 * high + max(period_s)
    if chosen is None:
        return None
    while high - low > TOLERANCE * high:
        middle = (low + high) / 2
        counts = _make_up(_within(middle, fill_s, period_s), sizes, samples)
        low, high, chosen = (low, middle, counts) if counts is not None else (middle, high, chosen)
    return chosen


def _make_up(most: Sequence[int], sizes: Sequence[int], samples: int) -> list[int] | None:
    """Counts of at least 1 and at most ``most`` with the given sum; takes away large micro-batches first."""
    counts = list(most)
    excess = sum(size * count for size, count in zip(sizes, counts, strict=True)) - samples
    for i in sorted(range(len(sizes)), key=lambda i: (-sizes[i], i)):
        fewer = min(counts[i] - 1, max(excess, 0) // sizes[i])
        counts[i] -= fewer
        excess -= fewer * sizes[i]
    return counts if excess == 0 else None
