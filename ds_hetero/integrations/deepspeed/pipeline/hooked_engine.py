"""An engine of DeepSpeed's whose model is a stage of a pipeline, and what the hooks around its methods need."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor

from ds_hetero.integrations.deepspeed.protocols import Engine
from ds_hetero.integrations.transformers.stages import StageBatch, StageModel
from ds_hetero.job.pipeline_monitor import PipelineMonitor
from ds_hetero.plans import Plan
from ds_hetero.runtime.pipeline.runner import PipelineRunner
from ds_hetero.runtime.replica import ProcessGroups

__all__ = ["PipelinedEngine"]


@dataclass(kw_only=True)
class PipelinedEngine:
    """An engine whose model is a stage of a pipeline.

    Args:
        engine: DeepSpeed's, as it was built.
        plan: what all ranks do.
        stage: this rank's part of the model.
        runner: of its passes; None on a rank that is idle.
        monitor: takes the times of steps.
        groups: process groups made so far, to be used again.
        loss: of the passes that have yet to be followed by a step.
    """

    engine: Engine
    plan: Plan
    stage: StageModel
    runner: PipelineRunner[StageBatch] | None
    monitor: PipelineMonitor
    groups: ProcessGroups
    loss: Tensor | None = field(default=None)
