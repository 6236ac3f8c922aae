"""Make a pipeline of a group of devices: HexiScale's second phase (arXiv:2409.01143, section 4.3).

    (i)    the devices are divided into k smaller groups, by the same graph partition as in the first phase
    (ii)   the devices of a small group on one machine become stages. Their tensor-parallel degrees are those with which
           these devices are fastest, without regard to other groups
    (iii)  the small groups are put in order: paths that always continue over one of the tau fastest links are tried

The text leaves some choices open; here they are made in favour of the search. Layers and micro-batches are those that
our cost model finds best for the stages. In (ii) a machine has a share of the layers by its compute. Degrees are chosen
once for all micro-batches of the pipeline and once for a single one, and the faster pipeline is kept.

Dimension key: V devices, G small groups.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from math import inf
from typing import NamedTuple

import numpy as np

from ds_hetero.common.arrays import Floats
from ds_hetero.cost.stages.stage import DeviceBlock, Pool
from ds_hetero.planner.pipeline_search.blocks import block_of, cut_pool, sizes_up_to
from ds_hetero.planner.pipeline_search.cuts import LayerCuts
from ds_hetero.planner.pipeline_search.evaluate import Shape
from ds_hetero.planner.published.hexiscale.partition import bandwidth_between, partition

TAU = 3  # most neighbours to which a path may continue; the paper gives no value for tau: chosen, never measured
MAX_PATHS = 128  # most paths that are tried; chosen, never measured

Blocks = tuple[DeviceBlock, ...]


class TimedPipeline(NamedTuple):
    """A pipeline and its time for all micro-batches, by the closed form."""

    time_s: float
    shape: Shape


class PipelineMaker:
    """Makes pipelines of groups of devices.

    Args:
        speed_V: compute of every device.
        bandwidth_VV: bandwidth between devices.
        micro_batch_size: samples of a micro-batch.
    """

    def __init__(self, cuts: LayerCuts, speed_V: Floats, bandwidth_VV: Floats, micro_batch_size: int) -> None:
        self._cuts, self._costs = cuts, cuts.costs
        self._speed_V, self._bandwidth_VV = speed_V, bandwidth_VV
        self._size = micro_batch_size
        self._degrees_on_machine = cache(self._degrees_on_machine_uncached)
        self._pipelines: dict[tuple[tuple[int, ...], int, int, float], TimedPipeline | None] = {}

    def __call__(self, ranks: Sequence[int], groups: int, pipelines: int, micro_batches: float) -> TimedPipeline | None:
        """Return the fastest pipeline over these ranks; None if no order of its stages fits into memory.

        Args:
            groups: number of small groups, the paper's k_i.
            pipelines: number of pipelines of the plan.
            micro_batches: approximate micro-batches of this pipeline.
        """
        key = tuple(ranks), min(groups, len(ranks)), pipelines, micro_batches
        if key not in self._pipelines:
            self._pipelines[key] = self._make(*key)
        return self._pipelines[key]

    def _make(self, ranks: tuple[int, ...], groups: int, pipelines: int, micro_batches: float) -> TimedPipeline | None:
        """Make the pipeline, see `__call__`."""
        rank_V = np.array(ranks)
        bandwidth_VV = self._bandwidth_VV[np.ix_(rank_V, rank_V)]
        members = partition(self._speed_V[rank_V], bandwidth_VV, groups)  # indices into rank_V, by small group
        speed = float(self._speed_V[rank_V].sum())

        def stages_of_groups(number: float) -> tuple[Blocks, ...]:
            """Return the stages of every small group, with degrees for ``number`` micro-batches."""
            return tuple(self._stages(rank_V[group].tolist(), speed, pipelines, number) for group in members)

        stage_choices = {stages_of_groups(micro_batches), stages_of_groups(1.0)}
        orders = list(paths(bandwidth_between(members, bandwidth_VV)))
        fastest_s, fastest = inf, None
        for blocks in _chains(sorted(stage_choices), orders):
            cut = self._cuts.best(blocks, self._size, pipelines, micro_batches)
            if cut is None:
                continue
            time_s = cut.time_s(micro_batches)
            if fastest is None or time_s < fastest_s:
                fastest_s, fastest = time_s, blocks
        return None if fastest is None else TimedPipeline(fastest_s, Shape(fastest, self._size))

    def _stages(self, ranks: list[int], speed: float, pipelines: int, micro_batches: float) -> Blocks:
        """Return the stages of one small group, machine by machine.

        Args:
            ranks: ranks of the group.
            speed: compute of all devices of the pipeline.
            pipelines: number of pipelines of the plan.
            micro_batches: micro-batches for which the degrees are chosen.
        """
        devices_by_pool: dict[Pool, int] = {}
        for rank in ranks:
            pool = self._costs.pools.of_rank[rank]
            devices_by_pool[pool] = devices_by_pool.get(pool, 0) + 1
        blocks: list[DeviceBlock] = []
        for pool, devices in devices_by_pool.items():
            share = devices * self._speed_V[pool.ranks[0]] / speed
            layers = max(1, round(self._costs.model.num_layers * share))
            degrees = self._degrees_on_machine(pool.kind, devices, layers, pipelines, max(1, round(micro_batches)))
            blocks += [block_of(pool, degree) for degree in degrees]
        return tuple(blocks)

    def _degrees_on_machine_uncached(
        self, kind: int, devices: int, layers: int, pipelines: int, micro_batches: int
    ) -> tuple[int, ...]:
        """Return the tensor-parallel degree of every stage on one machine with which they run its layers fastest.

        Stages of one degree are tried, with stages of a smaller degree on the remaining devices. Degrees with which the
        layers do not fit are chosen only if no degrees fit; then those that lack fewest layers are chosen.

        Args:
            kind: kind of the devices, an index into `Pools.kinds`.
            layers: layers that these stages have together.
        """
        pool = self._costs.pools.largest[kind]
        link = int(self._costs.cluster.link_class[pool.node, pool.node])
        best_value: tuple[int, float] | None = None  # missing layers, seconds
        best_degrees = (1,) * devices
        for degree, smaller, first_devices in _degrees(devices):
            blocks = cut_pool(pool, first_devices, degree) + cut_pool(pool, devices - first_devices, smaller)
            options = [
                self._costs.stage(block.kind, block.size, block.inner, self._size, pipelines) for block in blocks
            ]
            fitting = [option for option in options if option is not None]
            if len(fitting) < len(blocks):
                continue
            layers_that_fit = sum(option.max_layers(False, False, 1) for option in fitting)
            hop_s = self._costs.hop_s(link, blocks[0], blocks[0], self._size) if len(blocks) > 1 else 0.0
            # With layers by speed all stages take equally long, which is the period of the pipeline.
            period_s = layers / sum(1 / option.layer_s for option in fitting) + hop_s
            value = max(0, layers - layers_that_fit), (micro_batches - 1 + len(blocks)) * period_s
            if best_value is None or value < best_value:
                best_value, best_degrees = value, tuple(block.size for block in blocks)
        return best_degrees


def _chains(stage_choices: Iterable[Sequence[Blocks]], orders: Sequence[Sequence[int]]) -> Iterator[Blocks]:
    """Yield the stages of a pipeline for every choice of stages and every order of the groups, without repetition.

    Groups A and B with stages (a, b) and (c) give (a, b, c) and (c, a, b).

    Args:
        stage_choices: choices, each with the stages of every group.
        orders: orders of the groups, as indices.
    """
    chains: dict[Blocks, None] = {}
    for stages_by_group, order in itertools.product(stage_choices, orders):
        chain = itertools.chain.from_iterable(stages_by_group[group] for group in order)
        chains.setdefault(tuple(chain))
    yield from chains


def _degrees(devices: int) -> Iterator[tuple[int, int, int]]:
    """Yield (degree of the first stages, degree of the other stages, devices of the first stages together).

    The second degree is not larger than the first. Example: 3 devices give (1, 1, 1), (1, 1, 2), (1, 1, 3), (2, 1, 2),
    (2, 2, 2).
    """
    for degree, smaller in itertools.product(sizes_up_to(devices), repeat=2):
        if smaller <= degree:
            for stages in range(1, devices // degree + 1):
                yield degree, smaller, stages * degree


def paths(bandwidth_GG: Floats, tau: int = TAU, max_paths: int = MAX_PATHS) -> Iterator[tuple[int, ...]]:
    """Yield orders of the groups in which each group is among the ``tau`` with the fastest links to the one before.

    Args:
        bandwidth_GG: bandwidth between every two groups.
        max_paths: most paths, equally many from every first group.
    """
    count = len(bandwidth_GG)

    def continuations(path: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
        """Yield the complete paths that begin with ``path``."""
        if len(path) == count:
            yield path
            return
        unvisited = [group for group in range(count) if group not in path]
        unvisited.sort(key=lambda group: (-bandwidth_GG[path[-1], group], group))
        for group in unvisited[:tau]:
            yield from continuations((*path, group))

    for start in range(count):
        from_start = continuations((start,))
        for _ in range(max(1, max_paths // count)):
            path = next(from_start, None)
            if path is None:
                break
            yield path
