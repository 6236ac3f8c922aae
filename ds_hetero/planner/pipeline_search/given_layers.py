"""Judge plans from elsewhere with the layers and micro-batches that they name."""

from __future__ import annotations

from collections.abc import Sequence
from math import inf
from typing import NamedTuple

from ds_hetero.cost.objective import Objective
from ds_hetero.cost.stages.stage import NO_SYNC, PlacedPipeline, StageCosts
from ds_hetero.planner.pipeline_search.cuts import LayerCut, make_cut
from ds_hetero.planner.pipeline_search.evaluate import PlanCandidate, Shape, judge


class GivenLayers(NamedTuple):
    """A plan that fits, before the cost model's last word on it."""

    pipelines: tuple[PlacedPipeline, ...]  # with their layers and micro-batches
    cuts: tuple[LayerCut, ...]  # by pipeline, the times that follow
    least_value: float  # a bound that no judgement undercuts

    @classmethod
    def of(cls, costs: StageCosts, objective: Objective, pipelines: Sequence[PlacedPipeline]) -> GivenLayers | None:
        """Return the plan; None if it does not fit into memory."""
        cuts: dict[tuple[object, ...], LayerCut] = {}
        for pipeline in pipelines:
            key = pipeline.blocks, pipeline.layers, pipeline.micro_batch_size
            if key not in cuts:
                cut = make_cut(costs, *key, len(pipelines))
                if cut is None:
                    return None
                cuts[key] = cut
        chosen = tuple(cuts[pipeline.blocks, pipeline.layers, pipeline.micro_batch_size] for pipeline in pipelines)
        least_s = max(_least_s(cut, pipeline.micro_batches) for cut, pipeline in zip(chosen, pipelines, strict=True))
        rate = sum(block.total(objective.per_s) for pipeline in pipelines for block in pipeline.blocks)
        least_value = objective.value(costs.step_s(least_s, NO_SYNC, 0.0), rate, 0.0)
        return cls(tuple(pipelines), chosen, least_value)

    @property
    def num_actions(self) -> int:
        """Pairs of a forward and a backward that the last word looks at: pipelines of equal cuts count once."""
        most: dict[LayerCut, int] = {}
        for cut, pipeline in zip(self.cuts, self.pipelines, strict=True):
            most[cut] = max(pipeline.micro_batches, most.get(cut, 0))
        return sum(len(cut.layers) * number for cut, number in most.items())

    def judged(self, costs: StageCosts, objective: Objective) -> PlanCandidate | None:
        """Return the plan by the last word of the cost model; None where it takes longer than is acceptable."""
        shapes = [Shape(pipeline.blocks, pipeline.micro_batch_size) for pipeline in self.pipelines]
        numbers = [pipeline.micro_batches for pipeline in self.pipelines]
        candidate = judge(costs, objective, shapes, self.cuts, numbers)
        return candidate if candidate.value < inf else None


def _least_s(cut: LayerCut, micro_batches: int) -> float:
    """A pipeline's time with free hops, where some stage never waits between its first forward and last backward."""
    before_s, least_s = 0.0, 0.0  # before_s: of one micro-batch in the stages before this one
    for forward_s, backward_s in zip(cut.forward_s, cut.backward_s, strict=True):
        stage_s = forward_s + backward_s
        least_s = max(least_s, before_s + micro_batches * stage_s)
        before_s += stage_s
    return least_s


def judge_layers(costs: StageCosts, objective: Objective, pipelines: Sequence[PlacedPipeline]) -> PlanCandidate | None:
    """Judge a plan with its own layers and micro-batches; None if it does not fit."""
    plan = GivenLayers.of(costs, objective, pipelines)
    return None if plan is None else plan.judged(costs, objective)
