"""Where the layers of running pipelines shall be when another cut is predicted to be faster; rank 0 decides."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ds_hetero.common.limits import MAX_STEPS
from ds_hetero.config import ReplanSection
from ds_hetero.job.pipeline_times import MeasuredPipeline
from ds_hetero.job.report import announce
from ds_hetero.job.start import World
from ds_hetero.planner.replan.stage_layers import PipelineSpeeds, StageSpeed, best_layers, pipeline_s, with_layers
from ds_hetero.plans import Plan

__all__ = ["LayerReplanning", "speeds_of"]


@dataclass(frozen=True, slots=True)
class _Proposal:
    """What rank 0 would do.

    Args:
        layers: by pipeline and stage.
        gain: share of the passes' time that it is predicted to save.
    """

    layers: tuple[tuple[int, ...], ...]
    gain: float


class LayerReplanning:
    """Re-planning of one job of pipelines.

    A change takes two observations in a row that ask for one: the first may lie half before the speeds moved.

    Args:
        plan: that the job begins with.
        section: ``"replan"``.

    Attributes:
        plan: of the moment.
        changes: steps after which layers moved.
    """

    def __init__(self, plan: Plan, section: ReplanSection) -> None:
        self.plan, self.changes = plan, list[int]()
        self._section = section
        self._world = World.current()
        self._asked = False

    def observe(self, step: int, measured: Sequence[MeasuredPipeline], growth: Sequence[float]) -> Plan | None:
        """Return the plan to go on with, if these times call for another one.

        Args:
            step: optimizer steps so far.
            measured: of all pipelines since the last observation.
            growth: by rank, by what factor its memory in use may grow.

        Caller: every rank of the world.
        Collectives: one `on_all_ranks`.
        """
        proposal = self._world.on_all_ranks(lambda: self._propose(measured, growth))[0]
        asked, self._asked = self._asked, proposal is not None
        if proposal is None or not asked:
            return None
        self._asked = False
        self.plan = with_layers(self.plan, proposal.layers)
        self.changes.append(step)
        if self._world.rank == 0:
            shares = " | ".join("+".join(map(str, own)) for own in proposal.layers)
            announce(f"step {step}: layers move, predicted to save {proposal.gain:.1%} of the passes: {shares}")
        return self.plan

    def _propose(self, measured: Sequence[MeasuredPipeline], growth: Sequence[float]) -> _Proposal | None:
        """What rank 0 would do; None on others, and where it would gain too little."""
        if self._world.rank:
            return None
        before_s = after_s = 0.0
        layers = []
        for pipeline, times in zip(self.plan.pipelines, measured, strict=True):
            own = tuple(stage.num_layers or 0 for stage in pipeline.stages)
            room = [min(growth[rank] for rank in stage.ranks) for stage in pipeline.stages]
            speeds = speeds_of(times, own, room)
            layers.append(best_layers(speeds, own))
            before_s = max(before_s, pipeline_s(speeds, own))
            after_s = max(after_s, pipeline_s(speeds, layers[-1]))
        gain = 1 - after_s / before_s
        return _Proposal(tuple(layers), gain) if gain > 0 and gain >= self._section.min_gain else None


def speeds_of(measured: MeasuredPipeline, layers: Sequence[int], growth: Sequence[float]) -> PipelineSpeeds:
    """Return what a layer of every stage takes, and the rest of the stage.

    The backward is taken to be shared between layers and the rest as the forward is.

    Args:
        measured: of the pipeline.
        layers: by stage.
        growth: by stage, by what factor the memory in use may grow.
    """
    stages = [
        StageSpeed(
            forward_s=forward_s * share / number,
            backward_s=backward_s * share / number,
            other_forward_s=forward_s * (1 - share),
            other_backward_s=backward_s * (1 - share),
            most_layers=int(min(number * room, MAX_STEPS)),
        )
        for forward_s, backward_s, share, number, room in zip(
            measured.forward_s, measured.backward_s, measured.layers_share, layers, growth, strict=True
        )
    ]
    return PipelineSpeeds(
        stages=tuple(stages),
        hop_s=measured.hop_s,
        micro_batches=measured.micro_batches,
        in_flight=measured.in_flight,
    )
