"""The end of a search, by the last word of the cost model: layers and micro-batches move while the step falls.

The search itself goes by a closed form of every pipeline (`ds_hetero.cost.stages.pipeline_time`), a fraction of a
percent off with many micro-batches and some percent with few. Here every change is judged by the recurrence.
"""

from __future__ import annotations

from collections.abc import Iterator

from ds_hetero.planner.pipelines.search.cuts import LayerCut, make_cut
from ds_hetero.planner.pipelines.search.evaluate import Evaluator, PlanCandidate

GIVERS = 3  # busiest stages that give a layer away
LEAST_GAIN = 1e-6


def refine_plan(evaluate: Evaluator, plan: PlanCandidate, effort_s: float) -> PlanCandidate:
    """Return the plan by the last word, with layers and micro-batches that are better by it.

    Args:
        evaluate: judges plans, and counts what that takes.
        plan: by the closed form.
        effort_s: what may be spent, by `Evaluator.spent_s`.
    """
    stop_s = evaluate.spent_s + effort_s
    best, better = evaluate.exact(plan), True
    while better and evaluate.spent_s < stop_s:
        better = False
        for cuts, micro_batches in _around(evaluate, best):
            candidate = evaluate.exact(best, cuts, micro_batches)
            if candidate.value < best.value * (1 - LEAST_GAIN):
                best, better = candidate, True
                break
            if evaluate.spent_s >= stop_s:
                break
    return best


def _around(evaluate: Evaluator, plan: PlanCandidate) -> Iterator[tuple[tuple[LayerCut, ...], tuple[int, ...]]]:
    """Layers and micro-batches that relieve the pipeline that ends last."""
    times = [evaluate.pipeline_s(cut, number) for cut, number in zip(plan.cuts, plan.micro_batches, strict=True)]
    last = times.index(max(times))
    for cut in _shifted(evaluate, plan, last):
        yield tuple(cut if old == plan.cuts[last] else old for old in plan.cuts), plan.micro_batches
    size = plan.shapes[last].micro_batch_size
    for other in sorted(range(len(times)), key=times.__getitem__):
        if other != last and plan.shapes[other].micro_batch_size == size and plan.micro_batches[last] > 1:
            numbers = list(plan.micro_batches)
            numbers[last] -= 1
            numbers[other] += 1
            yield plan.cuts, tuple(numbers)


def _shifted(evaluate: Evaluator, plan: PlanCandidate, index: int) -> Iterator[LayerCut]:
    """Cuts of one pipeline in which a busy stage has given a layer to another one."""
    cut, shape = plan.cuts[index], plan.shapes[index]
    load = [forward + backward for forward, backward in zip(cut.forward_s, cut.backward_s, strict=True)]
    stages = range(len(load))
    for giver in sorted(stages, key=lambda j: -load[j])[:GIVERS]:
        for taker in sorted(stages, key=load.__getitem__):
            if taker != giver and cut.layers[giver] > 1:
                layers = list(cut.layers)
                layers[giver] -= 1
                layers[taker] += 1
                new = make_cut(evaluate.costs, shape.blocks, tuple(layers), shape.micro_batch_size, len(plan.shapes))
                if new is not None:
                    yield new
