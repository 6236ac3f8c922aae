"""Hooks around the methods of DeepSpeed's engine: how they are put on, and those that every engine has.

A hook is a function ``hook(hooked, method, *args, **kwargs)`` that is called in the place of an engine's method. It
calls ``method``, which is the next hook or the engine's own, and returns what the caller of the engine gets. No other
file replaces methods of an engine; `hook_table` lists the hooks.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from ds_hetero.engine.process.patching import Function
from ds_hetero.errors import ConfigError
from ds_hetero.frameworks.deepspeed.protocols import Engine
from ds_hetero.job.monitoring.monitor import StepMonitor
from ds_hetero.runtime.peers.calls import own_calls
from ds_hetero.runtime.peers.waiting import waiting_for_peers
from ds_hetero.runtime.step_clock import StepClock

Hook = Function


@dataclass(kw_only=True)
class HookedEngine:
    """An engine and what the hooks around its methods need.

    Args:
        engine: DeepSpeed's, as it was built.
        clock: times its steps.
        monitor: takes the times of steps.
    """

    engine: Engine
    clock: StepClock
    monitor: StepMonitor

    @property
    def why_batch_is_fixed(self) -> str | None:
        """Message for who changes the batch size of the engine; None where it can be changed."""
        return None


class HookRow(NamedTuple):
    """A row of the table of hooks.

    Args:
        method: of the engine.
        hook: around it.
        of: the engines that have it.
    """

    method: str
    hook: Hook
    of: type[HookedEngine] = HookedEngine


class EngineHooks:
    """Hooks around the methods of one engine.

    Args:
        hooked: what every hook is given.
        table: those of one method outermost first.
    """

    def __init__(self, hooked: HookedEngine, table: Sequence[HookRow]) -> None:
        self._engine, self._names = weakref.ref(hooked.engine), {row.method for row in table}
        for row in reversed(table):
            if isinstance(hooked, row.of):
                setattr(hooked.engine, row.method, _around(row.hook, hooked, getattr(hooked.engine, row.method)))

    def take_off(self) -> None:
        """Leave the engine, if it still exists, with its own methods."""
        if (engine := self._engine()) is not None:
            for name in self._names & vars(engine).keys():
                delattr(engine, name)


def _around(hook: Hook, hooked: HookedEngine, method: Function) -> Function:
    @functools.wraps(method)
    def call(*args: object, **kwargs: object) -> object:
        return hook(hooked, method, *args, **kwargs)

    return call


def waiting(phase: str) -> Hook:
    """Make a hook that reports a collective which broke or timed out inside the engine as `PeerError`."""

    def name_lost_peers(hooked: HookedEngine, method: Function, *args: object, **kwargs: object) -> object:
        with waiting_for_peers(phase):
            return method(*args, **kwargs)

    return name_lost_peers


def recording(call: str) -> Hook:
    """Make a hook that records a call in which ranks wait for one another, see `ds_hetero.runtime.peers.calls`."""

    def record_call(hooked: HookedEngine, method: Function, *args: object, **kwargs: object) -> object:
        own_calls.record(call)
        try:
            return method(*args, **kwargs)
        except Exception as error:
            own_calls.fail(error)
            raise

    return record_call


def time_step(hooked: HookedEngine, step: Function, *args: object, **kwargs: object) -> object:
    """Time the engine's step; after an optimizer step the monitor may look at all ranks' times, and change the plan."""
    before = hooked.engine.global_steps
    with hooked.clock.running(), hooked.clock.optimizer_step():
        result = step(*args, **kwargs)
    if hooked.engine.global_steps > before:
        hooked.monitor.record_step(hooked.engine.global_samples)
    return result


def report_times(hooked: HookedEngine, destroy: Function, *args: object, **kwargs: object) -> object:
    """Print the table of the ranks' times before the engine is gone."""
    hooked.monitor.report()
    return destroy(*args, **kwargs)


def refuse_batch_sizes(hooked: HookedEngine, method: Function, *args: object, **kwargs: object) -> object:
    """Refuse another batch size where the plan says what batches there are.

    Raises:
        ConfigError: it does.
    """
    if (message := hooked.why_batch_is_fixed) is not None:
        raise ConfigError(message)
    return method(*args, **kwargs)
