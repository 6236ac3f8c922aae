"""What processes and folders of a job take now: memory, threads, open files, bytes on disks."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
from pathlib import Path


def read_process(pid: int) -> dict[str, int]:
    """Return resident bytes, shared memory among them, threads and open files of a process; empty if it has ended."""
    with contextlib.suppress(OSError):
        status = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
        return {
            "resident_bytes": 1024 * int(status["RssAnon"].split()[0]),
            "shared_bytes": 1024 * int(status["RssShmem"].split()[0]),
            "threads": int(status["Threads"]),
            "open_files": len(os.listdir(f"/proc/{pid}/fd")),
        }
    return {}


def read_own_process() -> dict[str, int]:
    """Return the reading of this process after a garbage collection, without free pages of glibc."""
    gc.collect()
    ctypes.CDLL("libc.so.6").malloc_trim(0)
    return {**read_process(os.getpid()), "objects": len(gc.get_objects())}


def read_folder(folder: Path) -> dict[str, int]:
    """Return bytes and number of the files below a folder."""
    sizes = []
    for path in folder.rglob("*"):
        with contextlib.suppress(OSError):  # deleted since
            if path.is_file():
                sizes.append(path.stat().st_size)
    return {"bytes": sum(sizes), "files": len(sizes)}
