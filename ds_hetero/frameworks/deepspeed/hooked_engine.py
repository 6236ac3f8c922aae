"""An engine of DeepSpeed and the state of the hooks around its methods: what all kinds of engines have."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass

from ds_hetero.engine.trained.elastic_state import ElasticState
from ds_hetero.errors import ConfigError
from ds_hetero.frameworks.deepspeed.protocols import Engine
from ds_hetero.job.monitor import StepMonitor
from ds_hetero.runtime.step_checks import StepChecks
from ds_hetero.runtime.step_clock import StepClock


@dataclass(kw_only=True)
class HookedEngine:
    """An engine, and the state of the hooks around its methods."""

    engine: Engine  # as DeepSpeed built it
    clock: StepClock  # measures the phases of steps
    monitor: StepMonitor  # records the times of steps
    elastic: ElasticState | None = None  # keeps the engine's state in memory; None in a job that is not elastic
    checks: StepChecks | None = None  # of every optimizer step; None if the section switches them off

    @property
    def fixed_batch_message(self) -> str | None:
        """The message for a script that changes the engine's batch size; None if it can be changed."""
        return None

    @contextlib.contextmanager
    def time_step(self) -> Iterator[None]:
        """Inside the context, let the clock count the time as the engine's step."""
        with self.clock.running(), self.clock.optimizer_step():
            yield

    def take_times(self) -> None:
        """Let the monitor record an optimizer step, compare the ranks' times, and change the plan if that is due."""
        self.monitor.record_step(self.engine.global_samples)

    def check_step(self) -> None:
        """Run the checks of a step before the optimizer's step; not in the middle of an accumulation."""
        if self.checks is not None and self.engine.is_gradient_accumulation_boundary():
            self.checks.run()

    def refuse_batch_sizes(self) -> None:
        """Check that the script may change the batch size. Raises `ConfigError`: the plan fixes it."""
        if (message := self.fixed_batch_message) is not None:
            raise ConfigError(message)
