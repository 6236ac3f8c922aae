"""From blocks to a judged plan: layers of every pipeline, micro-batches of all, gradients, the objective."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import chain
from math import inf
from typing import NamedTuple

from ds_hetero.cost.objective import Objective
from ds_hetero.cost.stages.stage import NO_SYNC, DeviceBlock, PlacedPipeline, StageCosts, SyncTimes
from ds_hetero.planner.pipeline_search.batches import batch_bound_s, split_global_batch
from ds_hetero.planner.pipeline_search.cuts import LayerCut, LayerCuts

# Seconds by which the search counts its effort, so that it ends alike on every machine. From times on one machine,
# without a record; `python -m benchmarks.pipelines_planner growth` says the CPU seconds that a search takes with
# them.
BOUND_S = 2e-5  # of a look at the bound of a candidate
BOUND_PIPELINE_S = 2e-6  # and of each of its pipelines
FULL_S = 2e-4  # of the rest of an evaluation
FULL_PIPELINE_S = 2e-5  # and of each pipeline
SOLVE_S = 4e-4  # of the cuts of one pipeline
SOLVE_STAGE_S = 3e-5  # and of each of its stages
FIT_S = 1e-2  # of fitting the owners of optimizer state to memory
ACTION_S = 2.5e-6  # of the last word on a forward and a backward


class Shape(NamedTuple):
    """A pipeline before its layers and micro-batches are chosen."""

    blocks: tuple[DeviceBlock, ...]  # of the stages, first to last
    micro_batch_size: int  # samples of a micro-batch


Shapes = tuple[Shape, ...]


@dataclass(frozen=True, slots=True)
class PlanCandidate:
    """A plan as the search sees it."""

    shapes: tuple[Shape, ...]  # its pipelines
    cuts: tuple[LayerCut, ...]  # their layers
    micro_batches: tuple[int, ...]  # of every pipeline
    pipelines_s: float  # the slowest pipeline
    sync: SyncTimes  # of gradients and parameters after it
    step_s: float  # of the whole step
    value: float  # what the objective says; less is better

    @property
    def gradients_s(self) -> float:
        """Synchronization, before any of it is hidden."""
        return self.sync.total_s

    @property
    def placed(self) -> tuple[PlacedPipeline, ...]:
        """The pipelines with their layers and batches."""
        return place_blocks(self.shapes, self.cuts, self.micro_batches)

    @property
    def num_devices(self) -> int:
        """Devices with work."""
        return sum(block.size for block in _all_blocks(self.shapes))


class Evaluator:
    """Judges plans under one cost model, global batch and objective.

    Args:
        cuts: layer cuts to share with other evaluators of the same cost model.

    Attributes:
        spent_s: what all evaluations take by a count of their work, so that a search stops at the same place on every
            machine.
    """

    def __init__(self, costs: StageCosts, samples: int, objective: Objective, cuts: LayerCuts | None = None) -> None:
        self.costs = costs
        self.samples = samples
        self.objective = objective
        self.cuts = LayerCuts(costs) if cuts is None else cuts
        self.spent_s = 0.0
        self._fit_s = FIT_S if costs.owners == "fitted" else 0.0
        self.num_evaluated = 0
        self.pipeline_s = cache(self._pipeline_s)  # the last word on one pipeline, ``(cut, micro_batches)``
        self._rates: dict[tuple[DeviceBlock, ...], float] = {}

    def __call__(self, shapes: Sequence[Shape], better_than: float = inf) -> PlanCandidate | None:
        """Judge pipelines of these shapes; None if they do not fit, or cannot be better than ``better_than``."""
        count, solved = len(shapes), self.cuts.num_solved
        if not shapes:
            return None
        self.num_evaluated += 1
        micro_batches = self.samples / sum(shape.micro_batch_size for shape in shapes)
        cuts = []
        for shape in shapes:
            cut = self.cuts.best(shape.blocks, shape.micro_batch_size, count, micro_batches)
            if cut is None:
                break
            cuts.append(cut)
        self.spent_s += BOUND_S + BOUND_PIPELINE_S * count
        if self.cuts.num_solved > solved:
            stages = max(len(shape.blocks) for shape in shapes)
            self.spent_s += (SOLVE_S + SOLVE_STAGE_S * stages) * (self.cuts.num_solved - solved)
        if len(cuts) < count or micro_batches < 1:
            return None
        sizes = [shape.micro_batch_size for shape in shapes]
        bound_s = batch_bound_s([cut.fill_s for cut in cuts], [cut.period_s for cut in cuts], sizes, self.samples)
        rate = sum(self._rate(shape.blocks) for shape in shapes)
        if self.objective.value(self.costs.step_s(bound_s, NO_SYNC, 0.0), rate, 0.0) >= better_than:
            return None
        self.spent_s += FULL_S + FULL_PIPELINE_S * count
        candidate = self._judge(tuple(shapes), cuts, sizes, rate)
        return candidate if candidate is not None and candidate.value < inf else None

    def _judge(
        self, shapes: tuple[Shape, ...], cuts: list[LayerCut], sizes: list[int], rate: float
    ) -> PlanCandidate | None:
        counts = self._split(cuts, sizes)
        if counts is None:
            return None
        # Cuts were chosen for an average number of micro-batches; now the numbers are known.
        again = [
            self.cuts.best(shape.blocks, shape.micro_batch_size, len(shapes), number) or cut
            for shape, number, cut in zip(shapes, counts, cuts, strict=True)
        ]
        plans = [self._finish(shapes, cuts, counts, rate, self._sync(shapes, cuts, counts))]
        if any(new is not old for new, old in zip(again, cuts, strict=True)):
            sync = self._sync(shapes, again, counts)
            plans.append(self._finish(shapes, again, counts, rate, sync))
            # Other layers may want other micro-batches; gradients take the same time, since they know layers alone.
            moved = self._split(again, sizes)
            if moved is not None and moved != counts:
                plans.append(self._finish(shapes, again, moved, rate, sync))
        return min(plans, key=lambda plan: plan.value)

    def _split(self, cuts: Sequence[LayerCut], sizes: Sequence[int]) -> list[int] | None:
        """Micro-batches of every pipeline; None if none make up the global batch."""
        return split_global_batch([cut.fill_s for cut in cuts], [cut.period_s for cut in cuts], sizes, self.samples)

    def _sync(self, shapes: Sequence[Shape], cuts: Sequence[LayerCut], counts: Sequence[int]) -> SyncTimes:
        self.spent_s += self._fit_s
        return self.costs.sync_times(place_blocks(shapes, cuts, counts))

    def _finish(
        self, shapes: tuple[Shape, ...], cuts: list[LayerCut], counts: list[int], rate: float, sync: SyncTimes
    ) -> PlanCandidate:
        times = [cut.time_s(number) for cut, number in zip(cuts, counts, strict=True)]
        pipelines_s = max(times)
        step_s = self.costs.step_s(pipelines_s, sync, cuts[times.index(pipelines_s)].overlap_s)
        return PlanCandidate(
            shapes=shapes,
            cuts=tuple(cuts),
            micro_batches=tuple(counts),
            pipelines_s=pipelines_s,
            sync=sync,
            step_s=step_s,
            value=self.objective.value(step_s, rate, busy_rate(self.objective, shapes, cuts, counts)),
        )

    def exact(
        self,
        plan: PlanCandidate,
        cuts: tuple[LayerCut, ...] | None = None,
        micro_batches: tuple[int, ...] | None = None,
    ) -> PlanCandidate:
        """Judge a plan by the last word on every pipeline; its cuts and micro-batches may be replaced."""
        cuts, micro_batches = cuts or plan.cuts, micro_batches or plan.micro_batches
        self.spent_s += FULL_S + FULL_PIPELINE_S * len(cuts) + self._fit_s
        return judge(self.costs, self.objective, plan.shapes, cuts, micro_batches, self.pipeline_s)

    def _pipeline_s(self, cut: LayerCut, micro_batches: int) -> float:
        self.spent_s += ACTION_S * len(cut.layers) * micro_batches
        return self.costs.pipeline_s(*cut.times, micro_batches)

    def _rate(self, blocks: tuple[DeviceBlock, ...]) -> float:
        if blocks not in self._rates:
            self._rates[blocks] = sum(block.total(self.objective.per_s) for block in blocks)
        return self._rates[blocks]


def judge(
    costs: StageCosts,
    objective: Objective,
    shapes: Sequence[Shape],
    cuts: Sequence[LayerCut],
    micro_batches: Sequence[int],
    pipeline_s: Callable[[LayerCut, int], float] | None = None,
) -> PlanCandidate:
    """Judge layers and micro-batches by the last word on every pipeline, which may be given: ``pipeline_s``."""
    if pipeline_s is None:
        pipeline_s = lambda cut, number: costs.pipeline_s(*cut.times, number)  # noqa: E731
    most: dict[LayerCut, int] = {}  # of pipelines with equal cuts, the one with most micro-batches ends last
    for cut, number in zip(cuts, micro_batches, strict=True):
        most[cut] = max(number, most.get(cut, 0))
    times = {cut: pipeline_s(cut, number) for cut, number in most.items()}
    last = max(times, key=lambda cut: times[cut])
    sync = costs.sync_times(place_blocks(shapes, cuts, micro_batches))
    step_s = costs.step_s(times[last], sync, last.overlap_s)
    rate = sum(block.total(objective.per_s) for block in _all_blocks(shapes))
    return PlanCandidate(
        shapes=tuple(shapes),
        cuts=tuple(cuts),
        micro_batches=tuple(micro_batches),
        pipelines_s=times[last],
        sync=sync,
        step_s=step_s,
        value=objective.value(step_s, rate, busy_rate(objective, shapes, cuts, micro_batches)),
    )


def place_blocks(
    shapes: Sequence[Shape], cuts: Sequence[LayerCut], counts: Sequence[int]
) -> tuple[PlacedPipeline, ...]:
    """Put shapes, layers and micro-batches together."""
    return tuple(
        PlacedPipeline(shape.blocks, cut.layers, shape.micro_batch_size, number)
        for shape, cut, number in zip(shapes, cuts, counts, strict=True)
    )


def _all_blocks(shapes: Sequence[Shape]) -> Iterator[DeviceBlock]:
    return chain.from_iterable(shape.blocks for shape in shapes)


def value_of(objective: Objective, plan: PlanCandidate, step_s: float) -> float:
    """Value of the objective for a plan whose step takes ``step_s``."""
    rate = sum(block.total(objective.per_s) for block in _all_blocks(plan.shapes))
    return objective.value(step_s, rate, busy_rate(objective, plan.shapes, plan.cuts, plan.micro_batches))


def busy_rate(objective: Objective, shapes: Sequence[Shape], cuts: Sequence[LayerCut], counts: Sequence[int]) -> float:
    """Sum over devices of `Objective.per_busy_s` x the seconds that they compute."""
    if not any(objective.per_busy_s):
        return 0.0
    rates = []
    for shape, cut, number in zip(shapes, cuts, counts, strict=True):
        for block, forward_s, backward_s in zip(shape.blocks, cut.forward_s, cut.backward_s, strict=True):
            rates.append(number * block.total(objective.per_busy_s) * (forward_s + backward_s))
    return sum(rates)
