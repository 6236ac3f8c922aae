"""Ranks and engines that `ds_hetero.register` came too late for, or never reached.

A rank that never registered runs stock DeepSpeed: it takes part in nothing of ours, and the others would wait for it in
their first collective without a word. So each registered rank says in the process group's store that it is here, and
waits for the others there, where it can see who is missing.
"""

from __future__ import annotations

import gc
import logging
import time
import weakref
from collections.abc import Callable

import torch.distributed as dist
from deepspeed import DeepSpeedEngine, load_ds_config
from torch.distributed.distributed_c10d import PrefixStore, _get_default_store

from ds_hetero.config import SECTION
from ds_hetero.errors import ConfigError
from ds_hetero.integrations.deepspeed.facts import enabled

__all__ = ["PRIVATE_NAMES", "expect_all_registered", "expect_no_engine", "note_engine"]

PRIVATE_NAMES = ("torch.distributed.distributed_c10d:_get_default_store",)

logger = logging.getLogger(__name__)

_PREFIX = "ds_hetero/registered"
_WARN_AFTER_S = 60.0  # other ranks may be reading a large model
_GIVE_UP_AFTER_S = dist.constants.default_pg_timeout.total_seconds()
_POLL_S = 0.05

_calls = 0
_known: weakref.WeakSet[DeepSpeedEngine] = weakref.WeakSet()


def expect_all_registered(
    warn_after_s: float = _WARN_AFTER_S,
    give_up_after_s: float = _GIVE_UP_AFTER_S,
    sleep: Callable[[float], None] = time.sleep,
) -> None:
    """Wait until every rank of the world is here; those that never registered are named.

    Args:
        warn_after_s: seconds until a warning says who is missing.
        give_up_after_s: seconds until that is an error.
        sleep: between two looks.

    Caller: every registered rank, as often as the others; nothing happens without a process group.
    Collectives: none; one key of the store per rank and call.

    Raises:
        ConfigError: ranks are missing.
    """
    global _calls
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return
    _calls += 1
    store = PrefixStore(f"{_PREFIX}/{_calls}", _get_default_store())
    store.set(str(dist.get_rank()), "here")
    start, has_warned = time.monotonic(), False
    while missing := [rank for rank in range(dist.get_world_size()) if not store.check([str(rank)])]:
        waited_s = time.monotonic() - start
        if waited_s > give_up_after_s:
            raise ConfigError(_missing_text(missing, waited_s))
        if waited_s > warn_after_s and not has_warned:
            logger.warning("%s", _missing_text(missing, waited_s))
            has_warned = True
        sleep(_POLL_S)


def expect_no_engine() -> None:
    """At registration: refuse engines that were built before it from a configuration with a section.

    Raises:
        ConfigError: there is one.
    """
    if not dist.is_initialized():
        return  # and so there is none; a look at all objects takes some tenths of a second
    for known in gc.get_objects():
        if isinstance(known, DeepSpeedEngine) and known not in _known and enabled(load_ds_config(known.config)):
            raise ConfigError(
                f'ds_hetero.register() was called after an engine was built from a configuration with a "{SECTION}" '
                "section, which trains whole sequences on every rank now. Call it before deepspeed.initialize, the "
                "Accelerator or trainer.train()."
            )


def note_engine(engine: DeepSpeedEngine) -> None:
    """``engine`` was built while registered."""
    _known.add(engine)


def _missing_text(missing: list[int], waited_s: float) -> str:
    ranks = f"rank{'s' * (len(missing) > 1)} {', '.join(map(str, missing))}"
    return (
        f"{ranks} did not reach deepspeed.initialize with ds_hetero registered within {waited_s:.0f} s of this rank. "
        "Call ds_hetero.register() on every rank of all nodes: a rank without it runs stock DeepSpeed and never joins. "
        "(One that is still reading its model comes later.)"
    )
