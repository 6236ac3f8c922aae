"""Divide devices into balanced groups with least, or most, bandwidth between them: a multi-level graph partition.

Vertices are devices weighted by compute, edges are bandwidths (HexiScale, arXiv:2409.01143, section 4.2).

    (i)    coarsen     heavy-edge matching merges pairs of vertices until few are left
    (ii)   partition   recursive bisection of the coarse graph; a half grows from a vertex along the heaviest edges
    (iii)  project     every vertex of the finer graph joins the group of the coarse one
    (iv)   refine      Kernighan-Lin exchanges between pairs of groups, after every projection

The objective is Eq. 2, the sum of bandwidths between groups; the ratio of the heaviest group's weight to the average is
limited. To maximize the objective, all edges change their sign. The paper does not give the size of the coarse graph,
the limit and the seeds; the values below are ours. The result is deterministic; ties go to the lower index.

Dimension key: V vertices.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ds_hetero.common.arrays import Bools, Floats, Ints

# Left open by the paper: chosen, never measured alone. `python -m benchmarks.reproduce.hexiscale` compares plans with
# the printed ones.
BALANCE = 1.1  # largest weight of a group, as a multiple of the average, if the vertices allow it
COARSEST = 8  # vertices per group at which coarsening ends
SEEDS = 8  # number of vertices from which a half is grown, to choose the best half
PATIENCE = 32  # exchanges without a better cut after which a pass of Kernighan-Lin ends
LEAST_EDGE_GAIN = 1e-9  # least gain of an exchange, relative to the largest edge; less is rounding


def partition(weight_V: Floats, bandwidth_VV: Floats, parts: int, *, maximize: bool = False) -> list[list[int]]:
    """Return the vertices of every group, each group and its vertices ascending.

    Args:
        weight_V: compute of the devices.
        bandwidth_VV: bandwidth between devices, symmetric; the diagonal is ignored.
        parts: number of groups, at most the number of vertices.
        maximize: whether bandwidth between groups is maximized, and not minimized.
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
    """Return the bandwidth of the fastest link between every two groups, ``[groups, groups]``; the diagonal is 0."""
    between = np.zeros((len(groups), len(groups)))
    for i, a in enumerate(groups):
        for j, b in enumerate(groups[:i]):
            between[i, j] = between[j, i] = bandwidth_VV[np.ix_(a, b)].max()
    return between


def _heavy_edge_matching(weight_V: Floats, edge_VV: Floats, limit: float) -> Ints:
    """Pair every vertex with an unpaired one over its heaviest edge; return the coarse vertex of every vertex."""
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
    """Return weights and edges of the coarse graph: sums over the vertices that are merged.

    Args:
        coarse_V: coarse vertex of every vertex.
    """
    order = np.argsort(coarse_V, kind="stable")
    starts = np.flatnonzero(np.diff(coarse_V[order], prepend=-1))
    weight = np.add.reduceat(weight_V[order], starts)
    edge = np.add.reduceat(np.add.reduceat(edge_VV[np.ix_(order, order)], starts, axis=0), starts, axis=1)
    np.fill_diagonal(edge, 0.0)
    return weight, edge


def _bisect(weight_V: Floats, edge_VV: Floats, vertices: Ints, parts: int, first: int, group_V: Ints) -> None:
    """Divide ``vertices`` into groups numbered from ``first`` on, by recursive bisection; write them to ``group_V``."""
    if parts == 1:
        group_V[vertices] = first
        return
    left_parts = (parts + 1) // 2
    right_parts = parts - left_parts
    weight, edge = weight_V[vertices], edge_VV[np.ix_(vertices, vertices)]
    share = left_parts / parts
    limits = BALANCE * weight.sum() * share, BALANCE * weight.sum() * (1 - share)
    best_cut, best_side = np.inf, None
    for seed in sorted(set(np.linspace(0, len(vertices) - 1, SEEDS).astype(int).tolist())):
        side = _grow(weight, edge, seed, share, (left_parts, right_parts))
        _Exchange(weight, edge, side, (0, 1), limits, (left_parts, right_parts)).run(side)
        cut = float(edge[np.ix_(side == 0, side == 1)].sum())
        if best_side is None or cut < best_cut:
            best_cut, best_side = cut, side
    assert best_side is not None
    _bisect(weight_V, edge_VV, vertices[best_side == 0], left_parts, first, group_V)
    _bisect(weight_V, edge_VV, vertices[best_side == 1], right_parts, first + left_parts, group_V)


def _grow(weight_V: Floats, edge_VV: Floats, seed: int, share: float, least: tuple[int, int]) -> Ints:
    """Grow side 0 from vertex ``seed`` along the heaviest edges until it has its share of the weight.

    Args:
        share: share of the weight that side 0 should have.
        least: fewest vertices of side 0 and of side 1.

    Returns:
        The side of every vertex, 0 or 1.
    """
    side_V = np.ones(len(weight_V), dtype=np.int64)
    side_V[seed] = 0
    weight, target_weight = weight_V[seed], share * weight_V.sum()
    edge_to_side_0_V = edge_VV[seed].copy()  # sum of a vertex's edges to side 0
    for num_vertices in range(1, len(weight_V) - least[1]):
        vertex = int(np.where(side_V == 1, edge_to_side_0_V, -np.inf).argmax())
        if num_vertices >= least[0] and weight + weight_V[vertex] / 2 > target_weight:
            break
        side_V[vertex] = 0
        weight += weight_V[vertex]
        edge_to_side_0_V += edge_VV[vertex]
    return side_V


def _refine(weight_V: Floats, edge_VV: Floats, group_V: Ints, parts: int, limit: float) -> None:
    """Run one pass of Kernighan-Lin over every pair of groups."""
    for a in range(parts):
        for b in range(a + 1, parts):
            _Exchange(weight_V, edge_VV, group_V, (a, b), (limit, limit), (1, 1)).run(group_V)


class _Exchange:
    """Exchanges vertices of two groups as Kernighan and Lin do (1970), and keeps the best prefix of the exchanges.

    Every step exchanges the pair of vertices with the largest gain, even if it is negative; a vertex moves only once.
    Each side also has empty places, and an exchange with an empty place moves a single vertex. While a group is above
    its limit, exchanges that make it lighter come first, whatever their gain.

    Both sides have P places; place P + j is place j of the second side. Example: groups {4, 7} and {9} have P = 3, and
    the vertices at the places are 4, 7, empty, 9, empty, empty.

    Args:
        pair: the two groups.
        limits: largest weight of the first and of the second group.
        least: fewest vertices of the first and of the second group.
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
        self._num_places = max(map(len, sides)) + 1  # P
        padded = [np.pad(side, (0, self._num_places - len(side)), constant_values=-1) for side in sides]
        self._vertex = np.concatenate(padded)  # vertex at every place; -1 at empty places
        self._is_vertex = self._vertex >= 0
        self._weight = np.where(self._is_vertex, weight_V[self._vertex], 0.0)
        are_vertices = self._is_vertex[:, None] & self._is_vertex
        self._edge = np.where(are_vertices, edge_VV[np.ix_(self._vertex, self._vertex)], 0.0)
        self._pair, self._limits, self._least = pair, limits, least

    def run(self, group_V: Ints) -> None:
        """Exchange vertices, and write the result to ``group_V``."""
        a, b = slice(0, self._num_places), slice(self._num_places, None)  # places of the first and the second side
        # Edges to the second side less edges to the first: for a vertex of the first side, the gain of moving it.
        difference = self._edge[:, b].sum(axis=1) - self._edge[:, a].sum(axis=1)
        move_gain = np.concatenate([difference[a], -difference[b]])
        side_weights = self._weight[a].sum(), self._weight[b].sum()
        num_vertices = int(self._is_vertex[a].sum()), int(self._is_vertex[b].sum())
        is_free = np.ones(len(move_gain), dtype=bool)  # places that have taken part in no exchange
        total_gain, exchanges, num_best = 0.0, list[tuple[int, int]](), 0
        least_gain = LEAST_EDGE_GAIN * float(np.abs(self._edge).max(initial=0.0))
        best = self._excess(*side_weights), -least_gain
        while len(exchanges) - num_best < PATIENCE:
            allowed, weight_shift, vertex_shift = self._allowed(side_weights, num_vertices, is_free)
            if not allowed.any():
                break
            # The edge between both vertices stays between the sides, but counts as gained by both moves.
            gains = np.where(allowed, move_gain[a][:, None] + move_gain[b] - 2 * self._edge[a, b], -np.inf)
            i, j = divmod(int(gains.argmax()), self._num_places)
            total_gain += gains[i, j]
            exchanges.append((i, j))
            side_weights = side_weights[0] + weight_shift[i, j], side_weights[1] - weight_shift[i, j]
            num_vertices = num_vertices[0] + int(vertex_shift[i, j]), num_vertices[1] - int(vertex_shift[i, j])
            is_free[[i, self._num_places + j]] = False
            change = 2 * (self._edge[:, i] - self._edge[:, self._num_places + j])
            move_gain += np.concatenate([change[a], -change[b]])
            if (self._excess(*side_weights), -total_gain) < best:
                best, num_best = (self._excess(*side_weights), -total_gain), len(exchanges)
        for i, j in exchanges[:num_best]:
            for place, group in ((i, self._pair[1]), (self._num_places + j, self._pair[0])):
                if self._is_vertex[place]:
                    group_V[self._vertex[place]] = group

    def _excess(self, first_weight: float, second_weight: float) -> float:
        """Return the weight by which a side exceeds its limit, the larger one of both; 0 if no side does."""
        return max(0.0, first_weight - self._limits[0], second_weight - self._limits[1])

    def _allowed(
        self, side_weights: tuple[float, float], num_vertices: tuple[int, int], is_free: Bools
    ) -> tuple[Bools, Floats, Ints]:
        """Return for every exchange whether it is allowed, and the weight and vertices that the first side gains.

        The three results are ``[P, P]``, by place of the first and of the second side.
        """
        a, b = slice(0, self._num_places), slice(self._num_places, None)
        weight_shift = self._weight[b] - self._weight[a][:, None]
        vertex_shift = self._is_vertex[b].astype(np.int64) - self._is_vertex[a][:, None]
        allowed = is_free[a][:, None] & is_free[b] & (self._is_vertex[a][:, None] | self._is_vertex[b])
        allowed &= num_vertices[0] + vertex_shift >= self._least[0]
        allowed &= num_vertices[1] - vertex_shift >= self._least[1]
        first_excess = side_weights[0] + weight_shift - self._limits[0]
        second_excess = side_weights[1] - weight_shift - self._limits[1]
        new_excess = np.maximum(first_excess, second_excess)
        excess = self._excess(*side_weights)
        is_lighter = allowed & (new_excess < excess)
        if excess > 0 and is_lighter.any():
            return is_lighter, weight_shift, vertex_shift
        return allowed & (new_excess <= excess), weight_shift, vertex_shift
