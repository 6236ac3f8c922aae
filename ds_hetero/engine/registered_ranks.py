"""Wait for all ranks to register, so that a rank that never does is named.

A rank that never registered runs stock DeepSpeed and takes part in nothing of ours; the others would wait for it in
their first collective without a word. So each registered rank says in the process group's store that it has come, and
waits for the others there, where it can see who is missing.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, _get_default_store

from ds_hetero.common.text import ranks_text
from ds_hetero.errors import ConfigError, PeerError
from ds_hetero.runtime.collectives import timeout_of_job

logger = logging.getLogger(__name__)

_REGISTERED = "ds_hetero/registered"
_WARN_AFTER_S = 60.0  # other ranks may be importing, or reading a large model; chosen, never measured
_POLL_S = 0.05
_STORE_LINGER_S = 1.0  # for which a rank that gives up keeps the store up for the others; chosen, never measured

_calls = 0  # of `expect_all_registered`, which every rank makes equally often


def expect_all_registered(
    warn_after_s: float = _WARN_AFTER_S,
    give_up_after_s: float | None = None,
    sleep: Callable[[float], None] = time.sleep,
) -> None:
    """Wait until every rank of the world is here; those that never registered are named.

    Args:
        warn_after_s: seconds until a warning says who is missing.
        give_up_after_s: seconds until that is an error; left out, the timeout of the default process group.

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
                sleep(_STORE_LINGER_S)  # it may keep the store, which the others ask until they give up, too
            raise ConfigError(_unregistered_text(missing, waited_s))
        if waited_s > warn_after_s and not has_warned:
            logger.warning("%s", _unregistered_text(missing, waited_s))
            has_warned = True
        sleep(_POLL_S)


def _missing_ranks(call: int) -> list[int]:
    """Return the ranks that have not reached this call yet, and note that this one has."""
    try:
        store = PrefixStore(f"{_REGISTERED}/{call}", _get_default_store())
        store.set(str(dist.get_rank()), "here")
        return [rank for rank in range(dist.get_world_size()) if not store.check([str(rank)])]
    except RuntimeError as error:
        raise PeerError(
            "rank 0 or the launcher, whichever keeps the store of the job, could not be reached any more while this "
            "rank waited for all to come to deepspeed.initialize."
        ) from error


def _unregistered_text(missing: list[int], waited_s: float) -> str:
    return (
        f"{ranks_text(missing)} did not reach deepspeed.initialize with ds_hetero registered within {waited_s:.0f} s "
        "of this rank. Call ds_hetero.register() on every rank of all nodes: a rank without it runs stock DeepSpeed "
        "and never joins. (One that is still reading its model comes later; one that has ended never does.)"
    )
