"""One call of `deepspeed.initialize` with a section: what is alike whether a model is split or cut into stages.

DeepSpeed is given batch sizes (`batch_sizes`), and an `mpu`, of an engine without sequence parallelism. What the
finished engine reports, and what `deepspeed.utils.groups` answers, is the replica's.

A hook is a function ``hook(hooked, method, *args, **kwargs)`` that is called in the place of an engine's method. It
calls ``method``, which is the next hook or the engine's own, and returns what the caller of the engine gets. No other
file replaces methods of an engine; `engine.HOOKS` lists the hooks.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import nn

from ds_hetero.decision.decide import JobStart
from ds_hetero.elastic.worker import is_elastic
from ds_hetero.engine.adapters import ElasticState
from ds_hetero.engine.ds_config import DsConfig
from ds_hetero.engine.patching import Function, around
from ds_hetero.engine.registry import Registry
from ds_hetero.errors import ModelError
from ds_hetero.frameworks.deepspeed import elastic
from ds_hetero.frameworks.deepspeed.protocols import Arguments, Engine
from ds_hetero.job.monitor import StepMonitor
from ds_hetero.runtime.step_checks import StepChecks
from ds_hetero.runtime.step_clock import StepClock

Hook = Function


@dataclass(kw_only=True)
class HookedEngine:
    """An engine and what the hooks around its methods need."""

    engine: Engine  # DeepSpeed's, as it was built
    clock: StepClock
    monitor: StepMonitor  # takes the times of steps
    elastic: ElasticState | None = None  # keeps its state in memory; None in a job that is not elastic
    checks: StepChecks | None = None  # of every optimizer step; None where the section switches them off

    @property
    def why_batch_is_fixed(self) -> str | None:
        """Message for who changes the batch size of the engine; None where it can be changed."""
        return None


class HookRow(NamedTuple):
    """A row of the table of hooks."""

    method: str
    hook: Hook
    of: type[HookedEngine] = HookedEngine  # the engines that have it
    part: str = ""  # of `HookedEngine`, which the hook is given in its place; where it is None, there is no hook


class EngineHooks:
    """Hooks around the methods of one engine; the ``table`` has those of one method outermost first."""

    def __init__(self, hooked: HookedEngine, table: Sequence[HookRow]) -> None:
        self._engine, self._names = weakref.ref(hooked.engine), {row.method for row in table}
        for row in reversed(table):
            if not isinstance(hooked, row.of):
                continue
            part = getattr(hooked, row.part) if row.part else hooked
            if part is not None:
                method = getattr(hooked.engine, row.method)
                setattr(hooked.engine, row.method, around(row.hook, part)(method))

    def take_off(self) -> None:
        """Leave the engine, if it still exists, with its own methods."""
        if (engine := self._engine()) is not None:
            for name in self._names & vars(engine).keys():
                delattr(engine, name)


class Installer:
    """One call of `deepspeed.initialize` with a section; subclasses `install` what it asks for."""

    def __init__(self, registry: Registry, stock: Function, given: Arguments, ds_config: DsConfig) -> None:
        self._registry, self._stock, self._given, self._ds_config = registry, stock, given, ds_config

    def _call_stock(self, config: DsConfig, **changed: Any) -> tuple[Any, ...]:
        """Let stock build the engine, with ``config`` and ``changed`` arguments in the place of the user's."""
        args: Any = self._given.get("args")
        if getattr(args, "deepspeed_config", None) is not None:  # of the command line
            args = copy.copy(args)
            args.deepspeed_config = None
        ours = {"args": args, "config": config, "config_params": None, "mesh_param": None}
        try:
            built: tuple[Any, ...] = self._stock(**{**self._given, **ours, **changed})
        except RuntimeError as error:
            _name_scalars(self._given["model"], error)
            raise
        return built

    def _keep_in_memory(
        self, engine: Engine, start: JobStart, stages: list[elastic.Described] | None = None
    ) -> ElasticState | None:
        """Make an engine elastic if its job is; see `elastic.prepare`."""
        if not is_elastic() and start.section.elastic is None:
            return None
        return elastic.prepare(engine, start, stages)

    def install(self) -> tuple[HookedEngine, tuple[Any, ...]]:
        """Let stock build an engine of our parts. Raises `HeteroError` on every rank, where that is impossible.

        Returns:
            The engine with what the hooks around its methods need; and what stock returns.

        Caller: every rank of the world.
        """
        raise NotImplementedError


def _name_scalars(model: nn.Module, error: RuntimeError) -> None:
    """Refuse parameters without a dimension, where DeepSpeed fails at them. Raises `ModelError`.

    DeepSpeedEngine._broadcast_model of 0.19.8 sends ``p.data.view(torch.uint8)``, which torch cannot make of them.
    """
    scalars = [name for name, parameter in model.named_parameters() if parameter.dim() == 0]
    if scalars and "dim() cannot be 0" in str(error):
        raise ModelError(
            f"DeepSpeed cannot send a parameter without a dimension to the ranks when it builds an engine, and "
            f"{type(model).__name__} has {', '.join(scalars[:3])}. Give it the shape (1,)."
        ) from error
