"""How many pipelines of which makeup: an integer programme over compositions of blocks, as a start and as a bound.

    for a time T:   max  sum_c samples_c(T) x_c     such that  sum_c use_ck x_c <= devices_k,   x_c whole and >= 0

A composition c is a multiset of block kinds, each a stage; samples_c(T) is what one pipeline of it trains within T. The
least T whose samples reach the global batch is found by bisection. Gradients are free in it, neighbours have the best
link that their kinds have anywhere, optimizer state is shared by as many pipelines as there are devices, and fractions
of pipelines are allowed: a bound for all plans of these compositions in this order of stages, by the closed form.

HiGHS solves it, through scipy. Dimension key: C compositions, K kinds of devices.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from ds_hetero.cost.stages.stage import Block, Pools, StageCosts
from ds_hetero.planner.outer.blocks import block_of, sizes_up_to
from ds_hetero.planner.outer.search.cuts import Cut, LayerCuts
from ds_hetero.planner.outer.search.evaluate import Shape

__all__ = ["Columns", "balance_bound_s"]

Floats = npt.NDArray[np.float64]

MAX_STAGES = 6
MAX_COMPOSITIONS = 1500
BISECTIONS = 24


class Columns:
    """The compositions of one cluster with the cuts of their pipelines.

    Args:
        costs: the cost model.
        micro_batch_size: samples of a micro-batch.
        max_stages: of a composition.
    """

    def __init__(self, costs: StageCosts, micro_batch_size: int = 1, max_stages: int = MAX_STAGES) -> None:
        self._costs, self._size = costs, micro_batch_size
        pools = costs.pools
        count = [sum(len(pool.ranks) for pool in pools.pools if pool.kind == k) for k in range(len(pools.kinds))]
        self._devices_K = np.array(count, dtype=np.float64)
        cuts = LayerCuts(costs)
        self.compositions: list[tuple[tuple[Block, ...], tuple[Cut, ...]]] = []
        for blocks in itertools.islice(_compositions(pools, count, max_stages), MAX_COMPOSITIONS):
            cut_options = cuts.of_links(blocks, _best_links(costs, blocks), micro_batch_size, costs.cluster.num_ranks)
            if cut_options:
                self.compositions.append((blocks, cut_options))
        self._use_KC = np.zeros((len(count), len(self.compositions)))
        for c, (blocks, _) in enumerate(self.compositions):
            for block in blocks:
                self._use_KC[block.kind, c] += block.size

    def samples(self, time_s: float) -> Floats:
        """What one pipeline of every composition trains within ``time_s``, ``[C]``."""
        return np.array(
            [
                self._size * max(int((time_s - cut.fill_s) / cut.period_s + 1 + 1e-9) for cut in cuts)
                for _, cuts in self.compositions
            ],
            dtype=np.float64,
        ).clip(min=0)

    def most(self, time_s: float, whole: bool = False) -> tuple[float, Floats]:
        """Return the most samples that all devices train within ``time_s``, and how many pipelines of each composition.

        Args:
            time_s: of a step.
            whole: no fractions of pipelines.
        """
        from scipy.optimize import Bounds, LinearConstraint, milp

        samples_C = self.samples(time_s)
        useful = samples_C > 0
        chosen_C = np.zeros(len(samples_C))
        if not useful.any():
            return 0.0, chosen_C
        solved = milp(
            -samples_C[useful],
            constraints=LinearConstraint(self._use_KC[:, useful], -np.inf, self._devices_K),
            integrality=np.full(int(useful.sum()), int(whole)),
            bounds=Bounds(0, np.inf),
            options={"mip_rel_gap": 1e-3, "time_limit": 2.0},
        )
        if solved.x is None:
            return 0.0, chosen_C
        chosen_C[useful] = solved.x
        return float(-solved.fun), chosen_C

    def bound_s(self, global_batch: int) -> float | None:
        """Return a step that no plan of these compositions undercuts; None if there is no composition.

        Args:
            global_batch: samples per step.
        """
        if not self.compositions:
            return None
        low, high = (
            0.0,
            min(cut.fill_s + global_batch / self._size * cut.period_s for _, c in self.compositions for cut in c),
        )
        for _ in range(BISECTIONS):
            middle = (low + high) / 2
            low, high = (low, middle) if self.most(middle)[0] >= global_batch - 1e-6 else (middle, high)
        return self._costs.step_s(low, 0.0, 0.0)

    def start(self, time_s: float) -> tuple[Shape, ...]:
        """Return the pipelines that train most within ``time_s``, on real nodes.

        Blocks that find no room on one node are left out; what is idle then is the search's to use.
        """
        _, chosen_C = self.most(time_s, whole=True)
        free = {(pool.kind, pool.node): len(pool.ranks) for pool in self._costs.pools.pools}
        shapes = []
        for c in np.flatnonzero(chosen_C > 0.5):
            for _ in range(round(float(chosen_C[c]))):
                placed: list[Block] = []
                for block in self.compositions[int(c)][0]:
                    nodes = [node for (kind, node), left in free.items() if kind == block.kind and left >= block.size]
                    if nodes:
                        near = next((node for node in nodes if placed and node == placed[-1].node), nodes[0])
                        free[block.kind, near] -= block.size
                        placed.append(block._replace(node=near))
                if placed:
                    shapes.append(Shape(tuple(placed), self._size))
        return tuple(shapes)


def _compositions(pools: Pools, devices: list[int], max_stages: int) -> Iterator[tuple[Block, ...]]:
    """Multisets of block kinds that the cluster has devices for, few stages first, fast blocks in front."""
    kinds = [block_of(pool, size) for pool in pools.largest for size in sizes_up_to(len(pool.ranks))]
    speed = {block: pools.kinds[block.kind].device.peak_flops_per_s * block.size for block in kinds}
    kinds.sort(key=lambda block: -speed[block])
    for stages in range(1, max_stages + 1):
        for blocks in itertools.combinations_with_replacement(kinds, stages):
            use = [0] * len(devices)
            for block in blocks:
                use[block.kind] += block.size
            if all(used <= there for used, there in zip(use, devices, strict=True)):
                yield blocks


def _best_links(costs: StageCosts, blocks: tuple[Block, ...]) -> tuple[int, ...]:
    """The fastest link class between nodes of neighbouring kinds."""
    cluster = costs.cluster
    nodes = {kind: [pool.node for pool in costs.pools.pools if pool.kind == kind] for kind in {b.kind for b in blocks}}
    known: dict[tuple[int, int], int] = {}
    for a, b in itertools.pairwise(blocks):
        if (a.kind, b.kind) not in known:
            pairs = np.ix_(nodes[a.kind], nodes[b.kind])
            fastest = int(cluster.node_p2p_s_per_byte[pairs].argmin())
            known[a.kind, b.kind] = int(cluster.link_class[pairs].ravel()[fastest])
    return tuple(known[a.kind, b.kind] for a, b in itertools.pairwise(blocks))


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
    return costs.step_s(global_batch * costs.model.num_layers / layers_per_s, 0.0, 0.0)
