"""Find engines with a section that were built before `ds_hetero.register`, and so by stock DeepSpeed."""

from __future__ import annotations

import gc
import weakref

import torch.distributed as dist
from deepspeed import DeepSpeedEngine

from ds_hetero.engine.ds_config import has_active_section
from ds_hetero.errors import ConfigError
from ds_hetero.frameworks.deepspeed.configuration_argument import load_configuration
from ds_hetero.values.section import SECTION

_built_while_registered: weakref.WeakSet[DeepSpeedEngine] = weakref.WeakSet()


def expect_no_engine() -> None:
    """Check that no engine with a section was built before registration. Raises `ConfigError`: one was."""
    if not dist.is_initialized():
        return  # no engine can exist; a look at all objects would take some tenths of a second
    for candidate in gc.get_objects():
        if not isinstance(candidate, DeepSpeedEngine) or candidate in _built_while_registered:
            continue
        if has_active_section(load_configuration(candidate.config)):
            raise ConfigError(
                f'ds_hetero.register() was called after an engine was built from a configuration with a "{SECTION}" '
                "section, which trains whole sequences on every rank now. Call it before deepspeed.initialize, the "
                "Accelerator or trainer.train()."
            )


def note_engine(engine: DeepSpeedEngine) -> None:
    """Note that an engine was built after registration, so that `expect_no_engine` does not count it."""
    _built_while_registered.add(engine)
