"""`ds_hetero.register`: the adapters of all frameworks put together and installed, once per process."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import deepspeed

from ds_hetero.common.announce import announce
from ds_hetero.common.extras import untested_releases
from ds_hetero.elastic.worker import is_elastic, own_worker
from ds_hetero.engine import error_texts, extension_lock, start_name
from ds_hetero.engine import names as torch_names
from ds_hetero.engine.adapters import Adapters
from ds_hetero.engine.handle import Handle
from ds_hetero.engine.patching import expect_package
from ds_hetero.engine.registry import Registry
from ds_hetero.errors import ConfigError
from ds_hetero.frameworks.accelerate import adapter as accelerate
from ds_hetero.frameworks.accelerate import names as accelerate_names
from ds_hetero.frameworks.deepspeed import engine as deepspeed_engine
from ds_hetero.frameworks.deepspeed import names as deepspeed_names
from ds_hetero.frameworks.deepspeed.late_registration import expect_no_engine
from ds_hetero.frameworks.transformers import adapter as transformers
from ds_hetero.frameworks.transformers import names as transformers_names
from ds_hetero.frameworks.trl import adapter as trl
from ds_hetero.runtime.peers.board import sign_with
from ds_hetero.runtime.peers.watch import stop_watch

_active: tuple[Handle, Registry] | None = None


def register(config: str | Path | Mapping[str, Any] | None = None) -> Handle:
    """Make DeepSpeed, accelerate and transformers use this engine wherever a configuration asks for it.

    Call it before a Trainer or an Accelerator is made and before ``deepspeed.initialize``. Without a "heterogeneity"
    section, or with ``"enabled": false``, everything behaves as before. A second call returns the same handle.

    Args:
        config: ds_config.json, its path or its content; needed only in a loop of one's own that wraps its loader
            before it calls ``deepspeed.initialize``.

    Raises:
        VersionError: torch, DeepSpeed, accelerate or transformers is of a version that does not work.
        ConfigError: registered already, with another configuration; or an engine with a section exists already.
    """
    global _active
    ds_config = config if config is None or isinstance(config, Mapping) else deepspeed.load_ds_config(str(config))
    if _active is not None:
        handle, registry = _active
        if ds_config is not None and ds_config != registry.ds_config:
            raise ConfigError("ds_hetero is registered with another configuration already; undo() that handle first.")
        return handle
    for names in (torch_names, deepspeed_names, accelerate_names, transformers_names):
        expect_package(names.PACKAGE, names.WORKS, names.PRIVATE_NAMES)
    expect_no_engine()
    if is_elastic() and (worker := own_worker()) is not None:
        sign_with(worker.token)
    adapters = Adapters(models=transformers, processes=accelerate, trainers=trl)
    registry = Registry(ds_config, adapters)
    registry.patches.on_undo(_forget)
    registry.patches.on_undo(stop_watch)
    error_texts.install_excepthook(registry.patches)
    start_name.install(registry.patches)
    extension_lock.install(registry.patches)
    transformers.install(registry)
    deepspeed_engine.install(registry)
    accelerate.install(registry)
    _active = Handle(registry), registry
    if os.environ.get("RANK", "0") == "0" and (untested := untested_releases()):
        releases = ", ".join(f"{package} {release}" for package, release in untested.items())
        announce(f"not tested with this release of ds_hetero: {releases}. Compare a few steps with one process first.")
    return _active[0]


def _forget() -> None:
    global _active
    _active = None
