"""Announce when a process waits for the lock of an extension that DeepSpeed compiles.

The processes of a host take turns to compile an extension of torch: each makes a file ``lock`` in the extension's
folder below ``TORCH_EXTENSIONS_DIR``. If a process is killed while it compiles, the file stays, and every later job
waits for its removal forever, without a message.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from pathlib import Path

from torch.utils.file_baton import FileBaton

from ds_hetero.common.announce import announce
from ds_hetero.common.text import time_text
from ds_hetero.engine.patching import Function, Patches, around

ABANDONED_S = 5.0  # wait before a lock is announced that no process has open
COMPILING_S = 60.0  # wait before a lock is announced that a process has open: compiling takes about a minute


def install(patches: Patches) -> None:
    """Let processes announce that they wait for the lock of an extension, as the module's docstring says."""
    patches.replace(FileBaton, "wait", around(_wait))


def _wait(stock: Function, baton: FileBaton) -> None:
    """Replace ``FileBaton.wait``: on a host's first rank, let a thread announce a long wait."""
    has_ended = threading.Event()
    if os.environ.get("LOCAL_RANK", "0") == "0":  # all ranks of a host wait for the same lock
        threading.Thread(target=_announce_wait, args=(Path(baton.lock_file_path), has_ended), daemon=True).start()
    try:
        stock(baton)
    finally:
        has_ended.set()


def _announce_wait(lock: Path, has_ended: threading.Event) -> None:
    """Announce the lock if the wait takes `ABANDONED_S`, or `COMPILING_S` while a process has the lock open."""
    if has_ended.wait(ABANDONED_S):
        return
    if _holders(lock) and has_ended.wait(COMPILING_S - ABANDONED_S):
        return
    with contextlib.suppress(OSError):  # the file has just been removed
        announce(describe_lock(lock))


def describe_lock(lock: Path) -> str:
    """Return text that says which lock a process waits for, who made it when, and what to do.

    Raises:
        OSError: the file does not exist.
    """
    facts = lock.stat()
    made = f"made {time_text(max(0.0, time.time() - facts.st_mtime))} ago by user {_user_name(facts.st_uid)}"
    holders = _holders(lock)
    if holders:
        return f"waits for process {holders[0]}, which compiles an operator and holds {lock} ({made})."
    return (
        f"waits for {lock}, {made}, and no process that can be seen from here has it open: its maker was probably "
        "killed while it compiled. If none compiles on another host either, delete the file and start the job again: "
        "processes that wait do not compile."
    )


def _user_name(user: int) -> str:
    """Return the name of a user, or the number if it has none."""
    import pwd

    try:
        return pwd.getpwuid(user).pw_name
    except KeyError:
        return str(user)


def _holders(lock: Path) -> list[int]:
    """Return the processes of this machine that have the file open, as far as this user may see them."""
    target = os.path.realpath(lock)
    processes = [folder for folder in Path("/proc").iterdir() if folder.name.isdigit()]
    return [int(folder.name) for folder in processes if _has_open(folder, target)]


def _has_open(process: Path, target: str) -> bool:
    """Return whether a process, by its folder in /proc, has a file open."""
    try:
        return any(os.readlink(descriptor) == target for descriptor in (process / "fd").iterdir())
    except OSError:  # the process is another user's, or it has just ended or closed a file
        return False
