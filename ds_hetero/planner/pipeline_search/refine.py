"""The end of a search: move single layers and micro-batches while the step becomes shorter, by exact pipeline times.

The search itself times every pipeline by a closed form (`ds_hetero.cost.stages.pipeline_time`), which is a fraction of
a percent off with many micro-batches and some percent with few. Here every change is timed without this
simplification, see `StageCosts.pipeline_s`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from ds_hetero.planner.pipeline_search.cuts import LayerCut, make_cut
from ds_hetero.planner.pipeline_search.evaluate import Evaluator, PlanCandidate

MAX_GIVING_STAGES = 3  # number of busiest stages that may give a layer away; chosen, never measured
LEAST_REFINED_GAIN = 1e-6  # relative gain of a plan's value that a change must have; less is rounding


def refine_plan(evaluate: Evaluator, plan: PlanCandidate, effort_s: float) -> PlanCandidate:
    """Return the plan with exact times, and with better layers and micro-batches if there are any.

    The method takes the first change that helps and begins again, until none helps or ``effort_s`` is spent, as
    `Evaluator.spent_s` counts it.
    """
    stop_s = evaluate.spent_s + effort_s
    best = evaluate.exact(plan)
    while evaluate.spent_s < stop_s:
        better = _first_better(evaluate, best, stop_s)
        if better is None:
            break
        best = better
    return best


def _first_better(evaluate: Evaluator, plan: PlanCandidate, stop_s: float) -> PlanCandidate | None:
    """Return the first changed plan that is better; None if none is found within ``stop_s`` of `Evaluator.spent_s`."""
    for change in _changes(evaluate, plan):
        candidate = evaluate.exact(plan, change.cuts, change.micro_batches)
        if candidate.value < plan.value * (1 - LEAST_REFINED_GAIN):
            return candidate
        if evaluate.spent_s >= stop_s:
            return None
    return None


class _Change(NamedTuple):
    """Layers and micro-batches of all pipelines after a change."""

    cuts: tuple[LayerCut, ...]
    micro_batches: tuple[int, ...]


def _changes(evaluate: Evaluator, plan: PlanCandidate) -> Iterator[_Change]:
    """Yield changes that relieve the pipeline that ends last.

    First a layer moves between two stages of this pipeline, and in all pipelines with the same cut. Then the pipeline
    gives one micro-batch to another pipeline with micro-batches of the same size, the fastest pipeline first.
    """
    pairs = zip(plan.cuts, plan.micro_batches, strict=True)
    pipeline_s = [evaluate.pipeline_s(cut, number) for cut, number in pairs]
    slowest = pipeline_s.index(max(pipeline_s))
    for cut in _cuts_with_moved_layer(evaluate, plan, slowest):
        cuts = tuple(cut if old == plan.cuts[slowest] else old for old in plan.cuts)
        yield _Change(cuts, plan.micro_batches)
    size = plan.shapes[slowest].micro_batch_size
    for taker in sorted(range(len(pipeline_s)), key=pipeline_s.__getitem__):
        if taker != slowest and plan.shapes[taker].micro_batch_size == size and plan.micro_batches[slowest] > 1:
            micro_batches = list(plan.micro_batches)
            micro_batches[slowest] -= 1
            micro_batches[taker] += 1
            yield _Change(plan.cuts, tuple(micro_batches))


def _cuts_with_moved_layer(evaluate: Evaluator, plan: PlanCandidate, index: int) -> Iterator[LayerCut]:
    """Yield cuts of pipeline ``index`` in which one of the busiest stages has given a layer to another stage."""
    cut, shape = plan.cuts[index], plan.shapes[index]
    stage_s = [forward + backward for forward, backward in zip(cut.forward_s, cut.backward_s, strict=True)]
    stages = range(len(stage_s))
    for giver in sorted(stages, key=lambda j: -stage_s[j])[:MAX_GIVING_STAGES]:
        for taker in sorted(stages, key=stage_s.__getitem__):
            if taker != giver and cut.layers[giver] > 1:
                layers = list(cut.layers)
                layers[giver] -= 1
                layers[taker] += 1
                new = make_cut(evaluate.costs, shape.blocks, tuple(layers), shape.micro_batch_size, len(plan.shapes))
                if new is not None:
                    yield new
