"""An engine of DeepSpeed's whose model is a stage of a pipeline, and what its hooks need."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from ds_hetero.engine.adapters import StagedModel
from ds_hetero.frameworks.deepspeed.installer import HookedEngine
from ds_hetero.runtime.pipeline.runner import PipelineRunner
from ds_hetero.runtime.process_groups import ProcessGroups
from ds_hetero.runtime.step_checks import StageBuffers
from ds_hetero.values.plans import Plan


@dataclass(kw_only=True)
class PipelinedEngine(HookedEngine):
    """An engine whose model is a stage of a pipeline; ``outputs_with`` makes a model's outputs of a loss and sums."""

    plan: Plan  # what all ranks do
    stage: StagedModel  # this rank's part of the model
    runner: PipelineRunner | None  # of its passes; None on a rank that is idle
    groups: ProcessGroups  # process groups made so far, to be used again
    outputs_with: Callable[[Tensor, Tensor | None], Any]
    buffers: StageBuffers | None = None  # checks that passes leave them as they are; None without checks
    loss: Tensor | None = None  # of the passes that have yet to be followed by a step

    @property
    def why_batch_is_fixed(self) -> str:
        """Why the batch size cannot be changed: the engine would count micro-batches that no pipeline has."""
        return (
            f"the batch of pipelines is the plan's ({self.plan.batch_split}) and cannot be changed; change "
            "micro_batch_size and micro_batches in the plan."
        )
