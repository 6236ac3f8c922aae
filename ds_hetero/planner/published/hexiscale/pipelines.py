"""Pipelines of groups of devices: HexiScale's second phase (arXiv:2409.01143, section 4.3).

    (i)    the group's devices are cut into k smaller groups by the same graph partition
    (ii)   the devices that a small group has on one machine become stages by the strategy that is best for them alone
    (iii)  the order of the small groups is the best of the paths that always go on over one of the tau fastest links

What the text leaves open is filled in so that it helps the search: layers and micro-batches are those that the cost
model finds best for the stages, and a strategy, stages of any degrees, is judged with the machine's share of the layers
by compute, for all micro-batches of the pipeline and for one; the pipeline that is faster stays.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from functools import cache

import numpy as np

from ds_hetero.common.arrays import Floats
from ds_hetero.cost.stages.stage import DeviceBlock, Pool
from ds_hetero.planner.pipeline_search.blocks import block_of, cut_pool, sizes_up_to
from ds_hetero.planner.pipeline_search.cuts import LayerCuts
from ds_hetero.planner.pipeline_search.evaluate import Shape
from ds_hetero.planner.published.hexiscale.partition import bandwidth_between, partition

TAU = 3  # fastest neighbours that a path may go on to; the paper names tau and prints no value: chosen, never measured
MAX_PATHS = 128  # that are simulated; chosen, never measured


class PipelineMaker:
    """Makes pipelines of groups of devices by their compute, ``speed_V``, and ``bandwidth_VV`` between them."""

    def __init__(self, cuts: LayerCuts, speed_V: Floats, bandwidth_VV: Floats, micro_batch_size: int) -> None:
        self._cuts, self._costs = cuts, cuts.costs
        self._speed_V, self._bandwidth_VV = speed_V, bandwidth_VV
        self._size = micro_batch_size
        self._pool_of = {rank: pool for pool in self._costs.pools.pools for rank in pool.ranks}
        self._strategy = cache(self._strategy_uncached)
        self._made: dict[tuple[tuple[int, ...], int, int, float], tuple[float, Shape] | None] = {}

    def __call__(
        self, ranks: Sequence[int], groups: int, pipelines: int, micro_batches: float
    ) -> tuple[float, Shape] | None:
        """Return the fastest pipeline over these ranks with its time; None if no order of its stages fits into memory.

        Args:
            groups: into which they are cut, k_i of the paper.
            micro_batches: that the pipeline trains about.
        """
        key = tuple(ranks), min(groups, len(ranks)), pipelines, micro_batches
        if key not in self._made:
            self._made[key] = self._make(*key)
        return self._made[key]

    def _make(
        self, ranks: tuple[int, ...], groups: int, pipelines: int, micro_batches: float
    ) -> tuple[float, Shape] | None:
        chosen = np.array(ranks)
        bandwidth_VV = self._bandwidth_VV[np.ix_(chosen, chosen)]
        members = partition(self._speed_V[chosen], bandwidth_VV, groups)
        whole = float(self._speed_V[chosen].sum())
        strategies = {
            tuple(self._stages(chosen[group].tolist(), whole, pipelines, number) for group in members)
            for number in (micro_batches, 1.0)
        }
        best: tuple[float, tuple[DeviceBlock, ...]] | None = None
        found = itertools.product(sorted(strategies), paths(bandwidth_between(members, bandwidth_VV)))
        for blocks in dict.fromkeys(tuple(b for group in path for b in stages[group]) for stages, path in found):
            cut = self._cuts.best(blocks, self._size, pipelines, micro_batches)
            if cut is not None:
                time_s = cut.time_s(micro_batches)
                if best is None or time_s < best[0]:
                    best = time_s, blocks
        return None if best is None else (best[0], Shape(best[1], self._size))

    def _stages(self, ranks: list[int], whole: float, pipelines: int, micro_batches: float) -> tuple[DeviceBlock, ...]:
        """Stages of one small group, machine by machine."""
        by_pool: dict[Pool, int] = {}
        for rank in ranks:
            by_pool[self._pool_of[rank]] = by_pool.get(self._pool_of[rank], 0) + 1
        blocks: list[DeviceBlock] = []
        for pool, devices in by_pool.items():
            share = devices * self._speed_V[pool.ranks[0]] / whole
            layers = max(1, round(self._costs.model.num_layers * share))
            sizes = self._strategy(pool.kind, devices, layers, pipelines, max(1, round(micro_batches)))
            blocks += [block_of(pool, size) for size in sizes]
        return tuple(blocks)

    def _strategy_uncached(
        self, kind: int, devices: int, layers: int, pipelines: int, micro_batches: int
    ) -> tuple[int, ...]:
        """The tensor-parallel degrees of stages that are fastest for some layers on the devices of one machine.

        Tried are stages of one degree, with smaller ones on the devices that are left. A strategy that cannot hold the
        layers counts after all that can, by how many it holds.
        """
        pool = self._costs.pools.largest[kind]
        best: tuple[tuple[int, float], tuple[int, ...]] | None = None
        sizes = sizes_up_to(devices)
        cuts = [(size, rest, n * size) for size in sizes for rest in sizes for n in range(1, devices // size + 1)]
        for size, rest, cut in (each for each in cuts if each[1] <= each[0]):
            blocks = cut_pool(pool, cut, size) + cut_pool(pool, devices - cut, rest)
            options = [self._costs.stage(b.kind, b.size, b.inner, self._size, pipelines) for b in blocks]
            fitting = [option for option in options if option is not None]
            if len(fitting) < len(blocks):
                continue
            room = sum(option.max_layers(False, False, 1) for option in fitting)
            link = int(self._costs.cluster.link_class[pool.node, pool.node])
            hop_s = self._costs.hop_s(link, blocks[0], blocks[0], self._size) if len(blocks) > 1 else 0.0
            period_s = layers / sum(1 / option.layer_s for option in fitting) + hop_s
            judged = (max(0, layers - room), (micro_batches - 1 + len(blocks)) * period_s)
            if best is None or judged < best[0]:
                best = judged, tuple(block.size for block in blocks)
        return (1,) * devices if best is None else best[1]


def paths(bandwidth_GG: Floats, tau: int = TAU, most: int = MAX_PATHS) -> Iterator[tuple[int, ...]]:
    """Yield orders of the groups: from every group on, always to one of the ``tau`` with most bandwidth to the last.

    Args:
        most: paths that are yielded, as many from every first group.
    """
    count = len(bandwidth_GG)

    def onward(path: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
        if len(path) == count:
            yield path
            return
        free = [group for group in range(count) if group not in path]
        free.sort(key=lambda group: (-bandwidth_GG[path[-1], group], group))
        for group in free[:tau]:
            yield from onward((*path, group))

    for start in range(count):
        from_start = onward((start,))
        for _ in range(max(1, most // count)):
            path = next(from_start, None)
            if path is None:
                break
            yield path
