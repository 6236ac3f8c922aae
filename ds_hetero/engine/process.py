"""Jobs that torchrun starts again meet under a new name in its store.

torchrun's agent keeps one store over all restarts. torch's process groups would read the addresses of the ranks before
the restart there, and fail ("Connection refused"). `TORCHELASTIC_RESTART_COUNT` cannot tell them apart: every agent
counts for itself. So rank 0 draws a name for the start, and tells it to each rank in answer to a word of that rank's:

    hello/RANK     the word that RANK has drawn; afterwards the name that it has read
    answer/WORD    the name of the start, for the process that has drawn WORD

Messages when an error ends a rank: one message for a refusal, and no raw text of a backend as the last word.

A refusal that all ranks raise is printed once per host, by its first rank, without a traceback. Any other error is
shown as Python does.
The other ranks learn of it from this one's last words, see `ds_hetero.runtime.peers`.
"""

from __future__ import annotations

import functools
import importlib
import logging
import os
import secrets
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from types import TracebackType

import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store

from ds_hetero.decision.start_text import announce
from ds_hetero.elastic.worker import own_worker
from ds_hetero.engine.patching import Patches
from ds_hetero.errors import HeteroError, PeerError, StepError
from ds_hetero.runtime.peers.board import FAILED, STOPPED
from ds_hetero.runtime.peers.calls import ranks_text
from ds_hetero.runtime.peers.watch import current_watch, is_lost_peer, lost_peer_error

logger = logging.getLogger(__name__)

_PREFIX = "ds_hetero/starts"
_WARN_AFTER_S = 60.0  # other ranks may be importing
_POLL_S = 0.02

_has_named_store = False


def install(patches: Patches) -> None:
    """Let process groups that are made from here on meet under `name_of_start`, where torchrun keeps the store."""

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
    """Say once, on rank 0, that this job cannot be started again: its process group was made too early for `install`.

    Caller: every rank, with a process group.
    """
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
    """A name that the processes which call this together share, and none before them.

    Args:
        store: which may outlive them.
        size: number of ranks.

    Caller: every rank; waits for all, as long as the store's timeout.

    Raises:
        PeerError: names the ranks that did not come.
    """
    meeting = PrefixStore(_PREFIX, store)
    timeout: timedelta = store.timeout  # type: ignore[attr-defined]
    return _give_name(meeting, size, timeout) if rank == 0 else _ask_name(meeting, rank, timeout)


def _give_name(meeting: Store, size: int, timeout: timedelta) -> str:
    """Rank 0's part: answer every word, also those that ranks before a restart have left, until all have the name."""
    name, missing = secrets.token_hex(8), list(range(1, size))
    begin, has_warned = time.monotonic(), False
    while missing:
        words = {r: meeting.get(f"hello/{r}").decode() for r in missing if meeting.check([f"hello/{r}"])}
        for word in words.values():
            meeting.set(f"answer/{word}", name)
        missing = [r for r in missing if words.get(r) != name]
        waited_s = time.monotonic() - begin
        if missing and waited_s > timeout.total_seconds():
            raise PeerError(_missing_text(missing, waited_s))
        if missing and waited_s > _WARN_AFTER_S and not has_warned:
            logger.warning("%s", _missing_text(missing, waited_s))
            has_warned = True
        time.sleep(_POLL_S if missing else 0)
    return name


def _ask_name(meeting: Store, rank: int, timeout: timedelta) -> str:
    """The part of the other ranks."""
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


TRACEBACK_VARIABLE = "DS_HETERO_TRACEBACK"
"""The environment variable that, set to 1, has every rank show full tracebacks."""

Hook = Callable[[type[BaseException], BaseException, TracebackType | None], object]


def install_excepthook(patches: Patches) -> None:
    """Replace ``sys.excepthook``."""
    stock: Hook = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
        _show(stock, kind, error, traceback)

    def undo() -> None:
        if sys.excepthook is hook:
            sys.excepthook = stock

    sys.excepthook = hook
    patches.on_undo(undo)


def _show(stock: Hook, kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
    lost = lost_peer_error(error, "in its script") if is_lost_peer(error) else None
    watch = current_watch()
    is_said = False
    if watch is not None:
        shown = error if lost is None else lost
        watch.say_last_words(STOPPED if isinstance(shown, (PeerError, StepError)) else FAILED, _text(shown))
        is_first_of_host = os.environ.get("LOCAL_RANK") == "0"  # a host's own log has the reason too
        is_said = isinstance(error, HeteroError) and not is_first_of_host and watch.is_said_by_rank_0(_text(error))
    _leave_behind(error if lost is None else lost)
    if not _is_message(error) or os.environ.get(TRACEBACK_VARIABLE) == "1":
        stock(kind, error, traceback)
    elif not is_said:
        print(_text(error), file=sys.stderr, flush=True)
    if lost is not None:
        print(_text(lost), file=sys.stderr, flush=True)


def _leave_behind(error: BaseException) -> None:
    """In an elastic job, tell this process's agent why it ends, unless that is the end of another one."""
    worker = own_worker()
    if worker is not None and not isinstance(error, (PeerError, KeyboardInterrupt)):
        worker.note_error(_text(error), is_refusal=isinstance(error, HeteroError) and not isinstance(error, StepError))


def _is_message(error: BaseException) -> bool:
    """Whether the text of an error is all that a user needs: not where it hides an error in the code of this rank."""
    cause = error.__cause__
    return isinstance(error, (HeteroError, PeerError)) and (
        cause is None or isinstance(cause, HeteroError) or is_lost_peer(cause)
    )


def _text(error: BaseException) -> str:
    kind = type(error)
    return f"{'' if kind.__module__ == 'builtins' else f'{kind.__module__}.'}{kind.__qualname__}: {error}"
