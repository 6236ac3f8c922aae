"""Evaluate a plan, given the blocks of its pipelines: choose layers and micro-batches, predict the step and its value.

The value of a plan is the seconds, the money or the energy of a step, as the objective says; less is better.
"""

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
BOUND_S = 2e-5  # to compute the lower bound of a candidate
BOUND_PIPELINE_S = 2e-6  # in addition, for each of its pipelines
FULL_S = 2e-4  # to evaluate a candidate after its bound
FULL_PIPELINE_S = 2e-5  # in addition, for each of its pipelines
SOLVE_S = 4e-4  # to solve the cuts of one pipeline
SOLVE_STAGE_S = 3e-5  # in addition, for each of its stages
FIT_S = 1e-2  # to fit the owners of optimizer state to memory
ACTION_S = 2.5e-6  # to time a forward and a backward of one micro-batch on one stage exactly


class Shape(NamedTuple):
    """A pipeline before its layers and micro-batches are chosen."""

    blocks: tuple[DeviceBlock, ...]  # of the stages, first to last
    micro_batch_size: int  # samples of a micro-batch


Shapes = tuple[Shape, ...]


@dataclass(frozen=True, slots=True)
class PlanCandidate:
    """A plan of the search, with its predicted times."""

    shapes: tuple[Shape, ...]  # by pipeline: blocks of its stages, and size of its micro-batches
    cuts: tuple[LayerCut, ...]  # by pipeline: layers of its stages
    micro_batches: tuple[int, ...]  # by pipeline: micro-batches of a step
    slowest_pipeline_s: float  # time of the slowest pipeline
    sync: SyncTimes  # synchronization of gradients and parameters after it
    step_s: float  # time of the whole step
    value: float  # value of the objective; less is better

    @property
    def gradients_s(self) -> float:
        """Time of synchronizing gradients and parameters, including what overlaps with a backward."""
        return self.sync.total_s

    @property
    def placed(self) -> tuple[PlacedPipeline, ...]:
        """The pipelines with blocks, layers and micro-batches."""
        return place_blocks(self.shapes, self.cuts, self.micro_batches)

    @property
    def num_devices(self) -> int:
        """Number of devices that have work."""
        return sum(block.size for block in _all_blocks(self.shapes))


class Evaluator:
    """Evaluates plans under one cost model, global batch and objective.

    Args:
        samples: global batch.
        cuts: layer cuts to share with other evaluators of the same cost model.

    Attributes:
        spent_s: estimated seconds of all evaluations, from counts of their work and not from a clock, so that a search
            stops at the same place on every machine.
        pipeline_s: exact time of a pipeline with a cut and a number of micro-batches, see `StageCosts.pipeline_s`.
    """

    def __init__(self, costs: StageCosts, samples: int, objective: Objective, cuts: LayerCuts | None = None) -> None:
        self.costs = costs
        self.samples = samples
        self.objective = objective
        self.cuts = LayerCuts(costs) if cuts is None else cuts
        self.spent_s = 0.0
        self._fit_s = FIT_S if costs.owners == "fitted" else 0.0
        self.num_evaluated = 0
        self.pipeline_s = cache(self._pipeline_s)
        self._per_s_of_blocks: dict[tuple[DeviceBlock, ...], float] = {}

    def __call__(self, shapes: Sequence[Shape], better_than: float = inf) -> PlanCandidate | None:
        """Evaluate a plan whose pipelines have these shapes, with the best layers and micro-batches for it.

        None if the plan does not fit, or if a lower bound of its value is not below ``better_than``.
        """
        if not shapes:
            return None
        num_pipelines, num_solved_before = len(shapes), self.cuts.num_solved
        self.num_evaluated += 1
        mean_micro_batches = self.samples / sum(shape.micro_batch_size for shape in shapes)
        cuts = []
        for shape in shapes:
            cut = self.cuts.best(shape.blocks, shape.micro_batch_size, num_pipelines, mean_micro_batches)
            if cut is None:
                break
            cuts.append(cut)
        self.spent_s += BOUND_S + BOUND_PIPELINE_S * num_pipelines
        if self.cuts.num_solved > num_solved_before:
            num_stages = max(len(shape.blocks) for shape in shapes)
            self.spent_s += (SOLVE_S + SOLVE_STAGE_S * num_stages) * (self.cuts.num_solved - num_solved_before)
        if len(cuts) < num_pipelines or mean_micro_batches < 1:
            return None
        sizes = [shape.micro_batch_size for shape in shapes]
        bound_s = batch_bound_s([cut.fill_s for cut in cuts], [cut.period_s for cut in cuts], sizes, self.samples)
        per_s = sum(self._per_s(shape.blocks) for shape in shapes)
        if self.objective.value(self.costs.step_s(bound_s, NO_SYNC, 0.0), per_s, 0.0) >= better_than:
            return None
        self.spent_s += FULL_S + FULL_PIPELINE_S * num_pipelines
        candidate = self._best_candidate(tuple(shapes), cuts, sizes, per_s)
        return candidate if candidate is not None and candidate.value < inf else None

    def _best_candidate(
        self, shapes: tuple[Shape, ...], cuts: list[LayerCut], sizes: list[int], per_s: float
    ) -> PlanCandidate | None:
        """Return the best of up to three choices of layers and micro-batches; None if none gives the global batch.

        Args:
            cuts: the best layers of every pipeline for an average number of micro-batches.
            sizes: samples of a micro-batch, by pipeline.
            per_s: `Objective.per_s` of all devices.
        """
        counts = self._split(cuts, sizes)
        if counts is None:
            return None
        candidates = [self._candidate(shapes, cuts, counts, per_s, self._sync(shapes, cuts, counts))]
        # Now the number of micro-batches of every pipeline is known: choose the layers for it once more.
        new_cuts = [
            self.cuts.best(shape.blocks, shape.micro_batch_size, len(shapes), number) or cut
            for shape, number, cut in zip(shapes, counts, cuts, strict=True)
        ]
        if any(new is not old for new, old in zip(new_cuts, cuts, strict=True)):
            sync = self._sync(shapes, new_cuts, counts)
            candidates.append(self._candidate(shapes, new_cuts, counts, per_s, sync))
            # With other layers another split of the batch may be best. Its gradients take the same time, which depends
            # on layers alone.
            new_counts = self._split(new_cuts, sizes)
            if new_counts is not None and new_counts != counts:
                candidates.append(self._candidate(shapes, new_cuts, new_counts, per_s, sync))
        return min(candidates, key=lambda candidate: candidate.value)

    def _split(self, cuts: Sequence[LayerCut], sizes: Sequence[int]) -> list[int] | None:
        """Return the micro-batches of every pipeline; None if no numbers of them give the global batch."""
        return split_global_batch([cut.fill_s for cut in cuts], [cut.period_s for cut in cuts], sizes, self.samples)

    def _sync(self, shapes: Sequence[Shape], cuts: Sequence[LayerCut], counts: Sequence[int]) -> SyncTimes:
        """Return the times to synchronize gradients and parameters; add the effort to ``spent_s``."""
        self.spent_s += self._fit_s
        return self.costs.sync_times(place_blocks(shapes, cuts, counts))

    def _candidate(
        self, shapes: tuple[Shape, ...], cuts: list[LayerCut], counts: list[int], per_s: float, sync: SyncTimes
    ) -> PlanCandidate:
        """Return the plan with its times by the closed form of `LayerCut.time_s`."""
        times = [cut.time_s(number) for cut, number in zip(cuts, counts, strict=True)]
        slowest_pipeline_s = max(times)
        step_s = self.costs.step_s(slowest_pipeline_s, sync, cuts[times.index(slowest_pipeline_s)].overlap_s)
        return PlanCandidate(
            shapes=shapes,
            cuts=tuple(cuts),
            micro_batches=tuple(counts),
            slowest_pipeline_s=slowest_pipeline_s,
            sync=sync,
            step_s=step_s,
            value=self.objective.value(step_s, per_s, busy_value(self.objective, shapes, cuts, counts)),
        )

    def exact(
        self,
        plan: PlanCandidate,
        cuts: tuple[LayerCut, ...] | None = None,
        micro_batches: tuple[int, ...] | None = None,
    ) -> PlanCandidate:
        """Evaluate a plan with exact pipeline times; ``cuts`` and ``micro_batches`` replace those of the plan."""
        cuts, micro_batches = cuts or plan.cuts, micro_batches or plan.micro_batches
        self.spent_s += FULL_S + FULL_PIPELINE_S * len(cuts) + self._fit_s
        return evaluate_exactly(self.costs, self.objective, plan.shapes, cuts, micro_batches, self.pipeline_s)

    def _pipeline_s(self, cut: LayerCut, micro_batches: int) -> float:
        """Return the exact time of a pipeline, and add the effort to ``spent_s``; `pipeline_s` caches the time."""
        self.spent_s += ACTION_S * len(cut.layers) * micro_batches
        return self.costs.pipeline_s(*cut.times, micro_batches)

    def _per_s(self, blocks: tuple[DeviceBlock, ...]) -> float:
        """Return the sum of `Objective.per_s` over all devices of a pipeline."""
        if blocks not in self._per_s_of_blocks:
            self._per_s_of_blocks[blocks] = sum(block.total(self.objective.per_s) for block in blocks)
        return self._per_s_of_blocks[blocks]


def evaluate_exactly(
    costs: StageCosts,
    objective: Objective,
    shapes: Sequence[Shape],
    cuts: Sequence[LayerCut],
    micro_batches: Sequence[int],
    pipeline_s: Callable[[LayerCut, int], float] | None = None,
) -> PlanCandidate:
    """Evaluate a plan with given layers and micro-batches, with exact pipeline times.

    Args:
        pipeline_s: exact time of a pipeline, for example a cached one; left out, `StageCosts.pipeline_s`.
    """
    if pipeline_s is None:
        pipeline_s = lambda cut, number: costs.pipeline_s(*cut.times, number)  # noqa: E731
    # Of pipelines with equal cuts, the one with most micro-batches ends last: only that one is timed.
    most_micro_batches: dict[LayerCut, int] = {}
    for cut, number in zip(cuts, micro_batches, strict=True):
        most_micro_batches[cut] = max(number, most_micro_batches.get(cut, 0))
    time_of_cut = {cut: pipeline_s(cut, number) for cut, number in most_micro_batches.items()}
    slowest = max(time_of_cut, key=lambda cut: time_of_cut[cut])
    sync = costs.sync_times(place_blocks(shapes, cuts, micro_batches))
    step_s = costs.step_s(time_of_cut[slowest], sync, slowest.overlap_s)
    per_s = sum(block.total(objective.per_s) for block in _all_blocks(shapes))
    return PlanCandidate(
        shapes=tuple(shapes),
        cuts=tuple(cuts),
        micro_batches=tuple(micro_batches),
        slowest_pipeline_s=time_of_cut[slowest],
        sync=sync,
        step_s=step_s,
        value=objective.value(step_s, per_s, busy_value(objective, shapes, cuts, micro_batches)),
    )


def place_blocks(
    shapes: Sequence[Shape], cuts: Sequence[LayerCut], counts: Sequence[int]
) -> tuple[PlacedPipeline, ...]:
    """Make a `PlacedPipeline` of each pipeline from its blocks, layers and micro-batches."""
    return tuple(
        PlacedPipeline(shape.blocks, cut.layers, shape.micro_batch_size, number)
        for shape, cut, number in zip(shapes, cuts, counts, strict=True)
    )


def _all_blocks(shapes: Sequence[Shape]) -> Iterator[DeviceBlock]:
    return chain.from_iterable(shape.blocks for shape in shapes)


def value_of(objective: Objective, plan: PlanCandidate, step_s: float) -> float:
    """Return the value of a plan if its step takes ``step_s``, for example with more micro-batches in flight."""
    per_s = sum(block.total(objective.per_s) for block in _all_blocks(plan.shapes))
    return objective.value(step_s, per_s, busy_value(objective, plan.shapes, plan.cuts, plan.micro_batches))


def busy_value(objective: Objective, shapes: Sequence[Shape], cuts: Sequence[LayerCut], counts: Sequence[int]) -> float:
    """Return the objective's part for computing: a sum over devices of `Objective.per_busy_s` times seconds of work.

    Args:
        counts: micro-batches, by pipeline.
    """
    if not any(objective.per_busy_s):
        return 0.0
    terms = []
    for shape, cut, number in zip(shapes, cuts, counts, strict=True):
        for block, forward_s, backward_s in zip(shape.blocks, cut.forward_s, cut.backward_s, strict=True):
            terms.append(number * block.total(objective.per_busy_s) * (forward_s + backward_s))
    return sum(terms)
