"""Devices in balanced groups of least or most bandwidth between them: a multi-level graph partition.

HexiScale (arXiv:2409.01143), section 4.2: vertices are devices with their compute, edges are bandwidths.

    (i)    coarsen     heavy-edge matching merges pairs of vertices until few are left
    (ii)   partition   recursive bisection of the coarse graph; a half grows from a vertex along its heaviest edges
    (iii)  project     every vertex of the finer graph joins the group of the coarse one
    (iv)   refine      Kernighan-Lin exchanges between pairs of groups, after every projection

The objective is Eq. 2, the sum of bandwidths between groups, under a limit on the heaviest group over the average. To
maximize it instead, all edges change their sign. The paper leaves the size of the coarse graph, the limit of the
balance and the seeds open; those below are ours. Everything is deterministic, with ties to the lower index.

Dimension key: V vertices.

One group of devices turned into a pipeline: HexiScale's second phase (arXiv:2409.01143, section 4.3).

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

from ds_hetero.common.arrays import Bools, Floats, Ints
from ds_hetero.cost.stages.stage import DeviceBlock, Pool
from ds_hetero.planner.pipeline_search.blocks import block_of, cut_pool, sizes_up_to
from ds_hetero.planner.pipeline_search.cuts import LayerCuts
from ds_hetero.planner.pipeline_search.evaluate import Shape

BALANCE = 1.1  # heaviest group over the average, where the vertices allow it
COARSEST = 8  # vertices per group at which coarsening ends
SEEDS = 8  # vertices from which a half may grow
PATIENCE = 32  # exchanges without a better cut after which a pass of Kernighan-Lin ends
LEAST_EDGE_GAIN = 1e-9  # of the largest edge


def partition(weight_V: Floats, bandwidth_VV: Floats, parts: int, *, maximize: bool = False) -> list[list[int]]:
    """Return the vertices of every group, each group and its vertices ascending.

    Args:
        bandwidth_VV: between devices, symmetric; the diagonal is ignored.
        parts: groups, at most as many as vertices.
        maximize: give the links between groups as much bandwidth as possible, not as little.
    """
    edge_VV = -bandwidth_VV if maximize else bandwidth_VV.copy()
    np.fill_diagonal(edge_VV, 0.0)
    limit = BALANCE * weight_V.sum() / parts
    levels: list[tuple[Floats, Floats, Ints]] = []
    weight, edge = weight_V, edge_VV
    while len(weight) > COARSEST * parts:
        coarse_V = _heavy_edge_matching(weight, edge, limit)
        if coarse_V.max() + 1 > 0.9 * len(weight):
            break
        levels.append((weight, edge, coarse_V))
        weight, edge = _contract(weight, edge, coarse_V)
    group = np.zeros(len(weight), dtype=np.int64)
    _bisect(weight, edge, np.arange(len(weight)), parts, 0, group)
    _refine(weight, edge, group, parts, limit)
    for weight, edge, coarse_V in reversed(levels):
        group = group[coarse_V]
        _refine(weight, edge, group, parts, limit)
    return sorted(np.flatnonzero(group == part).tolist() for part in range(parts))


def bandwidth_between(groups: Sequence[Sequence[int]], bandwidth_VV: Floats) -> Floats:
    """Return the fastest link between every pair of groups; 0 within one."""
    between = np.zeros((len(groups), len(groups)))
    for i, a in enumerate(groups):
        for j, b in enumerate(groups[:i]):
            between[i, j] = between[j, i] = bandwidth_VV[np.ix_(a, b)].max()
    return between


def _heavy_edge_matching(weight_V: Floats, edge_VV: Floats, limit: float) -> Ints:
    """Pair every vertex with the free one behind its heaviest edge; the number of the coarse vertex of each."""
    free_V = np.ones(len(weight_V), dtype=bool)
    coarse_V = np.zeros(len(weight_V), dtype=np.int64)
    count = 0
    for vertex in range(len(weight_V)):
        if not free_V[vertex]:
            continue
        free_V[vertex] = False
        partners_V = free_V & (weight_V + weight_V[vertex] <= limit)
        coarse_V[vertex] = count
        if partners_V.any():
            partner = int(np.where(partners_V, edge_VV[vertex], -np.inf).argmax())
            free_V[partner], coarse_V[partner] = False, count
        count += 1
    return coarse_V


def _contract(weight_V: Floats, edge_VV: Floats, coarse_V: Ints) -> tuple[Floats, Floats]:
    """Weights and edges of the coarse graph: sums over the vertices that were merged."""
    order = np.argsort(coarse_V, kind="stable")
    starts = np.flatnonzero(np.diff(coarse_V[order], prepend=-1))
    weight = np.add.reduceat(weight_V[order], starts)
    edge = np.add.reduceat(np.add.reduceat(edge_VV[np.ix_(order, order)], starts, axis=0), starts, axis=1)
    np.fill_diagonal(edge, 0.0)
    return weight, edge


def _bisect(weight_V: Floats, edge_VV: Floats, vertices: Ints, parts: int, first: int, group_V: Ints) -> None:
    """Number the groups of ``vertices`` from ``first`` on, by halving them again and again."""
    if parts == 1:
        group_V[vertices] = first
        return
    left = (parts + 1) // 2
    weight, edge = weight_V[vertices], edge_VV[np.ix_(vertices, vertices)]
    share = left / parts
    limits = BALANCE * weight.sum() * share, BALANCE * weight.sum() * (1 - share)
    best: tuple[float, Ints] | None = None
    for seed in sorted(set(np.linspace(0, len(vertices) - 1, SEEDS).astype(int).tolist())):
        side = _grown(weight, edge, seed, share, (left, parts - left))
        _Exchange(weight, edge, side, (0, 1), limits, (left, parts - left)).run(side)
        cut = float(edge[np.ix_(side == 0, side == 1)].sum())
        if best is None or cut < best[0]:
            best = cut, side
    assert best is not None
    _bisect(weight_V, edge_VV, vertices[best[1] == 0], left, first, group_V)
    _bisect(weight_V, edge_VV, vertices[best[1] == 1], parts - left, first + left, group_V)


def _grown(weight_V: Floats, edge_VV: Floats, seed: int, share: float, least: tuple[int, int]) -> Ints:
    """Side 0 grown from a vertex along the heaviest edges, until it weighs its share; both keep ``least`` vertices."""
    side_V = np.ones(len(weight_V), dtype=np.int64)
    side_V[seed] = 0
    weight, target, pull_V = weight_V[seed], share * weight_V.sum(), edge_VV[seed].copy()
    for count in range(1, len(weight_V) - least[1]):
        vertex = int(np.where(side_V == 1, pull_V, -np.inf).argmax())
        if count >= least[0] and weight + weight_V[vertex] / 2 > target:
            break
        side_V[vertex] = 0
        weight += weight_V[vertex]
        pull_V += edge_VV[vertex]
    return side_V


def _refine(weight_V: Floats, edge_VV: Floats, group_V: Ints, parts: int, limit: float) -> None:
    """One pass of Kernighan-Lin over every pair of groups."""
    for a in range(parts):
        for b in range(a + 1, parts):
            _Exchange(weight_V, edge_VV, group_V, (a, b), (limit, limit), (1, 1)).run(group_V)


class _Exchange:
    """Exchanges vertices of two groups as Kernighan and Lin do (1970), and keeps the best prefix of the exchanges.

    Every step exchanges the pair of vertices that have not moved yet with the greatest gain, even a negative one. Each
    side has empty places as well, and an exchange with one of them moves a vertex alone. Groups above their limit
    become lighter first, whatever that costs.

    Args:
        limits: greatest weight of either.
        least: vertices that either keeps.
    """

    def __init__(
        self,
        weight_V: Floats,
        edge_VV: Floats,
        group_V: Ints,
        pair: tuple[int, int],
        limits: tuple[float, float],
        least: tuple[int, int],
    ) -> None:
        sides = [np.flatnonzero(group_V == group) for group in pair]
        self._places = max(map(len, sides)) + 1
        pads = [np.pad(side, (0, self._places - len(side)), constant_values=-1) for side in sides]
        self._numbers = np.concatenate(pads)
        self._real = self._numbers >= 0
        self._weight = np.where(self._real, weight_V[self._numbers], 0.0)
        both = self._real[:, None] & self._real
        self._edge = np.where(both, edge_VV[np.ix_(self._numbers, self._numbers)], 0.0)
        self._pair, self._limits, self._least = pair, limits, least

    def run(self, group_V: Ints) -> None:
        """Make the exchanges in ``group_V``."""
        a, b = slice(0, self._places), slice(self._places, None)
        toward = self._edge[:, b].sum(axis=1) - self._edge[:, a].sum(axis=1)
        gain = np.concatenate([toward[a], -toward[b]])  # of moving a vertex to the other side
        heavy = self._weight[a].sum(), self._weight[b].sum()
        count = int(self._real[a].sum()), int(self._real[b].sum())
        free = np.ones(len(gain), dtype=bool)
        total, taken, kept = 0.0, list[tuple[int, int]](), 0
        worth = LEAST_EDGE_GAIN * float(np.abs(self._edge).max(initial=0.0))
        best = self._excess(*heavy), -worth
        while len(taken) - kept < PATIENCE:
            allowed, shift, moved = self._allowed(heavy, count, free)
            if not allowed.any():
                break
            gains = np.where(allowed, gain[a][:, None] + gain[b] - 2 * self._edge[a, b], -np.inf)
            i, j = divmod(int(gains.argmax()), self._places)
            total += gains[i, j]
            taken.append((i, j))
            heavy = heavy[0] + shift[i, j], heavy[1] - shift[i, j]
            count = count[0] + int(moved[i, j]), count[1] - int(moved[i, j])
            free[[i, self._places + j]] = False
            change = 2 * (self._edge[:, i] - self._edge[:, self._places + j])
            gain += np.concatenate([change[a], -change[b]])
            if (self._excess(*heavy), -total) < best:
                best, kept = (self._excess(*heavy), -total), len(taken)
        for i, j in taken[:kept]:
            for place, group in ((i, self._pair[1]), (self._places + j, self._pair[0])):
                if self._real[place]:
                    group_V[self._numbers[place]] = group

    def _excess(self, first: float, second: float) -> float:
        """By how much the heavier side is above its limit."""
        return max(0.0, first - self._limits[0], second - self._limits[1])

    def _allowed(self, heavy: tuple[float, float], count: tuple[int, int], free: Bools) -> tuple[Bools, Floats, Ints]:
        """Exchanges that may be made, and by how much weight and how many vertices the first side grows in each."""
        a, b = slice(0, self._places), slice(self._places, None)
        shift = self._weight[b] - self._weight[a][:, None]
        moved = self._real[b].astype(np.int64) - self._real[a][:, None]
        allowed = free[a][:, None] & free[b] & (self._real[a][:, None] | self._real[b])
        allowed &= (count[0] + moved >= self._least[0]) & (count[1] - moved >= self._least[1])
        over = np.maximum(heavy[0] + shift - self._limits[0], heavy[1] - shift - self._limits[1])
        excess = self._excess(*heavy)
        lighter = allowed & (over < excess)
        return lighter if excess > 0 and lighter.any() else allowed & (over <= excess), shift, moved


TAU = 3  # fastest neighbours that a path may go on to
MAX_PATHS = 128  # that are simulated


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
