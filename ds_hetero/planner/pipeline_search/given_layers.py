"""Evaluate plans whose layers and micro-batches are given: by published planners, uniform grids or plan files."""

from __future__ import annotations

from collections.abc import Sequence
from math import inf
from typing import NamedTuple

from ds_hetero.cost.objective import Objective
from ds_hetero.cost.stages.stage import NO_SYNC, PlacedPipeline, StageCosts
from ds_hetero.planner.pipeline_search.cuts import LayerCut, make_cut
from ds_hetero.planner.pipeline_search.evaluate import PlanCandidate, Shape, evaluate_exactly


class GivenLayers(NamedTuple):
    """A plan that fits into memory, with a lower bound of its value; its exact value takes longer to compute."""

    pipelines: tuple[PlacedPipeline, ...]  # all pipelines, with their layers and micro-batches
    cuts: tuple[LayerCut, ...]  # by pipeline: its layers with their times
    least_value: float  # lower bound of the exact value

    @classmethod
    def of(cls, costs: StageCosts, objective: Objective, pipelines: Sequence[PlacedPipeline]) -> GivenLayers | None:
        """Compute the times of pipelines with given layers, and a lower bound of the plan's value.

        Args:
            pipelines: all pipelines of the plan, with their layers and micro-batches.

        Returns:
            The plan; None if a stage does not fit into memory.
        """
        cut_by_key: dict[tuple[object, ...], LayerCut] = {}  # so that equal pipelines are cut once
        cuts = []
        for pipeline in pipelines:
            key = pipeline.blocks, pipeline.layers, pipeline.micro_batch_size
            if key not in cut_by_key:
                cut = make_cut(costs, *key, len(pipelines))
                if cut is None:
                    return None
                cut_by_key[key] = cut
            cuts.append(cut_by_key[key])
        least_s = max(_least_s(cut, pipeline.micro_batches) for cut, pipeline in zip(cuts, pipelines, strict=True))
        per_s = sum(block.total(objective.per_s) for pipeline in pipelines for block in pipeline.blocks)
        least_value = objective.value(costs.step_s(least_s, NO_SYNC, 0.0), per_s, 0.0)
        return cls(tuple(pipelines), tuple(cuts), least_value)

    @property
    def num_actions(self) -> int:
        """Number of pairs of a forward and a backward that `evaluate` has to time; the effort is proportional to it.

        Of pipelines with equal cuts only the one with most micro-batches counts.
        """
        most_micro_batches: dict[LayerCut, int] = {}
        for cut, pipeline in zip(self.cuts, self.pipelines, strict=True):
            most_micro_batches[cut] = max(pipeline.micro_batches, most_micro_batches.get(cut, 0))
        return sum(len(cut.layers) * number for cut, number in most_micro_batches.items())

    def evaluate(self, costs: StageCosts, objective: Objective) -> PlanCandidate | None:
        """Return the plan with exact times; None if its value is not finite."""
        shapes = [Shape(pipeline.blocks, pipeline.micro_batch_size) for pipeline in self.pipelines]
        numbers = [pipeline.micro_batches for pipeline in self.pipelines]
        candidate = evaluate_exactly(costs, objective, shapes, self.cuts, numbers)
        return candidate if candidate.value < inf else None


def _least_s(cut: LayerCut, micro_batches: int) -> float:
    """Return a lower bound of a pipeline's time: sends are free, and a stage waits only before its first forward.

    Stage j begins after the earlier stages have run one forward each, and they run one backward each after it has
    ended. In between it runs all its passes. The bound is the largest sum of these times over all stages.
    """
    earlier_stages_s, least_s = 0.0, 0.0
    for forward_s, backward_s in zip(cut.forward_s, cut.backward_s, strict=True):
        stage_s = forward_s + backward_s
        least_s = max(least_s, earlier_stages_s + micro_batches * stage_s)
        earlier_stages_s += stage_s
    return least_s


def evaluate_with_layers(
    costs: StageCosts, objective: Objective, pipelines: Sequence[PlacedPipeline]
) -> PlanCandidate | None:
    """Return a plan with exact times; None if a stage does not fit into memory.

    Args:
        pipelines: all pipelines of the plan, with their layers and micro-batches.
    """
    plan = GivenLayers.of(costs, objective, pipelines)
    return None if plan is None else plan.evaluate(costs, objective)
