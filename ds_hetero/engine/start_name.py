"""Names of starts: jobs that torchrun starts again meet under a new name in its store.

torchrun's agent keeps one store over all restarts. torch's process groups would read the addresses of the ranks before
the restart there, and fail ("Connection refused"). ``TORCHELASTIC_RESTART_COUNT`` cannot tell starts apart: every agent
counts for itself. So rank 0 draws a name for the start, and each rank learns it in exchange for a word that it draws:

    key            value                                    written by
    hello/RANK     a word that RANK has drawn               RANK, when it comes
    answer/WORD    the name of the start                    rank 0, for every word that it reads
    hello/RANK     the name of the start                    RANK, when it has read the answer

Rank 0 goes on when every rank's ``hello`` is the name. A word that a rank before a restart has left is answered, too,
and the answer is not read; the rank that comes writes over it.
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

_has_named_store = False


def install(patches: Patches) -> None:
    """Let process groups that are made from here on meet under `name_of_start`, where torchrun keeps the store.

    It replaces the function by which ``torch.distributed.rendezvous`` makes the store of every TCP and environment
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

    module = importlib.import_module("torch.distributed.rendezvous")  # whose name is that of a function, too
    patches.replace(module, "_create_c10d_store", named)


def is_kept_by_launcher(hostname: str, port: int) -> bool:
    """Whether torchrun keeps the store at this address, so that it outlives the ranks."""
    address = os.environ.get("MASTER_ADDR"), os.environ.get("MASTER_PORT")
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True" and address == (hostname, str(port))


@functools.cache
def announce_lost_restarts() -> None:
    """Say once, on rank 0, that this job's process group was made too early to be started again; every rank."""
    restarts = int(os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0"))
    is_kept = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    if is_kept and restarts and not _has_named_store and dist.get_world_size() > 1 and dist.get_rank() == 0:
        announce(
            f"torchrun is to restart this job (--max-restarts {restarts}), but its process group was made before "
            "ds_hetero.register(). torch's ranks find the addresses of those before a restart then, and fail with "
            '"Connection refused". Call register() before anything that makes a process group, such as '
            "TrainingArguments; or start torchrun with --rdzv-backend c10d and TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1."
        )


def name_of_start(store: Store, rank: int, size: int) -> str:
    """Return a name for the processes that call this together, new at each start. Raises `PeerError`: who is absent.

    Caller: every rank; waits for all, as long as the store's timeout.
    """
    meeting = PrefixStore(_PREFIX, store)
    timeout: timedelta = store.timeout  # type: ignore[attr-defined]
    return _give_name(meeting, size, timeout) if rank == 0 else _ask_name(meeting, rank, timeout)


def _give_name(meeting: Store, size: int, timeout: timedelta) -> str:
    """Take rank 0's part: answer every word until all ranks have the name, and return it."""
    name = secrets.token_hex(8)
    missing = list(range(1, size))
    begin = time.monotonic()
    has_warned = False
    while missing:
        words = {}
        for rank in missing:
            if meeting.check([f"hello/{rank}"]):
                words[rank] = meeting.get(f"hello/{rank}").decode()
        for word in words.values():
            meeting.set(f"answer/{word}", name)
        missing = [rank for rank in missing if words.get(rank) != name]
        waited_s = time.monotonic() - begin
        if missing and waited_s > timeout.total_seconds():
            raise PeerError(_missing_text(missing, waited_s))
        if missing and waited_s > _WARN_AFTER_S and not has_warned:
            logger.warning("%s", _missing_text(missing, waited_s))
            has_warned = True
        time.sleep(_POLL_S if missing else 0)
    return name


def _ask_name(meeting: Store, rank: int, timeout: timedelta) -> str:
    """Take the part of any other rank: ask for the name in exchange for a word, and return it."""
    word = secrets.token_hex(8)
    meeting.set(f"hello/{rank}", word)
    try:
        name = meeting.get(f"answer/{word}").decode()
    except RuntimeError as error:
        raise PeerError(_missing_text([0], timeout.total_seconds())) from error
    meeting.set(f"hello/{rank}", name)
    return name


def _missing_text(missing: list[int], waited_s: float) -> str:
    return (
        f"{ranks_text(missing)} did not come to the making of the process group within {waited_s:.0f} s, or called "
        "ds_hetero.register() after it, or not at all: every rank has to call it at the same place."
    )
