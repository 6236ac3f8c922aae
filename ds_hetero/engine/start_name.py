"""Give each start of a job that torchrun restarts its own name in torchrun's store.

torchrun's agent keeps one store over all restarts. torch's process groups would find the addresses of the ranks before
the restart there, and fail ("Connection refused"). So process groups of each start use keys with the name of the start.
``TORCHELASTIC_RESTART_COUNT`` cannot be that name, since every agent counts for itself. Instead, rank 0 draws a random
name, and sends it to each rank in answer to a random word of that rank:

    key            value                                    written by
    hello/RANK     a random word of RANK                    RANK, at its start
    answer/WORD    the name of the start                    rank 0, for every word that it reads
    hello/RANK     the name of the start                    RANK, when it has read the answer

Rank 0 goes on when ``hello`` of every rank is the name. A rank from before the restart may have left a word. Rank 0
answers this one too, but nobody reads the answer, and the new rank writes over the word.
"""

from __future__ import annotations

import functools
import importlib
import logging
import os
import secrets
import time
from collections.abc import Callable
from datetime import timedelta

import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store

from ds_hetero.common.announce import announce
from ds_hetero.common.text import ranks_text
from ds_hetero.engine.patching import Patches
from ds_hetero.errors import PeerError

logger = logging.getLogger(__name__)

_PREFIX = "ds_hetero/starts"
_WARN_AFTER_S = 60.0  # other ranks may be importing; chosen, never measured
_POLL_S = 0.05

_has_named_store = False  # whether a process group of this process uses such a name


def install(patches: Patches) -> None:
    """Let process groups that are made from now on use the name of the start, if torchrun keeps the store.

    This replaces the function with which ``torch.distributed.rendezvous`` makes the store of TCP and environment
    rendezvous.
    """

    def named(stock: Callable[..., Store]) -> Callable[..., Store]:
        @functools.wraps(stock)
        def create(hostname: str, port: int, rank: int, world_size: int, *args: object, **kwargs: object) -> Store:
            global _has_named_store
            store = stock(hostname, port, rank, world_size, *args, **kwargs)
            if not is_kept_by_launcher(hostname, port):
                return store
            _has_named_store = True
            return PrefixStore(f"{_PREFIX}/{name_of_start(store, rank, world_size)}", store)

        return create

    # Not "import torch.distributed.rendezvous": that name is a function in torch.distributed.
    module = importlib.import_module("torch.distributed.rendezvous")
    patches.replace(module, "_create_c10d_store", named)


def is_kept_by_launcher(hostname: str, port: int) -> bool:
    """Return whether torchrun keeps the store at this address, so that it outlives the ranks."""
    address = os.environ.get("MASTER_ADDR"), os.environ.get("MASTER_PORT")
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True" and address == (hostname, str(port))


@functools.cache
def announce_lost_restarts() -> None:
    """Announce once, on rank 0, if this job's process group was made too early for restarts. Caller: every rank."""
    restarts = int(os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0"))
    is_kept = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    if is_kept and restarts and not _has_named_store and dist.get_world_size() > 1 and dist.get_rank() == 0:
        announce(
            f"torchrun is to restart this job (--max-restarts {restarts}), but its process group was made before "
            "ds_hetero.register(). After a restart, ranks would find the addresses of the former ranks, and fail with "
            '"Connection refused". Call register() before anything that makes a process group, such as '
            "TrainingArguments; or start torchrun with --rdzv-backend c10d and TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1."
        )


def name_of_start(store: Store, rank: int, size: int) -> str:
    """Return the name of this start, which is the same on all ranks and new at each start.

    Caller: every rank; it waits for the others.

    Raises:
        PeerError: ranks have not called this within the store's timeout.
    """
    prefixed = PrefixStore(_PREFIX, store)
    timeout: timedelta = store.timeout  # type: ignore[attr-defined]
    return _give_name(prefixed, size, timeout) if rank == 0 else _ask_name(prefixed, rank, timeout)


def _give_name(store: Store, size: int, timeout: timedelta) -> str:
    """On rank 0: draw a name, send it to every rank in answer to its random word, and return the name."""
    name = secrets.token_hex(8)
    missing = list(range(1, size))
    begin = time.monotonic()
    has_warned = False
    while missing:
        words = {}
        for rank in missing:
            if store.check([f"hello/{rank}"]):
                words[rank] = store.get(f"hello/{rank}").decode()
        for word in words.values():
            store.set(f"answer/{word}", name)
        missing = [rank for rank in missing if words.get(rank) != name]
        waited_s = time.monotonic() - begin
        if missing and waited_s > timeout.total_seconds():
            raise PeerError(_missing_text(missing, waited_s))
        if missing and waited_s > _WARN_AFTER_S and not has_warned:
            logger.warning("%s", _missing_text(missing, waited_s))
            has_warned = True
        time.sleep(_POLL_S if missing else 0)
    return name


def _ask_name(store: Store, rank: int, timeout: timedelta) -> str:
    """On any other rank: send rank 0 a random word, wait for the name in answer to this word, and return the name."""
    word = secrets.token_hex(8)
    store.set(f"hello/{rank}", word)
    try:
        name = store.get(f"answer/{word}").decode()
    except RuntimeError as error:
        raise PeerError(_missing_text([0], timeout.total_seconds())) from error
    store.set(f"hello/{rank}", name)
    return name


def _missing_text(missing: list[int], waited_s: float) -> str:
    """Return the message on ranks that have not made the process group after ``waited_s`` seconds."""
    return (
        f"{ranks_text(missing)} did not make the process group within {waited_s:.0f} s, or called ds_hetero.register() "
        "after it, or not at all. Call register() on every rank, at the same place of the script."
    )
