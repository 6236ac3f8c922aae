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
from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from math import inf

import numpy as np

from ds_hetero.common.arrays import Floats
from ds_hetero.cost.stages.stage import DeviceBlock, Pool
from ds_hetero.planner.pipeline_search.blocks import block_of, cut_pool, sizes_up_to
from ds_hetero.planner.pipeline_search.cuts import LayerCuts
from ds_hetero.planner.pipeline_search.evaluate import Shape
from ds_hetero.planner.published.hexiscale.partition import bandwidth_between, partition

TAU = 3  # fastest neighbours that a path may go on to; the paper names tau and prints no value: chosen, never measured
MAX_PATHS = 128  # that are simulated; chosen, never measured

Blocks = tuple[DeviceBlock, ...]


class PipelineMaker:
    """Makes pipelines of groups of devices by their compute, ``speed_V``, and ``bandwidth_VV`` between them."""

    def __init__(self, cuts: LayerCuts, speed_V: Floats, bandwidth_VV: Floats, micro_batch_size: int) -> None:
        self._cuts, self._costs = cuts, cuts.costs
        self._speed_V, self._bandwidth_VV = speed_V, bandwidth_VV
        self._size = micro_batch_size
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
        speed = float(self._speed_V[chosen].sum())

        def stages_of_groups(number: float) -> tuple[Blocks, ...]:
            return tuple(self._stages(chosen[group].tolist(), speed, pipelines, number) for group in members)

        strategies = {stages_of_groups(micro_batches), stages_of_groups(1.0)}
        orders = list(paths(bandwidth_between(members, bandwidth_VV)))
        fastest_s, fastest = inf, None
        for blocks in _chains(sorted(strategies), orders):
            cut = self._cuts.best(blocks, self._size, pipelines, micro_batches)
            if cut is None:
                continue
            time_s = cut.time_s(micro_batches)
            if fastest is None or time_s < fastest_s:
                fastest_s, fastest = time_s, blocks
        return None if fastest is None else (fastest_s, Shape(fastest, self._size))

    def _stages(self, ranks: list[int], speed: float, pipelines: int, micro_batches: float) -> Blocks:
        """Stages of one small group, machine by machine; ``speed``: of all devices that the pipeline has."""
        devices_by_pool: dict[Pool, int] = {}
        for rank in ranks:
            pool = self._costs.pools.of_rank[rank]
            devices_by_pool[pool] = devices_by_pool.get(pool, 0) + 1
        blocks: list[DeviceBlock] = []
        for pool, devices in devices_by_pool.items():
            share = devices * self._speed_V[pool.ranks[0]] / speed
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
        link = int(self._costs.cluster.link_class[pool.node, pool.node])
        best_value: tuple[int, float] | None = None
        best_degrees = (1,) * devices
        for degree, smaller, first_devices in _degrees(devices):
            blocks = cut_pool(pool, first_devices, degree) + cut_pool(pool, devices - first_devices, smaller)
            options = [self._costs.stage(b.kind, b.size, b.inner, self._size, pipelines) for b in blocks]
            fitting = [option for option in options if option is not None]
            if len(fitting) < len(blocks):
                continue
            layers_that_fit = sum(option.max_layers(False, False, 1) for option in fitting)
            hop_s = self._costs.hop_s(link, blocks[0], blocks[0], self._size) if len(blocks) > 1 else 0.0
            # Layers by speed: all stages take as long, and that is the pipeline's period.
            period_s = layers / sum(1 / option.layer_s for option in fitting) + hop_s
            value = max(0, layers - layers_that_fit), (micro_batches - 1 + len(blocks)) * period_s
            if best_value is None or value < best_value:
                best_value, best_degrees = value, tuple(block.size for block in blocks)
        return best_degrees


def _chains(strategies: Iterable[Sequence[Blocks]], orders: Sequence[Sequence[int]]) -> Iterator[Blocks]:
    """Yield the stages of a pipeline, group after group, for every strategy and order of the groups.

    Groups A and B with stages (a, b) and (c) give (a, b, c) and (c, a, b). Of equal chains the first one counts.

    Args:
        strategies: stages by group.
    """
    chains: dict[Blocks, None] = {}
    for stages_by_group, order in itertools.product(strategies, orders):
        chain = itertools.chain.from_iterable(stages_by_group[group] for group in order)
        chains.setdefault(tuple(chain))
    yield from chains


def _degrees(devices: int) -> Iterator[tuple[int, int, int]]:
    """Yield the degree of the first stages, the degree of the others, which is not larger, and devices of the first.

    Of 3 devices: (1, 1, 1), (1, 1, 2), (1, 1, 3), (2, 1, 2), (2, 2, 2).
    """
    for degree, smaller in itertools.product(sizes_up_to(devices), repeat=2):
        if smaller <= degree:
            for stages in range(1, devices // degree + 1):
                yield degree, smaller, stages * degree


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
