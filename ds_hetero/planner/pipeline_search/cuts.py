"""The layers of one pipeline, cut over its stages.

A stage takes l t + o seconds for l layers, so a period tau leaves it room for (tau - o) / t of them, and no more than
fit into its memory. For every period at which some stage gains a layer, layers go to the stages that are fastest per
layer, as far as they have room: the least sum under this period (HexiScale's Eq. 9, arXiv:2409.01143, is a sum and a
maximum). Where a law couples stages (round trips, barriers), single layers are then moved while that helps. What stays
are the cuts that no other one beats in fill, period and latency; which of them is best depends on the micro-batches.

Dimension key: C candidates, S stages.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ds_hetero.common.arrays import Floats, Ints
from ds_hetero.cost.stages.pipeline_time import PipelineTimes
from ds_hetero.cost.stages.stage import DeviceBlock, StageCosts, StageOption
from ds_hetero.planner.pipeline_search.block_times import hops_s, links_between, stage_options

HEAD_FORWARD = 1 / 3  # share of the forward in the time of embedding and head: one matmul of three
TOLERANCE = 1e-9  # of a period, for layers that just fit; less is rounding
# Chosen, never measured alone; `python -m benchmarks.pipelines_planner exact` compares plans with the optimum.
PERIODS = 96  # shortest periods that are all tried; of longer ones about as many
GIVERS, TAKERS = 6, 8  # stages between which single layers are moved
POLISHED = (4, 24, 128)  # micro-batches for which single layers are moved


@dataclass(frozen=True, slots=True)
class LayerCut:
    """Layers of every stage, and the time that follows: see `PipelineTimes`."""

    layers: tuple[int, ...]  # by stage
    fill_s: float  # what m micro-batches take besides m - 1 periods
    period_s: float  # between two micro-batches
    latency_s: float  # of a single micro-batch
    forward_s: tuple[float, ...]  # of a micro-batch, by stage
    backward_s: tuple[float, ...]  # likewise
    hop_s: tuple[float, ...]  # between neighbours, one direction

    def time_s(self, micro_batches: float) -> float:
        """Closed form for ``micro_batches`` micro-batches."""
        return max(self.fill_s + (micro_batches - 1) * self.period_s, self.latency_s)

    @property
    def times(self) -> tuple[tuple[float, ...], tuple[float, ...], tuple[float, ...]]:
        """Forwards and backwards of the stages, and hops."""
        return self.forward_s, self.backward_s, self.hop_s

    @property
    def overlap_s(self) -> float:
        """Backward of the first stage, under which gradients of the last micro-batch may travel."""
        return self.backward_s[0]


class LayerCuts:
    """The best cuts of pipelines; kept by what their blocks are, not by which."""

    def __init__(self, costs: StageCosts) -> None:
        self.costs = costs
        self.num_solved = 0
        self._by_blocks: dict[tuple[tuple[DeviceBlock, ...], int, int], tuple[LayerCut, ...]] = {}
        self._by_kinds: dict[tuple[object, ...], tuple[LayerCut, ...]] = {}

    def __call__(self, blocks: tuple[DeviceBlock, ...], micro_batch_size: int, pipelines: int) -> tuple[LayerCut, ...]:
        """The undominated cuts of blocks, first to last, shortest period first; none if the layers do not fit."""
        key = blocks, micro_batch_size, pipelines
        cuts = self._by_blocks.get(key)
        if cuts is None:
            links = links_between(self.costs, blocks)
            cuts = self._by_blocks[key] = self.of_links(blocks, links, micro_batch_size, pipelines)
        return cuts

    def keep(
        self, blocks: tuple[DeviceBlock, ...], micro_batch_size: int, pipelines: int, layers: tuple[int, ...]
    ) -> bool:
        """Take the layers, by stage, as the only cut of these blocks; False if they do not fit."""
        cut = make_cut(self.costs, blocks, layers, micro_batch_size, pipelines)
        if cut is not None:
            self._by_blocks[blocks, micro_batch_size, pipelines] = (cut,)
        return cut is not None

    def of_links(
        self, blocks: tuple[DeviceBlock, ...], links: tuple[int, ...], micro_batch_size: int, pipelines: int
    ) -> tuple[LayerCut, ...]:
        """Look cuts up by all that they depend on: kinds of blocks, links between them, and room for layers."""
        costs, num_layers, stages = self.costs, self.costs.model.num_layers, len(blocks)
        if stages > num_layers:
            return ()
        options = stage_options(costs, blocks, micro_batch_size, pipelines)
        if options is None:
            return ()
        room = tuple(
            min(num_layers, option.max_layers(j == 0, j == stages - 1, kept))
            for j, (option, kept) in enumerate(zip(options, costs.kept_by_default(stages), strict=True))
        )
        if min(room) < 1 or sum(room) < num_layers:
            return ()
        kinds = tuple((block.kind, block.size, block.inner, block.others) for block in blocks)
        key = kinds, tuple(costs.cluster.link_class_alike[link] for link in links), micro_batch_size, room
        if key not in self._by_kinds:
            self.num_solved += 1
            law = _Law(costs, options, hops_s(costs, blocks, links, micro_batch_size))
            self._by_kinds[key] = _solve(law, np.array(room), num_layers)
        return self._by_kinds[key]

    def best(
        self, blocks: tuple[DeviceBlock, ...], micro_batch_size: int, pipelines: int, micro_batches: float
    ) -> LayerCut | None:
        """Return the cut that is fastest for about so many micro-batches; None if none fits."""
        cuts = self(blocks, micro_batch_size, pipelines)
        if len(cuts) < 2:
            return cuts[0] if cuts else None
        return min(cuts, key=lambda cut: cut.time_s(micro_batches))


def make_cut(
    costs: StageCosts,
    blocks: tuple[DeviceBlock, ...],
    layers: tuple[int, ...],
    micro_batch_size: int,
    pipelines: int,
    *,
    fits: bool = True,
) -> LayerCut | None:
    """The cut with given layers; None if a block cannot run a stage or, where it has to fit, lacks memory."""
    options, stages = stage_options(costs, blocks, micro_batch_size, pipelines), len(blocks)
    if options is None:
        return None
    for j, (option, number, kept) in enumerate(zip(options, layers, costs.kept_by_default(stages), strict=True)):
        if fits and number > option.max_layers(j == 0, j == stages - 1, kept):
            return None
    law = _Law(costs, options, hops_s(costs, blocks, links_between(costs, blocks), micro_batch_size))
    return law.cuts(np.array([layers]))[0]


class _Law:
    """Time of one pipeline as a function of its layers."""

    def __init__(self, costs: StageCosts, options: list[StageOption], hop_s: Floats) -> None:
        last = len(options) - 1
        self._costs, self.hop_s = costs, hop_s
        self.layer_s = np.array([option.layer_s for option in options])
        extra_s = np.array([option.extra_s(j == 0, j == last) for j, option in enumerate(options)])
        self._forward_s = np.array([option.forward_s for option in options])
        self._backward_s = np.array([option.backward_s for option in options])
        self._extra_forward_s, self._extra_backward_s = extra_s * HEAD_FORWARD, extra_s * (1 - HEAD_FORWARD)
        self.offset_s = extra_s + (np.append(hop_s, 0.0) if costs.hop_in_step else 0.0)

    def passes_s(self, layers_CS: Ints) -> tuple[Floats, Floats]:
        """Forward and backward of every stage, ``[C, S]`` each."""
        forward = layers_CS * self._forward_s + self._extra_forward_s
        return forward, layers_CS * self._backward_s + self._extra_backward_s

    def __call__(self, layers_CS: Ints) -> PipelineTimes:
        """Times of these candidates."""
        return self._costs.pipeline_times(*self.passes_s(layers_CS), self.hop_s)

    def cuts(self, layers_CS: Ints) -> tuple[LayerCut, ...]:
        """Return the cuts with these layers."""
        hop_s = tuple(self.hop_s.tolist())
        columns = [part.tolist() for part in (layers_CS, *self(layers_CS), *self.passes_s(layers_CS))]
        return tuple(
            LayerCut(tuple(layers), fill, period, latency, tuple(forward), tuple(backward), hop_s)
            for layers, fill, period, latency, forward, backward in zip(*columns, strict=True)
        )


def _solve(law: _Law, room_S: Ints, num_layers: int) -> tuple[LayerCut, ...]:
    """Undominated cuts, shortest period first."""
    layers_CS = _undominated(law, _candidates(law, room_S, num_layers))
    if len(room_S) > 1:
        times = law(layers_CS)
        polished = [_polish(law, layers_CS[int(times.of(m).argmin())], room_S, m) for m in POLISHED]
        layers_CS = _undominated(law, np.concatenate([layers_CS, polished]))
    return law.cuts(layers_CS)


def _candidates(law: _Law, room_S: Ints, num_layers: int) -> Ints:
    """The cut of least sum under every period at which some stage gains a layer, ``[C, S]``."""
    every_l = np.arange(1, room_S.max() + 1)[:, None]
    steps = every_l * law.layer_s + law.offset_s
    periods_C = np.unique(steps[every_l <= room_S])
    fitting_CS = np.floor((periods_C[:, None] * (1 + TOLERANCE) - law.offset_s) / law.layer_s).astype(np.int64)
    fitting_CS = np.minimum(fitting_CS, room_S)
    fitting_CS = fitting_CS[(fitting_CS >= 1).all(axis=1) & (fitting_CS.sum(axis=1) >= num_layers)]
    fitting_CS = np.concatenate([fitting_CS[:PERIODS], fitting_CS[PERIODS :: 1 + len(fitting_CS) // PERIODS]])
    order = np.argsort(law.layer_s, kind="stable")
    more_CS = fitting_CS[:, order] - 1
    before_CS = more_CS.cumsum(axis=1) - more_CS
    taken_CS = np.clip(num_layers - len(room_S) - before_CS, 0, more_CS) + 1
    layers_CS: Ints = np.empty_like(taken_CS)
    layers_CS[:, order] = taken_CS
    return layers_CS


def _undominated(law: _Law, layers_CS: Ints) -> Ints:
    """Candidates that no other one beats in all of fill, period and latency, shortest period first."""
    times = law(layers_CS)
    order = np.lexsort((times.latency_s, times.fill_s, times.period_s))
    kept = np.zeros(len(order), dtype=bool)
    for each in (times.fill_s[order], times.latency_s[order]):
        kept |= each < np.concatenate([[np.inf], np.minimum.accumulate(each)[:-1]])
    return np.asarray(layers_CS[order[kept]])


def _polish(law: _Law, layers_S: Ints, room_S: Ints, micro_batches: int) -> Ints:
    """Move single layers between stages, in long pipelines from the busiest to the least busy, while time falls."""
    unit_SS, time_s = np.eye(len(layers_S), dtype=np.int64), np.inf
    while True:
        order = np.argsort(layers_S * law.layer_s + law.offset_s, kind="stable")
        moves = (unit_SS[order[:TAKERS], None] - unit_SS[order[-GIVERS:]]).reshape(-1, len(layers_S))
        tried = np.concatenate([layers_S[None], layers_S + moves])
        tried = tried[(tried >= 1).all(axis=1) & (tried <= room_S).all(axis=1)]
        time_C = law(tried).of(micro_batches)
        best = int(time_C.argmin())
        if time_C[best] >= time_s * (1 - TOLERANCE):
            return layers_S
        layers_S, time_s = np.asarray(tried[best]), float(time_C[best])
