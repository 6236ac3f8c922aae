"""Messages when an error ends a rank: one message for a refusal, and no raw text of a backend as the last word.

A refusal that all ranks raise is printed by rank 0 alone, without a traceback. Any other error is shown as Python does.
The other ranks learn of it from this one's last words, see `ds_hetero.runtime.peers`.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from types import TracebackType

from ds_hetero.elastic.worker import own_worker
from ds_hetero.engine.process.patching import Patches
from ds_hetero.errors import HeteroError, PeerError, StepError
from ds_hetero.runtime.peers.board import FAILED, STOPPED
from ds_hetero.runtime.peers.waiting import is_lost_peer, lost_peer_error
from ds_hetero.runtime.peers.watch import current_watch

TRACEBACK_VARIABLE = "DS_HETERO_TRACEBACK"
"""The environment variable that, set to 1, has every rank show full tracebacks."""

Hook = Callable[[type[BaseException], BaseException, TracebackType | None], object]


def install(patches: Patches) -> None:
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
        is_said = isinstance(error, HeteroError) and watch.is_said_by_rank_0(_text(error))
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
