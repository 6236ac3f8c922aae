"""Where the main thread of this process is, read from its stack: no bookkeeping while it runs."""

from __future__ import annotations

import sys
import sysconfig
import threading
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import NamedTuple

__all__ = ["Place", "own_place"]

_PACKAGE = f"{Path(__file__).resolve().parents[2]}/"
_LIBRARIES = (sysconfig.get_path("stdlib"), sysconfig.get_path("purelib"), sysconfig.get_path("platlib"), _PACKAGE)
_ENGINES = ("/deepspeed/", _PACKAGE)
# Files through which a collective is called, by a script as well as by an engine.
_WRAPPERS = ("/torch/", "/deepspeed/comm/", "/deepspeed/utils/", f"{_PACKAGE}integrations/deepspeed/engine.py")
# Files in whose functions a thread waits for other ranks.
_WAITING = (
    "/torch/distributed/",
    "/deepspeed/comm/",
    "/deepspeed/runtime/zero/",
    f"{_PACKAGE}integrations/deepspeed/zero/",
    f"{_PACKAGE}gradient_sync/",
    f"{_PACKAGE}runtime/",
)


class Place(NamedTuple):
    """Where a thread is.

    Args:
        mark: equal as long as it has not moved.
        text: the line of the script and the function that it is in, for people.
        waits: whether the innermost function is one that waits for other ranks.
        in_script: whether the script called that itself, past this engine.
    """

    mark: tuple[int, ...]
    text: str
    waits: bool
    in_script: bool


def own_place() -> Place:
    """Where the main thread is now."""
    innermost = sys._current_frames().get(threading.main_thread().ident or 0)
    if innermost is None:
        return Place((0,), "nowhere", False, False)
    waits = any(part in innermost.f_code.co_filename for part in _WAITING)
    caller = _first(innermost, lambda file: not any(part in file for part in _WRAPPERS))
    is_ours = caller is not None and any(part in caller.f_code.co_filename for part in _ENGINES)
    line = _first(innermost, lambda file: not file.startswith(_LIBRARIES))
    where = "" if line is None else f" at {Path(line.f_code.co_filename).name}:{line.f_lineno}"
    mark = id(innermost), innermost.f_lasti
    return Place(mark, f"{innermost.f_code.co_name}{where}", waits, waits and not is_ours)


def _first(frame: FrameType | None, matches: Callable[[str], bool]) -> FrameType | None:
    """The innermost frame whose file matches, from ``frame`` outwards."""
    while frame is not None and not matches(frame.f_code.co_filename):
        frame = frame.f_back
    return frame
