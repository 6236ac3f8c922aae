"""Say for which lock DeepSpeed waits while it compiles an operator.

torch lets the ranks of a host compile an extension one at a time, by a file `lock` in its folder below
``TORCH_EXTENSIONS_DIR``. A process that is killed while it compiles leaves the file, and every later job waits for it
without end and without a word.
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

ABANDONED_S = 5.0  # until a lock is told that no process has open
COMPILING_S = 60.0  # the same where one has; an operator of DeepSpeed's takes a minute


def install(patches: Patches) -> None:
    """Let waiting processes say so."""
    patches.replace(FileBaton, "wait", around(_wait))


def _wait(stock: Function, baton: FileBaton) -> None:
    has_ended = threading.Event()
    if os.environ.get("LOCAL_RANK", "0") == "0":  # all ranks of a host wait for the same
        threading.Thread(target=_tell, args=(Path(baton.lock_file_path), has_ended), daemon=True).start()
    try:
        stock(baton)
    finally:
        has_ended.set()


def _tell(lock: Path, has_ended: threading.Event) -> None:
    if has_ended.wait(ABANDONED_S):
        return
    if _holders(lock) and has_ended.wait(COMPILING_S - ABANDONED_S):
        return
    with contextlib.suppress(OSError):  # it has just gone
        announce(describe_lock(lock))


def describe_lock(lock: Path) -> str:
    """Say what waits, who has made the lock and when, and what helps. Raises `OSError`: it is gone."""
    facts = lock.stat()
    made = f"made {time_text(max(0.0, time.time() - facts.st_mtime))} ago by user {_user_name(facts.st_uid)}"
    holders = _holders(lock)
    if holders:
        return f"waits for process {holders[0]}, which compiles an operator and holds {lock} ({made})."
    return (
        f"waits for {lock}, {made}, and no process that can be seen from here has it open: its maker was probably "
        "killed while it compiled. If none compiles on another host either, delete the file; this process then goes on."
    )


def _user_name(user: int) -> str:
    import pwd

    try:
        return pwd.getpwuid(user).pw_name
    except KeyError:
        return str(user)


def _holders(lock: Path) -> list[int]:
    """Processes of this machine that have the file open, as far as this user may see."""
    target = os.path.realpath(lock)
    processes = [folder for folder in Path("/proc").iterdir() if folder.name.isdigit()]
    return [int(folder.name) for folder in processes if _has_open(folder, target)]


def _has_open(process: Path, target: str) -> bool:
    try:
        return any(os.readlink(one) == target for one in (process / "fd").iterdir())
    except OSError:  # another user's, or it has just ended or closed a file
        return False
