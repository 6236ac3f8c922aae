"""Texts of errors that end a rank: one message, never the raw text of a backend as the last word.

A refusal that all ranks raise is printed once per host, by its first rank, without a traceback. Any other error is
shown as Python does. The other ranks learn of it from this rank's last words, see `ds_hetero.runtime.peers`.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from types import TracebackType

from ds_hetero.elastic.worker import own_worker
from ds_hetero.engine.patching import Patches
from ds_hetero.errors import HeteroError, PeerError, StepError
from ds_hetero.runtime.peers.board import FAILED, STOPPED
from ds_hetero.runtime.peers.watch import current_watch, is_lost_peer, lost_peer_error

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
    """Say an error's last words to the other ranks, then print it.

    A backend's text for a lost rank is followed by the sentence that says which rank is lost.
    """
    lost = lost_peer_error(error, "in its script") if is_lost_peer(error) else None
    watch = current_watch()
    is_said = False  # by another rank, in this job's log
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
    """Tell this process's agent why it ends, in an elastic job."""
    worker = own_worker()
    if worker is not None and not isinstance(error, KeyboardInterrupt):
        is_refusal = isinstance(error, HeteroError) and not isinstance(error, (PeerError, StepError))
        worker.note_error(_text(error), is_refusal=is_refusal, is_of_peer=isinstance(error, PeerError))


def _is_message(error: BaseException) -> bool:
    """Whether the text of an error is all that a user needs; not where its cause is an error in this rank's code."""
    if not isinstance(error, (HeteroError, PeerError)):
        return False
    cause = error.__cause__
    return cause is None or isinstance(cause, HeteroError) or is_lost_peer(cause)


def _text(error: BaseException) -> str:
    """Return an error with its class, as Python prints it: ``torch.OutOfMemoryError: CUDA out of memory``."""
    kind = type(error)
    module = "" if kind.__module__ == "builtins" else f"{kind.__module__}."
    return f"{module}{kind.__qualname__}: {error}"
