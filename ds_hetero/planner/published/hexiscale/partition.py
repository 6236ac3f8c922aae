"""Devices in balanced groups of least or most bandwidth between them: a multi-level graph partition.

Vertices are devices with their compute, edges are bandwidths (HexiScale, arXiv:2409.01143, section 4.2).

    (i)    coarsen     heavy-edge matching merges pairs of vertices until few are left
    (ii)   partition   recursive bisection of the coarse graph; a half grows from a vertex along its heaviest edges
    (iii)  project     every vertex of the finer graph joins the group of the coarse one
    (iv)   refine      Kernighan-Lin exchanges between pairs of groups, after every projection

The objective is Eq. 2, the sum of bandwidths between groups, under a limit on the heaviest group over the average. To
maximize it instead, all edges change their sign. The paper leaves the size of the coarse graph, the limit of the
balance and the seeds open; those below are ours. Everything is deterministic, with ties to the lower index.

Dimension key: V vertices.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ds_hetero.common.arrays import Bools, Floats, Ints

# Left open by the paper: chosen, never measured alone. `python -m benchmarks.reproduce.hexiscale` compares the whole
# with print.
BALANCE = 1.1  # heaviest group over the average, where the vertices allow it
COARSEST = 8  # vertices per group at which coarsening ends
SEEDS = 8  # vertices from which a half may grow
PATIENCE = 32  # exchanges without a better cut after which a pass of Kernighan-Lin ends
LEAST_EDGE_GAIN = 1e-9  # of the largest edge; less is rounding


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
        """Excess of the heavier side over its limit."""
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
