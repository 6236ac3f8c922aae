"""Checks of the steps of pipelines; how they run: `ds_hetero.runtime.step_checks`."""

from __future__ import annotations

from ds_hetero.frameworks.deepspeed.checks import SameGroups
from ds_hetero.frameworks.deepspeed.pipeline.hooks import PipelinedEngine
from ds_hetero.runtime.step_checks import StepCheck


def checks_of_pipelines(pipelined: PipelinedEngine) -> list[StepCheck]:
    """Checks of an engine whose model is a stage of a pipeline; on every rank alike."""
    return [SameGroups(pipelined)]
