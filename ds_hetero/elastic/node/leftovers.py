"""Leftovers of this user's ended jobs in the shared memory of this machine.

    lock_as_alive(place)       called by every process of a node; the node counts as alive until all of them have ended
    sweep(place)               delete ended nodes without a save, and those whose script has finished
    sweep(place, with_saves)   delete also saves that the same command could resume from, because memory is short

A shared lock shows that a node is alive. The kernel releases it when a process ends, whatever the reason. Process ids
would not do: they are reused, and differ between containers.
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

_OWNER = ".owner"  # every process of the node has a shared lock on this file
_locks: dict[Path, int] = {}  # descriptors of the locks of this process, by folder; never closed


@dataclass(frozen=True)
class Leftover:
    """Memory of a node whose processes have ended."""

    job: str
    node: str
    folder: Path
    num_bytes: int
    seconds: float  # since its newest file was written
    has_saves: bool  # whether the same command could resume from it


def lock_as_alive(place: NodePlace) -> None:
    """Lock the node as alive until this process ends. Raises `OSError`, `ConfigError`: its folder cannot be made."""
    while place.folder not in _locks:
        place.make()
        try:
            descriptor = open_file(place.folder / _OWNER, os.O_RDWR | os.O_CREAT)
        except FileNotFoundError:  # another process has just swept the folder
            continue
        fcntl.flock(descriptor, fcntl.LOCK_SH)  # waits while another process sweeps the folder
        if _is_open_file_at(descriptor, place.folder / _OWNER):
            _locks[place.folder] = descriptor
        else:
            os.close(descriptor)


def free_node(place: NodePlace) -> None:
    """Delete the folder of this live node, and the job's folder if it has no other node."""
    shutil.rmtree(place.folder, ignore_errors=True)
    with contextlib.suppress(OSError):
        place.folder.parent.rmdir()


def sweep(place: NodePlace, *, with_saves: bool = False) -> list[Leftover]:
    """Delete the memory of ended nodes; return what was deleted.

    Args:
        place: a live node. Saves of its job are never deleted.
        with_saves: delete also saves that other jobs could resume from.
    """
    swept = []
    for folder in _folders(place):
        with _locked_if_ended(folder) as has_ended:
            if not has_ended:
                continue
            leftover = _describe(folder)
            may_delete_saves = with_saves and leftover.job != place.job
            if leftover.has_saves and not may_delete_saves:
                continue
            shutil.rmtree(folder, ignore_errors=True)
            swept.append(leftover)
        with contextlib.suppress(OSError):  # the job's folder has other nodes
            folder.parent.rmdir()
    return swept


def leftovers(place: NodePlace) -> list[Leftover]:
    """Return the ended nodes of other jobs."""
    ended = []
    for folder in _folders(place):
        with _locked_if_ended(folder) as has_ended:
            if has_ended and folder.parent.name != place.job:
                ended.append(_describe(folder))
    return ended


def _folders(place: NodePlace) -> list[Path]:
    """Return the folders of all other nodes of this user: JOB/NODE."""
    return [folder for folder in sorted(place.folder.parents[1].glob("*/*")) if folder != place.folder]


@contextlib.contextmanager
def _locked_if_ended(folder: Path) -> Iterator[bool]:
    """Yield True if all processes of a node have ended; inside the context no process can `lock_as_alive` the node."""
    try:
        descriptor = open_file(folder / _OWNER, os.O_RDWR)
    except (OSError, ConfigError):  # of an earlier release, or of another user: leave it alone
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


def _is_open_file_at(descriptor: int, path: Path) -> bool:
    """Return True if an open file still has this path: it may have been deleted and created again."""
    try:
        return os.path.samestat(os.fstat(descriptor), os.stat(path, follow_symlinks=False))
    except FileNotFoundError:
        return False


def _describe(folder: Path) -> Leftover:
    """Describe the folder of an ended node."""
    file_stats = [path.stat() for path in folder.iterdir() if path.is_file()]
    has_saves = any(read_header(path) is not None for path in folder.glob(f"*{SUFFIX}"))
    has_ended_well = any(folder.glob("done-*.json"))
    newest_s = max((file.st_mtime for file in file_stats), default=0.0)
    return Leftover(
        job=folder.parent.name,
        node=folder.name,
        folder=folder,
        num_bytes=sum(file.st_blocks * 512 for file in file_stats),  # allocated pages; stat(2) counts blocks of 512
        seconds=time.time() - newest_s,
        has_saves=has_saves and not has_ended_well,
    )
