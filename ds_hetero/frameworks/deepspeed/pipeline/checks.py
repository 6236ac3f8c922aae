"""Checks of the steps of an engine with pipelines; `ds_hetero.runtime.step_checks` runs them."""

from __future__ import annotations

from collections.abc import Sequence, Set

from ds_hetero.frameworks.deepspeed.optimizer_groups import SameGroups
from ds_hetero.frameworks.deepspeed.pipeline.optimizer import PipelineOptimizer
from ds_hetero.frameworks.deepspeed.pipeline.pipelined_engine import PipelinedEngine
from ds_hetero.frameworks.deepspeed.zero.used_parameters import UsedParameters
from ds_hetero.runtime.step_checks import StageBuffers, StepCheck


def checks_of_pipelines(pipelined: PipelinedEngine, buffers: Sequence[str]) -> list[StepCheck]:
    """Return the checks of an engine whose model is a stage of a pipeline, the same on every rank.

    Args:
        buffers: names of the persistent buffers of the whole model.
    """
    pipelined.buffers = StageBuffers(pipelined.stage.model, buffers)
    return [SameGroups(pipelined), _check_of_used_parameters(pipelined), pipelined.buffers]


def _check_of_used_parameters(pipelined: PipelinedEngine) -> UsedParameters:
    """Return the check of parameters that no rank uses."""
    optimizer: PipelineOptimizer = pipelined.engine.optimizer

    def read() -> tuple[Sequence[str], Set[str]]:
        # Read from the optimizer each time: it gets another synchronizer when layers move.
        return list(optimizer.sync.parameter_names), optimizer.sync.reached

    return UsedParameters(list(optimizer.sync.shapes), read, optimizer.skip_in_next_step)
