"""Reads a stack of Python frames: the line of the script, the caller, whether a thread waits for ranks."""

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
# Below the standard library, too, and not this interpreter's: a venv may see those of the Python that it was made with.
_FOLDERS_OF_PACKAGES = ("/site-packages/", "/dist-packages/")
_LIBRARIES = (_STDLIB, *_SITE_PACKAGES, _PACKAGE)
_ENGINES = ("/deepspeed/", _PACKAGE)
# Files through which a collective is called, by a script as well as by an engine.
_WRAPPERS = (
    "/torch/",
    "/typing_extensions.py",  # torch 2.13 calls all_gather_into_tensor and others deprecated, by a decorator from there
    "/deepspeed/comm/",
    "/deepspeed/utils/",
    f"{_PACKAGE}frameworks/deepspeed/engine.py",
)
# Files in whose functions a thread waits for other ranks.
_WAITING = (
    "/torch/distributed/",
    "/deepspeed/comm/",
    "/deepspeed/runtime/zero/",
    f"{_PACKAGE}frameworks/deepspeed/zero/",
    f"{_PACKAGE}gradient_sync/",
    f"{_PACKAGE}runtime/",
)


def waits_for_ranks(frame: FrameType) -> bool:
    """Whether a thread whose innermost frame this is waits for other ranks."""
    return _is_waiting(frame.f_code.co_filename)


def is_call_of_script(frame: FrameType) -> bool:
    """Whether the script made the call that ``frame`` is in, and not an engine for it."""
    caller = _first(frame, _is_no_wrapper)
    return caller is None or not _is_engine(caller.f_code.co_filename)


class ScriptLine(NamedTuple):
    """A line of a file; its text is made when it is asked for."""

    file: str
    number: int

    def __str__(self) -> str:
        """Return the line as "train.py:41"."""
        return f"{Path(self.file).name}:{self.number}"


def line_of_script(frame: FrameType) -> ScriptLine | None:
    """Return the innermost line of the script; None where there is none."""
    found = _first(frame, _is_of_script)
    return None if found is None else ScriptLine(found.f_code.co_filename, found.f_lineno)


def place_of(function: str, line: ScriptLine | None) -> str:
    """Return a call for people, as "all_reduce at train.py:41"."""
    return function if line is None else f"{function} at {line}"


def _first(frame: FrameType | None, matches: Callable[[str], bool]) -> FrameType | None:
    """Return the innermost frame whose file matches, from ``frame`` outwards."""
    while frame is not None and not matches(frame.f_code.co_filename):
        frame = frame.f_back
    return frame


# A rank notes the place of every call on NCCL: what is said of a file is found once.
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
