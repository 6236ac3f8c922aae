"""Leftovers of this user's jobs in the shared memory of this machine, and which of them have ended.

    hold(place)                every process of a node: while one of them lives, the node has not ended
    sweep(place)               delete what is of no use to anybody: nodes that have ended well or hold no save
    sweep(place, with_saves)   delete also what the same command could go on from, where room is needed

A lock tells the living from the dead: the kernel gives it back with the process, whatever ends it, also where process
ids are used again or belong to another container.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from ds_hetero.common.private_files import open_file
from ds_hetero.elastic.node.place import NodePlace
from ds_hetero.elastic.segments import SUFFIX, read_header
from ds_hetero.errors import ConfigError

_OWNER = ".owner"  # locked, shared, by every process of the node
_held: dict[Path, int] = {}  # descriptors, which keep the lock while this process lives


@dataclass(frozen=True)
class Leftover:
    """A node of a job that has ended."""

    job: str
    node: str
    folder: Path
    num_bytes: int
    seconds: float  # since its newest file was written
    has_saves: bool  # that the same command could go on from


def hold(place: NodePlace) -> None:
    """Show that the node lives, until this process ends. Raises `OSError`, `ConfigError`: its folder cannot be made."""
    while place.folder not in _held:
        place.make()
        try:
            descriptor = open_file(place.folder / _OWNER, os.O_RDWR | os.O_CREAT)
        except FileNotFoundError:  # somebody has just swept it
            continue
        fcntl.flock(descriptor, fcntl.LOCK_SH)  # waits for somebody who sweeps
        if _is_there(descriptor, place.folder / _OWNER):
            _held[place.folder] = descriptor
        else:
            os.close(descriptor)


def free_node(place: NodePlace) -> None:
    """Delete the node's folder, which this process or another one still holds, and the job's, if it was the last."""
    shutil.rmtree(place.folder, ignore_errors=True)
    with contextlib.suppress(OSError):
        place.folder.parent.rmdir()


def sweep(place: NodePlace, *, with_saves: bool = False) -> list[Leftover]:
    """Delete what nodes that have ended have left; return what was deleted.

    Args:
        place: of a node that lives; of its job no save is deleted.
        with_saves: whether also what other jobs could go on from.
    """
    swept = []
    for folder in _folders(place):
        with _ended(folder) as has_ended:
            if not has_ended:
                continue
            leftover = _describe(folder)
            if leftover.has_saves and not (with_saves and leftover.job != place.job):
                continue
            shutil.rmtree(folder, ignore_errors=True)
            swept.append(leftover)
        with contextlib.suppress(OSError):  # other nodes of that job are there
            folder.parent.rmdir()
    return swept


def leftovers(place: NodePlace) -> list[Leftover]:
    """Nodes of other jobs that have ended."""
    found = []
    for folder in _folders(place):
        with _ended(folder) as has_ended:
            if has_ended and folder.parent.name != place.job:
                found.append(_describe(folder))
    return found


def _folders(place: NodePlace) -> list[Path]:
    """Folders of all other nodes of this user."""
    return [folder for folder in sorted(place.folder.parents[1].glob("*/*")) if folder != place.folder]


@contextlib.contextmanager
def _ended(folder: Path) -> Iterator[bool]:
    """Whether no process of a node lives; none begins while the context lasts."""
    try:
        descriptor = open_file(folder / _OWNER, os.O_RDWR)
    except (OSError, ConfigError):  # of an earlier release, or not ours: it is left alone
        yield False
        return
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        yield False
    else:
        yield True
    finally:
        os.close(descriptor)


def _is_there(descriptor: int, path: Path) -> bool:
    """Whether a file that was opened is still the one of that name."""
    try:
        return os.path.samestat(os.fstat(descriptor), os.stat(path, follow_symlinks=False))
    except FileNotFoundError:
        return False


def _describe(folder: Path) -> Leftover:
    facts = [path.stat() for path in folder.iterdir() if path.is_file()]
    has_saves = any(read_header(path) is not None for path in folder.glob(f"*{SUFFIX}"))
    has_ended_well = any(folder.glob("done-*.json"))
    newest_s = max((one.st_mtime for one in facts), default=0.0)
    return Leftover(
        job=folder.parent.name,
        node=folder.name,
        folder=folder,
        num_bytes=sum(one.st_blocks * 512 for one in facts),
        seconds=time.time() - newest_s,
        has_saves=has_saves and not has_ended_well,
    )
