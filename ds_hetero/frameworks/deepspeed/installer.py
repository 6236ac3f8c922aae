"""Build an engine in a call of `deepspeed.initialize` with a section, and wrap the engine's methods with hooks.

This is the common part for models that are split over the sequence and models that are cut into stages. DeepSpeed gets
batch sizes (`batch_sizes`) and an `mpu` of an engine without sequence parallelism. The finished engine, and
`deepspeed.utils.groups`, report those of the replica.

`hook_table` lists all hooks; no other file replaces methods of an engine.
"""

from __future__ import annotations

import copy
from typing import Any

from torch import nn

from ds_hetero.decision.decide import JobStart
from ds_hetero.elastic.worker import is_elastic
from ds_hetero.engine.ds_config import DsConfig
from ds_hetero.engine.patching import Function
from ds_hetero.engine.registry import Registry
from ds_hetero.engine.trained.elastic_state import ElasticState
from ds_hetero.errors import ModelError
from ds_hetero.frameworks.deepspeed import elastic
from ds_hetero.frameworks.deepspeed.hooked_engine import HookedEngine
from ds_hetero.frameworks.deepspeed.protocols import Arguments, Engine


class Installer:
    """Builds the engine of one call of `deepspeed.initialize`; there is a subclass for each kind of engine.

    Args:
        stock: DeepSpeed's own `deepspeed.initialize`.
        arguments: arguments of the call, by name.
        ds_config: the configuration in them.
    """

    def __init__(self, registry: Registry, stock: Function, arguments: Arguments, ds_config: DsConfig) -> None:
        self._registry, self._stock, self._arguments, self._ds_config = registry, stock, arguments, ds_config

    def _call_stock(self, config: DsConfig, **replacements: Any) -> tuple[Any, ...]:
        """Call DeepSpeed's `deepspeed.initialize` with another configuration, and other arguments, than the user gave.

        Args:
            config: the configuration.
            replacements: other arguments that replace the user's.
        """
        args: Any = self._arguments.get("args")
        if getattr(args, "deepspeed_config", None) is not None:  # a configuration from the command line
            args = copy.copy(args)
            args.deepspeed_config = None
        configuration = {"args": args, "config": config, "config_params": None, "mesh_param": None}
        try:
            result: tuple[Any, ...] = self._stock(**{**self._arguments, **configuration, **replacements})
        except RuntimeError as error:
            _raise_if_scalars(self._arguments["model"], error)
            raise
        return result

    def _keep_in_memory(
        self, engine: Engine, start: JobStart, stages: list[elastic.ParameterDescription] | None = None
    ) -> ElasticState | None:
        """Return the object that saves the engine's state if the job is elastic, else None; see `elastic.prepare`."""
        if not is_elastic() and start.section.elastic is None:
            return None
        return elastic.prepare(engine, start, stages)

    def install(self) -> tuple[HookedEngine, tuple[Any, ...]]:
        """Build the engine.

        Returns:
            The engine with the state of its hooks, and the tuple that `deepspeed.initialize` returns.

        Caller: every rank of the world.

        Raises:
            HeteroError: on every rank: the engine cannot be built from these arguments.
        """
        raise NotImplementedError


def _raise_if_scalars(model: nn.Module, error: RuntimeError) -> None:
    """Raise `ModelError` if ``error`` is DeepSpeed's failure with parameters that have no dimension.

    DeepSpeedEngine._broadcast_model of 0.19.8 sends ``p.data.view(torch.uint8)``, which fails for such parameters.
    """
    scalars = [name for name, parameter in model.named_parameters() if parameter.dim() == 0]
    if scalars and "dim() cannot be 0" in str(error):
        raise ModelError(
            f"DeepSpeed cannot send a parameter without a dimension to the ranks when it builds an engine, and "
            f"{type(model).__name__} has {', '.join(scalars[:3])}. Give it the shape (1,)."
        ) from error
