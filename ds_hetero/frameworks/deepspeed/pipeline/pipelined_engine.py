"""State of the hooks of an engine whose model is a stage of a pipeline."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from ds_hetero.engine.trained.staged_model import StagedModel
from ds_hetero.errors import BatchError
from ds_hetero.frameworks.deepspeed.hooked_engine import HookedEngine
from ds_hetero.runtime.pipeline.runner import PipelineRunner
from ds_hetero.runtime.process_groups import ProcessGroups
from ds_hetero.runtime.step_checks import StageBuffers
from ds_hetero.values.plans import Plan


@dataclass(kw_only=True)
class PipelinedEngine(HookedEngine):
    """An engine whose model is a stage of a pipeline."""

    plan: Plan  # of the job
    stage: StagedModel  # this rank's part of the model
    runner: PipelineRunner | None  # runs the passes of a step; None on an idle rank
    groups: ProcessGroups  # process groups that exist already and are used again
    outputs_with: Callable[[Tensor, Tensor | None], Any]  # makes the model's outputs from a loss and sums over tokens
    buffers: StageBuffers | None = None  # checks that passes do not change the model's buffers; None without checks
    loss: Tensor | None = None  # of passes that are not followed by an optimizer step yet

    @property
    def fixed_batch_message(self) -> str:
        """The message for a script that sets another batch size: pipelines take the plan's."""
        return (
            f"the batch of pipelines is the plan's ({self.plan.batch_split}) and cannot be changed; change "
            "micro_batch_size and micro_batches in the plan."
        )

    def expect_passes(self) -> None:
        """Check before the engine's step that a forward was run. Raises `BatchError`: there was none."""
        if self.loss is None:
            raise BatchError("engine.step() needs a forward of this step before it: call engine(**batch) first.")
        self.loss = None
