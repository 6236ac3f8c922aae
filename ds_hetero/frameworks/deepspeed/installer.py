"""One call of `deepspeed.initialize` with a section: what is alike whether a model is split or cut into stages."""

from __future__ import annotations

import copy
from typing import Any

from ds_hetero.engine.ds_config import DsConfig
from ds_hetero.engine.process.patching import Function
from ds_hetero.engine.registry import Registry
from ds_hetero.frameworks.deepspeed.hooks.hooks import HookedEngine
from ds_hetero.frameworks.deepspeed.protocols import Arguments


class Installer:
    """One call of `deepspeed.initialize` with a section; subclasses `install` what it asks for.

    Args:
        registry: of this process.
        stock: DeepSpeed's own function.
        given: the arguments of the call, by name.
        ds_config: the configuration among them.
    """

    def __init__(self, registry: Registry, stock: Function, given: Arguments, ds_config: DsConfig) -> None:
        self._registry, self._stock, self._given, self._ds_config = registry, stock, given, ds_config

    def _call_stock(self, config: DsConfig, **changed: Any) -> tuple[Any, ...]:
        """Let stock build the engine.

        Args:
            config: in the place of the user's, wherever that was given.
            changed: arguments in the place of the user's.
        """
        args: Any = self._given.get("args")
        if getattr(args, "deepspeed_config", None) is not None:  # of the command line
            args = copy.copy(args)
            args.deepspeed_config = None
        ours = {"args": args, "config": config, "config_params": None, "mesh_param": None}
        built: tuple[Any, ...] = self._stock(**{**self._given, **ours, **changed})
        return built

    def install(self) -> tuple[HookedEngine, tuple[Any, ...]]:
        """Let stock build an engine of our parts.

        Returns:
            The engine with what the hooks around its methods need; and what stock returns.

        Caller: every rank of the world.

        Raises:
            HeteroError: on every rank, when the model, the configuration or the optimizer cannot be used.
        """
        raise NotImplementedError
