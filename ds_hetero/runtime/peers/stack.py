"""Read a stack of Python frames: the line of the script, the caller of a collective, whether a thread waits."""

from __future__ import annotations

import functools
import sysconfig
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import NamedTuple

_PACKAGE = f"{Path(__file__).resolve().parents[2]}/"
_STDLIB = sysconfig.get_path("stdlib")
_SITE_PACKAGES = (sysconfig.get_path("purelib"), sysconfig.get_path("platlib"))
# Folders of installed packages, which may lie below the standard library. A venv may also use those of the Python that
# it was made with, which sysconfig does not name.
_FOLDERS_OF_PACKAGES = ("/site-packages/", "/dist-packages/")
_LIBRARIES = (_STDLIB, *_SITE_PACKAGES, _PACKAGE)
_ENGINES = ("/deepspeed/", _PACKAGE)  # files that call collectives for the script
_RECORDER = f"{_PACKAGE}runtime/peers/posted_calls.py"  # wraps the methods of torch's process groups
# Files with functions between a collective and its caller, which may be a script or an engine.
_WRAPPERS = (
    "/torch/",
    "/typing_extensions.py",  # torch 2.13 calls all_gather_into_tensor and others deprecated, by a decorator from there
    "/deepspeed/comm/",
    "/deepspeed/utils/",
    f"{_PACKAGE}frameworks/deepspeed/engine.py",
    _RECORDER,
)
# A thread whose innermost function is in one of these files waits for other ranks.
_WAITING = (
    "/torch/distributed/",
    "/deepspeed/comm/",
    "/deepspeed/runtime/zero/",
    f"{_PACKAGE}frameworks/deepspeed/zero/",
    f"{_PACKAGE}gradient_sync/",
    f"{_PACKAGE}runtime/",
)


def waits_for_ranks(frame: FrameType) -> bool:
    """Whether a thread with this innermost frame waits for other ranks."""
    return _is_waiting(frame.f_code.co_filename)


def outside_of_recorder(frame: FrameType) -> FrameType:
    """Return the frame that called the recorder of `posted_calls` if ``frame`` is the recorder's; else ``frame``.

    A collective that blocks in the backend has no Python frame of its own: the innermost frame is the wrapper's.
    """
    while frame.f_code.co_filename == _RECORDER and frame.f_back is not None:
        frame = frame.f_back
    return frame


def is_call_of_script(frame: FrameType) -> bool:
    """Whether the script itself, and not an engine, has called the collective that ``frame`` is in."""
    caller = _first(frame, _is_no_wrapper)
    return caller is None or not _is_engine(caller.f_code.co_filename)


class ScriptLine(NamedTuple):
    """A line of a file."""

    file: str
    number: int

    def __str__(self) -> str:
        """Return the line as "train.py:41"."""
        return f"{Path(self.file).name}:{self.number}"


def line_of_script(frame: FrameType) -> ScriptLine | None:
    """Return the innermost line of the script in the stack of ``frame``; None if there is none."""
    in_script = _first(frame, _is_of_script)
    return None if in_script is None else ScriptLine(in_script.f_code.co_filename, in_script.f_lineno)


def place_of(function: str, line: ScriptLine | None) -> str:
    """Return a text for a call, such as "all_reduce at train.py:41"."""
    return function if line is None else f"{function} at {line}"


def _first(frame: FrameType | None, matches: Callable[[str], bool]) -> FrameType | None:
    """Return the first frame, from ``frame`` outwards, whose file name ``matches``; None if there is none."""
    while frame is not None and not matches(frame.f_code.co_filename):
        frame = frame.f_back
    return frame


# Cached, since on NCCL a rank records the place of every call.
@functools.cache
def _is_waiting(file: str) -> bool:
    return any(part in file for part in _WAITING)


@functools.cache
def _is_no_wrapper(file: str) -> bool:
    is_installed = any(part in file for part in _FOLDERS_OF_PACKAGES)
    is_of_stdlib = file.startswith(_STDLIB) and not is_installed  # decorators, in newer Pythons
    return not is_of_stdlib and not any(part in file for part in _WRAPPERS)


@functools.cache
def _is_engine(file: str) -> bool:
    return any(part in file for part in _ENGINES)


@functools.cache
def _is_of_script(file: str) -> bool:
    return not file.startswith(_LIBRARIES)
