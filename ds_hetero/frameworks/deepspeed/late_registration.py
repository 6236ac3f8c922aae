"""Detection of engines that were built before `ds_hetero.register`, which came too late for them."""

from __future__ import annotations

import gc
import weakref

import torch.distributed as dist
from deepspeed import DeepSpeedEngine, load_ds_config

from ds_hetero.engine.ds_config import enabled
from ds_hetero.errors import ConfigError
from ds_hetero.values.section import SECTION

_built_while_registered: weakref.WeakSet[DeepSpeedEngine] = weakref.WeakSet()


def expect_no_engine() -> None:
    """Refuse engines that were built with a section before registration. Raises `ConfigError`."""
    if not dist.is_initialized():
        return  # and so there is none; a look at all objects takes some tenths of a second
    for one in gc.get_objects():
        if (
            isinstance(one, DeepSpeedEngine)
            and one not in _built_while_registered
            and enabled(load_ds_config(one.config))
        ):
            raise ConfigError(
                f'ds_hetero.register() was called after an engine was built from a configuration with a "{SECTION}" '
                "section, which trains whole sequences on every rank now. Call it before deepspeed.initialize, the "
                "Accelerator or trainer.train()."
            )


def note_engine(engine: DeepSpeedEngine) -> None:
    """Note that ``engine`` was built after registration."""
    _built_while_registered.add(engine)
