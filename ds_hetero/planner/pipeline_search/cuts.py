"""Cut the layers of one pipeline over its stages.

A stage with l layers takes l t + o seconds for a micro-batch: t per layer, and o for embedding, head and messages.
Within a period of tau seconds it has time for (tau - o) / t layers, and it holds no more than fit into its memory. The
solver works in three steps:

1. For every period at which some stage gains a layer, the layers go to the stages that are fastest per layer, as far
   as these have time and memory. Under this period no cut has a smaller sum of stage times. (The time of a pipeline in
   HexiScale's Eq. 9, arXiv:2409.01143, is such a sum and a maximum.) Example: 5 layers, stages of 1 and 2 s per layer,
   period 4 s: they have time for 4 and 2 layers, the cut is 4 and 1. With a period of 3 s it is not possible.
2. From the best of these cuts single layers are moved while that helps: step 1 does not know that stages wait for each
   other (round trips over slow links).
3. A cut stays if no other cut is better in all of fill, period and latency. The number of micro-batches decides which
   of the remaining cuts is best, see `LayerCuts.best`.

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
TOLERANCE = 1e-9  # relative error of a time; layers that take longer by less still fit into a period
# Chosen, never measured alone; `python -m benchmarks.pipelines_planner exact` compares plans with the optimum.
PERIODS = 96  # number of shortest periods that are all tried; of the longer ones about as many, evenly spaced
MAX_GIVERS, MAX_TAKERS = 6, 8  # most stages that give, and that take, single layers
POLISHED_FOR = (4, 24, 128)  # numbers of micro-batches for which single layers are moved


@dataclass(frozen=True, slots=True)
class LayerCut:
    """Layers of every stage of a pipeline, and its times; for fill, period and latency see `PipelineTimes`."""

    layers: tuple[int, ...]  # by stage
    fill_s: float  # time of m micro-batches less m - 1 periods
    period_s: float  # time between two micro-batches
    latency_s: float  # time of a single micro-batch, forward and backward
    forward_s: tuple[float, ...]  # of a micro-batch, by stage
    backward_s: tuple[float, ...]  # of a micro-batch, by stage
    hop_s: tuple[float, ...]  # send from a stage to the next one, or back

    def time_s(self, micro_batches: float) -> float:
        """Return the pipeline's time for ``micro_batches`` micro-batches, by the closed form."""
        return max(self.fill_s + (micro_batches - 1) * self.period_s, self.latency_s)

    @property
    def times(self) -> tuple[tuple[float, ...], tuple[float, ...], tuple[float, ...]]:
        """Seconds of forwards, backwards and sends by stage: the first three arguments of `StageCosts.pipeline_s`."""
        return self.forward_s, self.backward_s, self.hop_s

    @property
    def overlap_s(self) -> float:
        """Seconds of one backward on the first stage; during its last one, other stages may synchronize gradients."""
        return self.backward_s[0]


class LayerCuts:
    """Solves and remembers the best cuts of pipelines; pipelines over equal devices and links are solved once.

    Attributes:
        num_solved: pipelines that were solved so far, for a search that counts its effort.
    """

    def __init__(self, costs: StageCosts) -> None:
        self.costs = costs
        self.num_solved = 0
        self._by_blocks: dict[tuple[tuple[DeviceBlock, ...], int, int], tuple[LayerCut, ...]] = {}
        self._by_kinds: dict[tuple[object, ...], tuple[LayerCut, ...]] = {}

    def __call__(self, blocks: tuple[DeviceBlock, ...], micro_batch_size: int, pipelines: int) -> tuple[LayerCut, ...]:
        """Return the cuts of a pipeline that no other cut beats in all of its times, shortest period first.

        The result is empty if the layers do not fit.

        Args:
            blocks: blocks of its stages, first to last.
            pipelines: number of pipelines of the plan, over which optimizer states are shared.
        """
        key = blocks, micro_batch_size, pipelines
        cuts = self._by_blocks.get(key)
        if cuts is None:
            links = links_between(self.costs, blocks)
            cuts = self._by_blocks[key] = self._cuts(blocks, links, micro_batch_size, pipelines)
        return cuts

    def keep(
        self, blocks: tuple[DeviceBlock, ...], micro_batch_size: int, pipelines: int, layers: tuple[int, ...]
    ) -> bool:
        """Use ``layers``, by stage, as the only cut of these blocks from now on; return False if it does not fit."""
        cut = make_cut(self.costs, blocks, layers, micro_batch_size, pipelines)
        if cut is not None:
            self._by_blocks[blocks, micro_batch_size, pipelines] = (cut,)
        return cut is not None

    def _cuts(
        self, blocks: tuple[DeviceBlock, ...], links: tuple[int, ...], micro_batch_size: int, pipelines: int
    ) -> tuple[LayerCut, ...]:
        """Look up or solve the cuts, which depend only on kinds of blocks, links between them, and room for layers."""
        costs, num_layers, stages = self.costs, self.costs.model.num_layers, len(blocks)
        if stages > num_layers:
            return ()
        options = stage_options(costs, blocks, micro_batch_size, pipelines)
        if options is None:
            return ()
        room = tuple(  # most layers that fit into the memory of every stage
            min(num_layers, option.max_layers(j == 0, j == stages - 1, in_flight))
            for j, (option, in_flight) in enumerate(zip(options, costs.kept_by_default(stages), strict=True))
        )
        if min(room) < 1 or sum(room) < num_layers:
            return ()
        kinds = tuple(block._replace(node=0) for block in blocks)
        key = kinds, tuple(costs.cluster.link_class_alike[link] for link in links), micro_batch_size, room
        if key not in self._by_kinds:
            self.num_solved += 1
            law = _TimeLaw(costs, options, hops_s(costs, blocks, links, micro_batch_size))
            self._by_kinds[key] = _solve(law, np.array(room), num_layers)
        return self._by_kinds[key]

    def best(
        self, blocks: tuple[DeviceBlock, ...], micro_batch_size: int, pipelines: int, micro_batches: float
    ) -> LayerCut | None:
        """Return the fastest cut for ``micro_batches`` micro-batches; None if the layers do not fit."""
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
    """Return the cut with the given layers; None if a block cannot run a stage, or if the layers do not fit.

    Args:
        layers: by stage.
        fits: whether the layers have to fit into memory.
    """
    options, stages = stage_options(costs, blocks, micro_batch_size, pipelines), len(blocks)
    if options is None:
        return None
    for j, (option, number, in_flight) in enumerate(zip(options, layers, costs.kept_by_default(stages), strict=True)):
        if fits and number > option.max_layers(j == 0, j == stages - 1, in_flight):
            return None
    law = _TimeLaw(costs, options, hops_s(costs, blocks, links_between(costs, blocks), micro_batch_size))
    return law.cuts(np.array([layers]))[0]


class _TimeLaw:
    """Times of one pipeline as a function of the layers of its stages.

    Attributes:
        layer_s: forward and backward of one layer, ``[S]``.
        offset_s: time of a stage besides its layers, ``[S]``.
        hop_s: send from a stage to the next one, ``[S - 1]``.
    """

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
        """Return the forward and backward of every stage, ``[C, S]`` each, of candidates with these layers."""
        forward_CS = layers_CS * self._forward_s + self._extra_forward_s
        backward_CS = layers_CS * self._backward_s + self._extra_backward_s
        return forward_CS, backward_CS

    def __call__(self, layers_CS: Ints) -> PipelineTimes:
        """Return the fill, period and latency of candidates with these layers, ``[C]`` each."""
        return self._costs.pipeline_times(*self.passes_s(layers_CS), self.hop_s)

    def cuts(self, layers_CS: Ints) -> tuple[LayerCut, ...]:
        """Return the cuts with these layers, one for each candidate."""
        hop_s = tuple(self.hop_s.tolist())
        columns = [column.tolist() for column in (layers_CS, *self(layers_CS), *self.passes_s(layers_CS))]
        return tuple(
            LayerCut(tuple(layers), fill, period, latency, tuple(forward), tuple(backward), hop_s)
            for layers, fill, period, latency, forward, backward in zip(*columns, strict=True)
        )


def _solve(law: _TimeLaw, room_S: Ints, num_layers: int) -> tuple[LayerCut, ...]:
    """Return the cuts that no other cut beats in all of fill, period and latency, shortest period first.

    Args:
        room_S: most layers that fit into the memory of every stage.
    """
    layers_CS = _undominated(law, _candidates(law, room_S, num_layers))
    if len(room_S) > 1:
        times = law(layers_CS)
        polished = []
        for micro_batches in POLISHED_FOR:
            fastest = int(times.of(micro_batches).argmin())
            polished.append(_polish(law, layers_CS[fastest], room_S, micro_batches))
        layers_CS = _undominated(law, np.concatenate([layers_CS, polished]))
    return law.cuts(layers_CS)


def _candidates(law: _TimeLaw, room_S: Ints, num_layers: int) -> Ints:
    """Return ``[C, S]`` the cut with the smallest sum of stage times, for every period at which a stage gains a layer.

    Dimension L: numbers of layers, from 1 on.
    """
    number_L1 = np.arange(1, room_S.max() + 1)[:, None]
    stage_s_LS = number_L1 * law.layer_s + law.offset_s
    periods_C = np.unique(stage_s_LS[number_L1 <= room_S])
    # Most layers that a stage has time and memory for. A period is possible if every stage has at least one layer, and
    # all stages together have room for the model.
    most_CS = np.floor((periods_C[:, None] * (1 + TOLERANCE) - law.offset_s) / law.layer_s).astype(np.int64)
    most_CS = np.minimum(most_CS, room_S)
    most_CS = most_CS[(most_CS >= 1).all(axis=1) & (most_CS.sum(axis=1) >= num_layers)]
    most_CS = np.concatenate([most_CS[:PERIODS], most_CS[PERIODS :: 1 + len(most_CS) // PERIODS]])
    # Every stage has one layer; the remaining ones fill up the stages, the fastest per layer first. Example: 4 layers
    # remain, stages could have 3, 2 and 2 more: they get 3, 1 and 0.
    fastest_first = np.argsort(law.layer_s, kind="stable")
    more_CS = most_CS[:, fastest_first] - 1
    more_of_faster_CS = more_CS.cumsum(axis=1) - more_CS
    filled_CS = np.clip(num_layers - len(room_S) - more_of_faster_CS, 0, more_CS) + 1
    layers_CS: Ints = np.empty_like(filled_CS)
    layers_CS[:, fastest_first] = filled_CS
    return layers_CS


def _undominated(law: _TimeLaw, layers_CS: Ints) -> Ints:
    """Return the candidates that no other one beats in all of fill, period and latency, shortest period first."""
    times = law(layers_CS)
    order = np.lexsort((times.latency_s, times.fill_s, times.period_s))
    # By ascending period, a candidate stays if its fill or its latency is less than that of all candidates before it.
    is_better_C = np.zeros(len(order), dtype=bool)
    for time_C in (times.fill_s[order], times.latency_s[order]):
        least_before_C = np.concatenate([[np.inf], np.minimum.accumulate(time_C)[:-1]])
        is_better_C |= time_C < least_before_C
    return np.asarray(layers_CS[order[is_better_C]])


def _polish(law: _TimeLaw, layers_S: Ints, room_S: Ints, micro_batches: int) -> Ints:
    """Return the layers after moves of single layers, always the best move, while the time of ``micro_batches`` falls.

    The busiest stages give, the least busy ones take; in short pipelines every stage may do both.
    """
    unit_SS, time_s = np.eye(len(layers_S), dtype=np.int64), np.inf  # row j is one layer of stage j
    while True:
        least_busy_first = np.argsort(layers_S * law.layer_s + law.offset_s, kind="stable")
        takers, givers = least_busy_first[:MAX_TAKERS], least_busy_first[-MAX_GIVERS:]
        moves_CS = (unit_SS[takers, None] - unit_SS[givers]).reshape(-1, len(layers_S))
        layers_CS = np.concatenate([layers_S[None], layers_S + moves_CS])  # without a move, and after every move
        layers_CS = layers_CS[(layers_CS >= 1).all(axis=1) & (layers_CS <= room_S).all(axis=1)]
        time_C = law(layers_CS).of(micro_batches)
        best = int(time_C.argmin())
        if time_C[best] >= time_s * (1 - TOLERANCE):
            return layers_S
        layers_S, time_s = np.asarray(layers_CS[best]), float(time_C[best])
