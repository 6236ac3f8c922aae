"""Where the search begins: uniform grids, lanes through all nodes, and groups of nodes.

grid     tensor x pipeline x data of equal sizes over consecutive ranks, as Megatron-LM runs it (order tp-dp-pp),
with equal layers and equal micro-batches
lanes    every node gives 1 / d of its devices to each of d pipelines, which are alike
groups   whole nodes shared by d pipelines, longest processing time first, so that pipelines are equally fast

Plans of whatever origin, judged with the layers and micro-batches that they bring along.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from functools import cache
from math import inf
from typing import NamedTuple

from ds_hetero.cost.price import Objective
from ds_hetero.cost.stages.stage import NO_SYNC, DeviceBlock, PlacedPipeline, Pool, Pools, StageCosts
from ds_hetero.planner.pipeline_search.blocks import block_of, cut_pool, sizes_up_to
from ds_hetero.planner.pipeline_search.cuts import LayerCut, make_cut
from ds_hetero.planner.pipeline_search.evaluate import PlanCandidate, Shape, judge

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
    speed = {pool: pools.kinds[pool.kind].device.peak_flops_per_s * len(pool.ranks) for pool in used}
    balanced = cache(lambda count: _balanced(speed, count))
    blocks = cache(lambda pool, devices, size: tuple(cut_pool(pool, devices, size, inner)))
    lanes_of = [lanes for lanes in LANES if all(len(pool.ranks) % lanes == 0 for pool in used)]
    for sizes in _sizes_by_kind(pools, {pool.kind for pool in used}):
        for count in _counts(len(used)):
            for lanes in lanes_of:
                if count > MAX_GROUPS and lanes > 1:
                    continue
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
