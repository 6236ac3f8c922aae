"""Blocks of devices: their sizes, what they take, the links between them, idle devices, and the ranks that they get.

Schedules of stages on unlike devices: tokens and heads by speed, from the search of schedules.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import pairwise

import numpy as np

from ds_hetero.cluster.topology import Cluster
from ds_hetero.common.arrays import Floats
from ds_hetero.cost.calibrated import CalibratedCostModel
from ds_hetero.cost.stages.stage import DeviceBlock, Pool, Pools, StageCosts, StageOption
from ds_hetero.planner.search.budget import EvaluationBudget
from ds_hetero.planner.search.canonical import make_problem, schedule_of
from ds_hetero.planner.search.search import search
from ds_hetero.values.schedule import Schedule

MAX_SIZE = 8  # devices of a block


def sizes_up_to(devices: int, max_size: int = MAX_SIZE) -> tuple[int, ...]:
    """Return the powers of two that fit, ascending."""
    return tuple(1 << power for power in range(min(devices, max_size).bit_length()))


def block_of(pool: Pool, size: int, inner: str = "tensor") -> DeviceBlock:
    """Return a block of a pool; a single device needs no inner parallelism."""
    return DeviceBlock(pool.kind, pool.node, size, "one" if size == 1 else inner)


def cut_pool(pool: Pool, devices: int, size: int, inner: str = "tensor") -> list[DeviceBlock]:
    """Cut ``devices`` devices of a pool into blocks of ``size``, and the rest into smaller powers of two."""
    blocks = []
    while devices:
        taken = size if devices >= size else 1 << (devices.bit_length() - 1)
        blocks.append(block_of(pool, taken, inner))
        devices -= taken
    return blocks


def idle_devices(pools: Pools, pipelines: Iterable[Sequence[DeviceBlock]]) -> list[int]:
    """Return the devices without work, by pool."""
    used: Counter[tuple[int, int]] = Counter()
    for blocks in pipelines:
        for block in blocks:
            for part in block.parts:
                used[part.kind, part.node] += part.size
    return [len(pool.ranks) - used[pool.kind, pool.node] for pool in pools.pools]


def ranks_of_blocks(pools: Pools, pipelines: Sequence[Sequence[DeviceBlock]]) -> list[list[tuple[int, ...]]]:
    """Ranks of every block, part by part, by pipeline: large blocks are given theirs first, neighbours together."""
    places = [(i, j) for i, blocks in enumerate(pipelines) for j in range(len(blocks))]
    free = {(pool.kind, pool.node): list(pool.ranks) for pool in pools.pools}
    ranks: list[list[tuple[int, ...]]] = [[()] * len(blocks) for blocks in pipelines]
    for i, j in sorted(places, key=lambda place: (-pipelines[place[0]][place[1]].size, place)):
        for part in pipelines[i][j].parts:
            pool = free[part.kind, part.node]
            ranks[i][j] += tuple(pool[: part.size])
            del pool[: part.size]
    return ranks


def _are_consecutive(ranks: Iterable[int]) -> bool:
    """Whether ranks follow one another without a gap, as those of a schedule must."""
    ascending = sorted(ranks)
    return ascending[-1] - ascending[0] == len(ascending) - 1


def can_be_placed(pools: Pools, pipelines: Sequence[Sequence[DeviceBlock]]) -> bool:
    """Whether every stage that shares sequences gets consecutive ranks."""
    of_blocks = zip(pipelines, ranks_of_blocks(pools, pipelines), strict=True)
    pairs = [pair for blocks, ranks in of_blocks for pair in zip(blocks, ranks, strict=True)]
    return all(_are_consecutive(ranks) for block, ranks in pairs if block.inner == "sequence")


def stage_options(
    costs: StageCosts, blocks: tuple[DeviceBlock, ...], micro_batch_size: int, pipelines: int
) -> list[StageOption] | None:
    """Times of the stages of a pipeline; None if some block cannot run one."""
    options = []
    for block in blocks:
        option = costs.of_block(block, micro_batch_size, pipelines)
        if option is None:
            return None
        options.append(option)
    return options


def links_between(costs: StageCosts, blocks: tuple[DeviceBlock, ...]) -> tuple[int, ...]:
    """Class of the link between neighbouring stages, ``[S - 1]``; of several links the slowest."""
    return tuple(_link_between(costs, a, b) for a, b in pairwise(blocks))


def _link_between(costs: StageCosts, a: DeviceBlock, b: DeviceBlock) -> int:
    cluster = costs.cluster
    if not (a.others or b.others):
        return int(cluster.link_class[a.node, b.node])
    classes = {int(cluster.link_class[mine.node, theirs.node]) for mine in a.parts for theirs in b.parts}
    return min(classes, key=lambda each: cluster.link_classes[each].bytes_per_s)


def hops_s(costs: StageCosts, blocks: tuple[DeviceBlock, ...], links: tuple[int, ...], micro_batch_size: int) -> Floats:
    """Hops between neighbouring stages, ``[S - 1]``."""
    neighbours = zip(links, blocks, blocks[1:], strict=False)
    return np.array([costs.hop_s(link, a, b, micro_batch_size) for link, a, b in neighbours], dtype=np.float64)


SHARE = 4  # of the budget that a search of schedules has; a stage is one of many


class ScheduleFinder:
    """Finds schedules for the layers of one model and one length of sequences, each once."""

    def __init__(self) -> None:
        self._found: dict[Cluster, Schedule | None] = {}

    def __call__(self, cost: CalibratedCostModel) -> Schedule | None:
        """Return the fastest schedule of a few devices; None if nothing fits. ``cost``: of one layer on them."""
        if cost.cluster not in self._found:
            problem, rank_of = make_problem(cost)
            found = search(problem, EvaluationBudget.for_ranks(problem.num_ranks).split(SHARE))
            self._found[cost.cluster] = schedule_of(problem, found[0], rank_of) if found else None
        return self._found[cost.cluster]
