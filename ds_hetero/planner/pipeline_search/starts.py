"""Where the search begins: uniform grids, lanes through all nodes, and groups of nodes.

grid     tensor x pipeline x data of equal sizes over consecutive ranks, as Megatron-LM runs it (order tp-dp-pp),
with equal layers and equal micro-batches
lanes    every node gives 1 / d of its devices to each of d pipelines, which are alike
groups   whole nodes shared by d pipelines, longest processing time first, so that pipelines are equally fast
degrees  groups whose pipelines each have the sizes of blocks that are best for them, for many devices

Plans of whatever origin, judged with the layers and micro-batches that they bring along.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from functools import cache, partial
from math import inf
from typing import NamedTuple

from ds_hetero.cost.price import Objective
from ds_hetero.cost.stages.stage import NO_SYNC, DeviceBlock, PlacedPipeline, Pool, Pools, StageCosts
from ds_hetero.planner.pipeline_search.blocks import block_of, cut_pool, sizes_up_to
from ds_hetero.planner.pipeline_search.cuts import TOLERANCE, LayerCut, make_cut
from ds_hetero.planner.pipeline_search.evaluate import PlanCandidate, Shape, Shapes, judge

MAX_SIZES = 256  # combinations of block sizes by kind
ALL_COUNTS = 16  # pipelines up to which every number is tried; powers of two above
LANES = (1, 2, 4, 8)
MAX_KINDS = 4  # of devices up to which every choice of them is tried
FEW_DEVICES = 64  # up to which blocks are dealt out one by one
MAX_GROUPS = 8  # of nodes, of which each has its own lanes

Pipelines = list[tuple[DeviceBlock, ...]]


def first_plans(pools: Pools, inner: str = "tensor") -> Iterator[Pipelines]:
    """Yield pipelines over all devices, and then over some kinds; ``inner`` is how blocks share their work."""
    kinds = range(len(pools.kinds))
    subsets = (
        [kinds]
        if len(kinds) > MAX_KINDS
        else [chosen for size in range(len(kinds), 0, -1) for chosen in itertools.combinations(kinds, size)]
    )
    for chosen in subsets:
        yield from _over(pools, [pool for pool in pools.pools if pool.kind in chosen], inner)


def _over(pools: Pools, used: Sequence[Pool], inner: str) -> Iterator[Pipelines]:
    """Groups and lanes of some pools."""
    speed = _speeds(pools, used)
    balanced = cache(lambda count: _balanced(speed, count))
    blocks = cache(lambda pool, devices, size: tuple(cut_pool(pool, devices, size, inner)))
    lanes_of = _lanes_of(used)
    for sizes in _sizes_by_kind(pools, {pool.kind for pool in used}):
        for count in _counts(len(used)):
            for lanes in lanes_of if count <= MAX_GROUPS else LANES[:1]:
                pipelines = [
                    tuple(
                        block
                        for pool in group
                        for block in blocks(
                            pool, len(pool.ranks) // lanes, min(sizes[pool.kind], len(pool.ranks) // lanes)
                        )
                    )
                    for group in balanced(count)
                ]
                if all(pipelines):
                    yield [pipeline for pipeline in pipelines for _ in range(lanes)]
        if sum(len(pool.ranks) for pool in used) <= FEW_DEVICES:
            yield from _dealt(
                pools, [block for pool in used for block in blocks(pool, len(pool.ranks), sizes[pool.kind])]
            )


def own_degrees(costs: StageCosts, samples: int, size: int, inner: str = "tensor") -> Iterator[Shapes]:
    """Yield pipelines over all devices, few first, of which each has block sizes of its own for every kind in it.

    The sizes are the fastest by a pipeline whose layers are cut anywhere: it takes ``(m - 1 + S) L / sum(1 / t)`` for m
    micro-batches, S stages and L layers of t seconds each. `first_plans` would have to try all of them together. The
    slowest stages come first, or those with most memory, where most micro-batches are in flight; the last has the head.

    Args:
        size: samples of a micro-batch.
    """
    kinds = costs.pools.kinds
    degrees = _Degrees(costs, inner)

    def slow_first(part: _Part) -> tuple[float, ...]:
        return kinds[part.pool.kind].device.peak_flops_per_s, part.pool.kind, part.pool.node

    def as_they_are(part: _Part) -> tuple[float, ...]:
        return part.pool.node, part.pool.kind

    def room_first(part: _Part) -> tuple[float, ...]:
        return -kinds[part.pool.kind].device.memory_bytes, *slow_first(part)

    def speed(parts: Sequence[_Part]) -> float:
        return sum(kinds[part.pool.kind].device.peak_flops_per_s * part.devices for part in parts)

    for (lanes, groups), key in itertools.product(_divisions(costs.pools), (slow_first, room_first, as_they_are)):
        pipelines, whole = lanes * len(groups), lanes * sum(map(speed, groups))
        made: list[Shape] = []
        for group in groups if samples >= size * pipelines else ():
            micro_batches = max(1, round(samples / size * speed(group) / whole))
            parts = sorted(group, key=key)
            chosen = degrees(parts, size, pipelines, micro_batches)
            if chosen is None:
                break
            blocks = (cut_pool(pool, number, chosen[pool.kind], inner) for pool, number in parts)
            made += [Shape(tuple(itertools.chain.from_iterable(blocks)), size)] * lanes
        if len(made) == pipelines:
            yield tuple(made)


class _Part(NamedTuple):
    """Devices of a pool."""

    pool: Pool
    devices: int  # of it


def _divisions(pools: Pools) -> Iterator[tuple[int, list[list[_Part]]]]:
    """All devices in groups, few first: every kind dealt out; whole pools, balanced or of like speed, and in lanes.

    With the lanes of every group come the devices of one of them.
    """
    speed, lanes_of = _speeds(pools, pools.pools), _lanes_of(pools.pools)
    for count in _counts(len(speed)):
        yield 1, _dealt_out(pools, count)
        for groups in (_balanced(speed, count), _by_speed(speed, count)) if count > 1 else ():
            for lanes in lanes_of if count <= MAX_GROUPS else LANES[:1]:
                yield lanes, [[_Part(pool, len(pool.ranks) // lanes) for pool in group] for group in groups]


def _dealt_out(pools: Pools, count: int) -> list[list[_Part]]:
    """The devices of every kind dealt out one by one over its nodes, so that equal stages are neighbours."""
    groups: list[list[_Part]] = [[] for _ in range(count)]
    before = [0] * len(pools.kinds)
    for pool in sorted(pools.pools, key=lambda pool: (pool.kind, pool.node)):
        for i, parts in enumerate(groups):
            devices = len(range((i - before[pool.kind]) % count, len(pool.ranks), count))
            if devices:
                parts.append(_Part(pool, devices))
        before[pool.kind] += len(pool.ranks)
    return [parts for parts in groups if parts]


class _Degrees:
    """Sizes of blocks by kind that are fastest for one pipeline alone, by `_period_s`."""

    def __init__(self, costs: StageCosts, inner: str) -> None:
        self._costs, self._inner = costs, inner
        self._stage = cache(self._stage_uncached)
        self._chosen = cache(self._chosen_uncached)

    def __call__(
        self, parts: Sequence[_Part], size: int, pipelines: int, micro_batches: int
    ) -> Mapping[int, int] | None:
        """Return the size of every kind's blocks; None if no sizes hold all layers. ``size``: of a micro-batch."""
        devices = tuple((part.pool.kind, part.devices) for part in parts)
        return self._chosen(devices, size, pipelines, micro_batches)

    def _chosen_uncached(
        self, devices: tuple[tuple[int, int], ...], size: int, pipelines: int, micro_batches: int
    ) -> Mapping[int, int] | None:
        """Of sizes alike for all kinds the fastest, and then kind by kind."""
        kinds = sorted({kind for kind, _ in devices})
        choices = sizes_up_to(max(number for _, number in devices))
        judge = partial(self._time_s, devices, size, pipelines, micro_batches)
        best = min((dict.fromkeys(kinds, choice) for choice in choices), key=judge)
        for kind in kinds if len(kinds) > 1 else ():
            best = min(({**best, kind: choice} for choice in choices), key=judge)
        return best if judge(best) < inf else None

    def _time_s(
        self,
        devices: tuple[tuple[int, int], ...],
        size: int,
        pipelines: int,
        micro_batches: int,
        chosen: Mapping[int, int],
    ) -> float:
        stages, rates = 0, list[tuple[float, float, int]]()
        for kind, number in devices:
            of_block = min(chosen[kind], 1 << (number.bit_length() - 1))
            layer_s, layers = self._stage(kind, of_block, size, pipelines)
            blocks = number // of_block
            rates.append((layer_s * layers, blocks / layer_s, blocks * layers))
            stages += blocks
        if stages > self._costs.model.num_layers:
            return inf
        return (micro_batches - 1 + stages) * _period_s(rates, self._costs.model.num_layers)

    def _stage_uncached(self, kind: int, devices: int, size: int, pipelines: int) -> tuple[float, int]:
        """Seconds of a layer, and layers that fit; none do where the block cannot run a stage."""
        inner = "one" if devices == 1 else self._inner
        option = self._costs.stage(kind, devices, inner, size, pipelines)
        return (1.0, 0) if option is None else (option.layer_s, option.max_layers(False, False, 1))


def _period_s(stages: list[tuple[float, float, int]], layers: int) -> float:
    """The least period of stages whose layers are cut anywhere, no stage with more than fit; infinite if none do.

    Args:
        stages: like ones together: period at which they are full, layers per second, layers that fit.
    """
    rate = sum(of_stages for _, of_stages, _ in stages)
    left = float(layers)
    for full_s, of_stages, room in sorted(stages):
        if left <= full_s * rate * (1 + TOLERANCE):
            return left / rate
        left -= room
        rate -= of_stages
    return inf


def _by_speed(speed: Mapping[Pool, float], count: int) -> list[list[Pool]]:
    """Pools in up to ``count`` groups of about equal speed, devices of like speed together."""
    pools = sorted(speed, key=lambda pool: (speed[pool] / len(pool.ranks), pool.kind, pool.node))
    share = count / sum(speed.values())
    groups: list[list[Pool]] = [[] for _ in range(count)]
    before = 0.0
    for pool in pools:
        groups[min(count - 1, int((before + speed[pool] / 2) * share))].append(pool)
        before += speed[pool]
    return [group for group in groups if group]


def _speeds(pools: Pools, used: Iterable[Pool]) -> dict[Pool, float]:
    """Peaks of all devices of every pool, FLOP/s."""
    return {pool: pools.kinds[pool.kind].device.peak_flops_per_s * len(pool.ranks) for pool in used}


def _lanes_of(pools: Sequence[Pool]) -> list[int]:
    """Numbers of pipelines that every pool can give equally many devices to."""
    return [lanes for lanes in LANES if all(len(pool.ranks) % lanes == 0 for pool in pools)]


def _dealt(pools: Pools, blocks: Sequence[DeviceBlock]) -> Iterator[Pipelines]:
    """Blocks dealt out to every number of pipelines, whatever their nodes."""
    speed = [pools.kinds[block.kind].device.peak_flops_per_s * block.size for block in blocks]
    for count in _counts(len(blocks)):
        groups = _lightest_first(speed, count)
        yield [tuple(sorted(blocks[i] for i in group)) for group in groups]


def _sizes_by_kind(pools: Pools, used: AbstractSet[int]) -> Iterator[tuple[int, ...]]:
    """Sizes of blocks by kind, 1 where a kind is not used; sizes that are alike for all kinds come first."""
    choices = [sizes_up_to(len(pool.ranks)) if kind in used else (1,) for kind, pool in enumerate(pools.largest)]
    ordered = sorted(itertools.islice(itertools.product(*choices), 4096), key=lambda sizes: max(sizes) / min(sizes))
    return iter(ordered[:MAX_SIZES])


def _counts(most: int) -> list[int]:
    return [count for count in range(1, most + 1) if count <= ALL_COUNTS or count & (count - 1) == 0]


def _balanced(speed: Mapping[Pool, float], count: int) -> list[list[Pool]]:
    """Pools in ``count`` groups of about equal speed; kinds stay together within a group."""
    pools = sorted(speed, key=lambda pool: (pool.node, pool.kind))
    groups = _lightest_first([speed[pool] for pool in pools], count)
    return [sorted((pools[i] for i in group), key=lambda pool: (pool.kind, pool.node)) for group in groups]


def _lightest_first(loads: Sequence[float], count: int) -> list[list[int]]:
    """Indices in ``count`` groups of about equal sums: the largest first, each to the group with the least."""
    heap = [(0.0, group) for group in range(count)]
    groups: list[list[int]] = [[] for _ in range(count)]
    for index in sorted(range(len(loads)), key=lambda index: (-loads[index], index)):
        least, group = heap[0]
        heapq.heapreplace(heap, (least + loads[index], group))
        groups[group].append(index)
    return groups


def uniform_grids(costs: StageCosts, samples: int, sizes: Sequence[int]) -> Iterator[tuple[str, list[PlacedPipeline]]]:
    """Yield every grid of equal pipelines over all devices, by name ``tp2 pp4 dp2 b1``.

    Tensor-parallel groups that span kinds or nodes are left out; so are grids that do not divide layers or batch.
    """
    pools, num_layers = costs.pools, costs.model.num_layers
    pool_of = {rank: pool for pool in pools.pools for rank in pool.ranks}
    num_ranks = costs.cluster.num_ranks
    for tensor in sizes_up_to(num_ranks):
        groups = [range(first, first + tensor) for first in range(0, num_ranks - tensor + 1, tensor)]
        if num_ranks % tensor or any(len({pool_of[rank] for rank in group}) > 1 for group in groups):
            continue
        blocks = [block_of(pool_of[group[0]], tensor) for group in groups]
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


class GivenLayers(NamedTuple):
    """A plan that fits, before its last word."""

    pipelines: tuple[PlacedPipeline, ...]  # with their layers and batches
    cuts: tuple[LayerCut, ...]  # the times that follow, by pipeline
    least_value: float  # what no judgement undercuts

    @classmethod
    def of(cls, costs: StageCosts, objective: Objective, pipelines: Sequence[PlacedPipeline]) -> GivenLayers | None:
        """Return the plan; None if it does not fit into memory."""
        cuts: dict[tuple[object, ...], LayerCut] = {}
        for pipeline in pipelines:
            key = pipeline.blocks, pipeline.layers, pipeline.micro_batch_size
            if key not in cuts:
                cut = make_cut(costs, *key, len(pipelines))
                if cut is None:
                    return None
                cuts[key] = cut
        chosen = tuple(cuts[pipeline.blocks, pipeline.layers, pipeline.micro_batch_size] for pipeline in pipelines)
        least_s = max(_least_s(cut, pipeline.micro_batches) for cut, pipeline in zip(chosen, pipelines, strict=True))
        rate = sum(block.total(objective.per_s) for pipeline in pipelines for block in pipeline.blocks)
        least_value = objective.value(costs.step_s(least_s, NO_SYNC, 0.0), rate, 0.0)
        return cls(tuple(pipelines), chosen, least_value)

    @property
    def num_actions(self) -> int:
        """Pairs of a forward and a backward that its last word looks at: pipelines of equal cuts are one."""
        most: dict[LayerCut, int] = {}
        for cut, pipeline in zip(self.cuts, self.pipelines, strict=True):
            most[cut] = max(pipeline.micro_batches, most.get(cut, 0))
        return sum(len(cut.layers) * number for cut, number in most.items())

    def judged(self, costs: StageCosts, objective: Objective) -> PlanCandidate | None:
        """Return the plan by the last word of the cost model; None where it takes longer than is acceptable."""
        shapes = [Shape(pipeline.blocks, pipeline.micro_batch_size) for pipeline in self.pipelines]
        numbers = [pipeline.micro_batches for pipeline in self.pipelines]
        candidate = judge(costs, objective, shapes, self.cuts, numbers)
        return candidate if candidate.value < inf else None


def _least_s(cut: LayerCut, micro_batches: int) -> float:
    """A pipeline's time with free hops, where some stage never waits between its first forward and last backward."""
    before, least = 0.0, 0.0
    for forward_s, backward_s in zip(cut.forward_s, cut.backward_s, strict=True):
        own = forward_s + backward_s
        least = max(least, before + micro_batches * own)
        before += own
    return least


def judge_layers(costs: StageCosts, objective: Objective, pipelines: Sequence[PlacedPipeline]) -> PlanCandidate | None:
    """Judge a plan with its own layers and micro-batches; None if it does not fit."""
    given = GivenLayers.of(costs, objective, pipelines)
    return None if given is None else given.judged(costs, objective)
