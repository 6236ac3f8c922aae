"""Wait until all ranks have registered, and name ranks that do not.

A rank that never calls `ds_hetero.register` runs stock DeepSpeed, and the others would wait for it in their first
collective without a message. So each registered rank sets a key in the process group's store, and waits until all ranks
have set theirs. While it waits it can see who is missing.
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
_STORE_LINGER_S = 1.0  # rank 0 keeps the store up so long after it gives up; chosen, never measured

_calls = 0  # number of calls of `expect_all_registered`; the same on every rank


def expect_all_registered(
    warn_after_s: float = _WARN_AFTER_S,
    give_up_after_s: float | None = None,
    sleep: Callable[[float], None] = time.sleep,
) -> None:
    """Wait until every rank of the world has called this function; do nothing without a process group.

    Args:
        warn_after_s: seconds until a warning names the missing ranks.
        give_up_after_s: seconds until an error names them; the timeout of the default process group if left out.

    Caller: every registered rank, equally often.
    Collectives: none; each rank sets one key of the store.

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
                sleep(_STORE_LINGER_S)  # this process may host the store, which others still ask until they give up
            raise ConfigError(_unregistered_text(missing, waited_s))
        if waited_s > warn_after_s and not has_warned:
            logger.warning("%s", _unregistered_text(missing, waited_s))
            has_warned = True
        sleep(_POLL_S)


def _missing_ranks(call: int) -> list[int]:
    """Note in the store that this rank has made call number ``call``; return the ranks that have not."""
    try:
        store = PrefixStore(f"{_REGISTERED}/{call}", _get_default_store())
        store.set(str(dist.get_rank()), "here")
        return [rank for rank in range(dist.get_world_size()) if not store.check([str(rank)])]
    except RuntimeError as error:
        raise PeerError(
            "the store of the job, which rank 0 or the launcher hosts, could not be reached any more while this rank "
            "waited for all ranks to call deepspeed.initialize."
        ) from error


def _unregistered_text(missing: list[int], waited_s: float) -> str:
    """Return the message on ranks that have not registered after ``waited_s`` seconds, and what to do."""
    return (
        f"{ranks_text(missing)} did not reach deepspeed.initialize with ds_hetero registered within {waited_s:.0f} s "
        "of this rank. Call ds_hetero.register() on every rank of all nodes: a rank without it runs stock DeepSpeed "
        "and never joins. (One that is still reading its model comes later; one that has ended never does.)"
    )
