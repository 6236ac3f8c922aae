"""One call of `deepspeed.initialize` with a section: what is alike whether a model is split or cut into stages."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any

from ds_hetero.engine.registry import Registry
from ds_hetero.frameworks.deepspeed.hooks.hooks import EngineHooks, HookedEngine
from ds_hetero.frameworks.deepspeed.hooks.table import HOOKS


class Installer:
    """One call of `deepspeed.initialize` with a section; subclasses `install` what it asks for.

    Args:
        registry: of this process.
        stock: DeepSpeed's own function.
        given: the arguments of the call, by name.
        ds_config: the configuration among them.
    """

    def __init__(
        self, registry: Registry, stock: Callable[..., Any], given: Mapping[str, Any], ds_config: Mapping[str, Any]
    ) -> None:
        self._registry, self._stock, self._given, self._ds_config = registry, stock, given, ds_config

    def _call_stock(self, config: Mapping[str, Any], **changed: Any) -> tuple[Any, ...]:
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

    def _hook(self, hooked: HookedEngine) -> None:
        """Put the hooks around the methods of the engine that was built, until the registration is undone."""
        self._registry.patches.on_undo(EngineHooks(hooked, HOOKS).take_off)
