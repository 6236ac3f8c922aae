"""Register ds_hetero: install the adapters of all frameworks, once per process."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ds_hetero.common.announce import announce
from ds_hetero.common.extras import untested_releases
from ds_hetero.elastic.worker import is_elastic, own_worker
from ds_hetero.engine import asked_hooks, error_texts, extension_lock, start_name
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
from ds_hetero.frameworks.deepspeed.configuration_argument import load_configuration
from ds_hetero.frameworks.deepspeed.late_registration import expect_no_engine
from ds_hetero.frameworks.transformers import adapter as transformers
from ds_hetero.frameworks.transformers import names as transformers_names
from ds_hetero.frameworks.trl import adapter as trl
from ds_hetero.runtime.peers.board import sign_with
from ds_hetero.runtime.peers.watch import stop_watch

_MOST_SHOWN = 5  # functions in a message

_active: tuple[Handle, Registry] | None = None


def register(config: str | Path | Mapping[str, Any] | None = None) -> Handle:
    """Make DeepSpeed, accelerate and transformers use this engine if ds_config.json has a "heterogeneity" section.

    Call it before a Trainer or an Accelerator is made and before ``deepspeed.initialize``. Without a "heterogeneity"
    section, or with ``"enabled": false``, everything behaves as before. A second call returns the same handle.

    Args:
        config: ds_config.json, as a path or as its content; needed only in a custom training loop that wraps its
            loader before it calls ``deepspeed.initialize``.

    Raises:
        VersionError: the installed torch, DeepSpeed, accelerate or transformers has a version that does not work.
        ConfigError: ds_hetero is registered with another configuration, or DeepSpeed has made an engine for a
            configuration with a section.
    """
    global _active
    ds_config = None if config is None else load_configuration(config)
    if _active is not None:
        handle, registry = _active
        if ds_config is not None and ds_config != registry.ds_config:
            raise ConfigError(
                "ds_hetero is registered with another configuration already. Call undo() of the handle that the first "
                "register() returned, then register again."
            )
        return handle
    changed: list[str] = []  # functions that were not tried as they are in what is installed
    for names in (torch_names, deepspeed_names, accelerate_names, transformers_names):
        changed += expect_package(names.PACKAGE, names.WORKS, names.PRIVATE_NAMES)
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
    asked_hooks.install(registry.patches)
    transformers.install(registry)
    deepspeed_engine.install(registry)
    accelerate.install(registry)
    _active = Handle(registry), registry
    if os.environ.get("RANK", "0") == "0":
        _announce_untested(changed)
    return _active[0]


def _announce_untested(changed: Sequence[str]) -> None:
    """Announce releases outside of the tested ranges, and functions whose bodies no release that was tried has."""
    untested = untested_releases()
    if not untested and not changed:
        return
    lines = []
    if untested:
        releases = ", ".join(f"{package} {release}" for package, release in untested.items())
        lines.append(f"not tested with this release of ds_hetero: {releases}.")
    if changed:
        shown = ", ".join(changed[:_MOST_SHOWN]) + ", ..." * (len(changed) > _MOST_SHOWN)
        lines.append(f"It builds on functions that were not tried as they are here: {shown}.")
    announce(" ".join([*lines, "Compare a few steps with one process first."]))


def _forget() -> None:
    """Forget the registered handle, so that the next `register` installs everything again."""
    global _active
    _active = None
