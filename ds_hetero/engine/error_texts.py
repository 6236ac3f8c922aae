"""Print the error that ends a rank so that its last line says what happened.

An error of ds_hetero that all ranks raise is printed once per host, by its first rank, without a traceback. Other
errors are printed as Python does. If the text of a backend means that another rank is lost, a line that names this rank
follows. Other ranks get the error through `ds_hetero.runtime.peers`.
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
"""Environment variable: 1 makes every rank print full tracebacks."""

Hook = Callable[[type[BaseException], BaseException, TracebackType | None], object]


def install_excepthook(patches: Patches) -> None:
    """Replace ``sys.excepthook`` by one that prints errors as this module's docstring says."""
    stock: Hook = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
        _show(stock, kind, error, traceback)

    def undo() -> None:
        if sys.excepthook is hook:
            sys.excepthook = stock

    sys.excepthook = hook
    patches.on_undo(undo)


def _show(stock: Hook, kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
    """Send an error to the other ranks and to the agent, then print it."""
    peer_error = lost_peer_error(error, "in its script") if is_lost_peer(error) else None
    cause = error if peer_error is None else peer_error
    watch = current_watch()
    is_printed_by_another = False
    if watch is not None:
        watch.say_last_words(STOPPED if isinstance(cause, (PeerError, StepError)) else FAILED, _text(cause))
        is_first_of_host = os.environ.get("LOCAL_RANK") == "0"  # prints it too: each host may have a separate log
        if isinstance(error, HeteroError) and not is_first_of_host:
            is_printed_by_another = watch.is_said_by_rank_0(_text(error))
    _tell_agent(cause)
    if not _is_message(error) or os.environ.get(TRACEBACK_VARIABLE) == "1":
        stock(kind, error, traceback)
    elif not is_printed_by_another:
        print(_text(error), file=sys.stderr, flush=True)
    if peer_error is not None:
        print(_text(peer_error), file=sys.stderr, flush=True)


def _tell_agent(error: BaseException) -> None:
    """Tell this process's agent why it ends, in an elastic job."""
    worker = own_worker()
    if worker is not None and not isinstance(error, KeyboardInterrupt):
        is_refusal = isinstance(error, HeteroError) and not isinstance(error, (PeerError, StepError))
        worker.note_error(_text(error), is_refusal=is_refusal, is_of_peer=isinstance(error, PeerError))


def _is_message(error: BaseException) -> bool:
    """Return whether a user needs only the text of an error, and not the traceback.

    True for an error of ds_hetero, unless it was caused by another error in this rank's code.
    """
    if not isinstance(error, (HeteroError, PeerError)):
        return False
    cause = error.__cause__
    return cause is None or isinstance(cause, HeteroError) or is_lost_peer(cause)


def _text(error: BaseException) -> str:
    """Return an error with its class, as Python prints it: ``torch.OutOfMemoryError: CUDA out of memory``."""
    kind = type(error)
    module = "" if kind.__module__ == "builtins" else f"{kind.__module__}."
    return f"{module}{kind.__qualname__}: {error}"
