"""Checks of the steps of pipelines; how they run: `ds_hetero.runtime.step_checks`."""

from __future__ import annotations

from collections.abc import Sequence, Set

from ds_hetero.frameworks.deepspeed.optimizer_groups import SameGroups
from ds_hetero.frameworks.deepspeed.pipeline.optimizer import PipelineOptimizer
from ds_hetero.frameworks.deepspeed.pipeline.pipelined_engine import PipelinedEngine
from ds_hetero.frameworks.deepspeed.zero.used_parameters import UsedParameters
from ds_hetero.runtime.step_checks import StageBuffers, StepCheck


def checks_of_pipelines(pipelined: PipelinedEngine, buffers: Sequence[str]) -> list[StepCheck]:
    """Checks of an engine whose model is a stage of a pipeline; on every rank alike.

    Args:
        buffers: names of the persistent buffers of the whole model.
    """
    pipelined.buffers = StageBuffers(pipelined.stage.model, buffers)
    return [SameGroups(pipelined), _used_parameters(pipelined), pipelined.buffers]


def _used_parameters(pipelined: PipelinedEngine) -> UsedParameters:
    """Return the check of parameters that no rank uses; synchronizer and optimizer change where layers move."""
    optimizer: PipelineOptimizer = pipelined.engine.optimizer

    def read() -> tuple[Sequence[str], Set[str]]:
        return list(optimizer.sync.held), optimizer.sync.reached

    return UsedParameters(list(optimizer.sync.shapes), read, optimizer.leave)
