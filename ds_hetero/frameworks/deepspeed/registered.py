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

from ds_hetero.engine.ds_config import enabled
from ds_hetero.errors import ConfigError, PeerError
from ds_hetero.runtime.collectives import timeout_of_job
from ds_hetero.values.section import SECTION

PRIVATE_NAMES = ("torch.distributed.distributed_c10d:_get_default_store",)

logger = logging.getLogger(__name__)

_PREFIX = "ds_hetero/registered"
_WARN_AFTER_S = 60.0  # other ranks may be reading a large model
_POLL_S = 0.05
_LINGER_S = 1.0

_calls = 0
_known: weakref.WeakSet[DeepSpeedEngine] = weakref.WeakSet()


def expect_all_registered(
    warn_after_s: float = _WARN_AFTER_S,
    give_up_after_s: float | None = None,
    sleep: Callable[[float], None] = time.sleep,
) -> None:
    """Wait until every rank of the world is here; those that never registered are named.

    Args:
        warn_after_s: seconds until a warning says who is missing.
        give_up_after_s: seconds until that is an error; left out, the timeout of the default process group.
        sleep: between two looks.

    Caller: every registered rank, as often as the others; nothing happens without a process group.
    Collectives: none; one key of the store per rank and call.

    Raises:
        ConfigError: ranks are missing.
        PeerError: the store cannot be reached any more.
    """
    global _calls
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return
    _calls += 1
    if give_up_after_s is None:
        give_up_after_s = timeout_of_job().total_seconds()
    start, has_warned = time.monotonic(), False
    while missing := _missing_ranks(_calls):
        waited_s = time.monotonic() - start
        if waited_s > give_up_after_s:
            if dist.get_rank() == 0:
                sleep(_LINGER_S)  # it may keep the store, which the others ask until they give up, too
            raise ConfigError(_missing_text(missing, waited_s))
        if waited_s > warn_after_s and not has_warned:
            logger.warning("%s", _missing_text(missing, waited_s))
            has_warned = True
        sleep(_POLL_S)


def _missing_ranks(call: int) -> list[int]:
    """The ranks that have not come to this call yet; this one says that it has."""
    try:
        store = PrefixStore(f"{_PREFIX}/{call}", _get_default_store())
        store.set(str(dist.get_rank()), "here")
        return [rank for rank in range(dist.get_world_size()) if not store.check([str(rank)])]
    except RuntimeError as error:
        raise PeerError(
            "rank 0 or the launcher, whichever keeps the store of the job, could not be reached any more while this "
            "rank waited for all to come to deepspeed.initialize."
        ) from error


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
        "(One that is still reading its model comes later; one that has ended never does.)"
    )
