"""What processes and folders of a job take now: memory, threads, open files, bytes on disks."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import sys
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
    """Return the reading of this process after a garbage collection, without free pages of glibc.

    Resident memory grows if more of it is in use, or if what is in use is strewn over more pages. Two more numbers tell
    which: ``heap_bytes`` that glibc has given out and not got back, to torch and libraries, and ``python_blocks``,
    pieces of up to 512 bytes that Python has in use. Objects are those that the garbage collector knows: containers,
    not numbers and texts.
    """
    gc.collect()
    libc = ctypes.CDLL("libc.so.6")
    libc.malloc_trim(0)
    reading = read_process(os.getpid())
    reading |= {"heap_bytes": heap_bytes(libc), "python_blocks": sys.getallocatedblocks()}
    return {**reading, "objects": len(gc.get_objects())}


class _MallocInfo(ctypes.Structure):
    """``struct mallinfo2`` of glibc 2.33 and later."""

    _fields_ = [
        (name, ctypes.c_size_t)
        for name in (
            "arena",
            "ordblks",
            "smblks",
            "hblks",
            "hblkhd",  # bytes in blocks that are mapped one by one
            "usmblks",
            "fsmblks",
            "uordblks",  # bytes in use in all arenas
            "fordblks",
            "keepcost",
        )
    ]


def heap_bytes(libc: ctypes.CDLL) -> int:
    """Return the bytes that glibc has given out and not got back."""
    libc.mallinfo2.restype = _MallocInfo
    info = libc.mallinfo2()
    return int(info.uordblks + info.hblkhd)


def read_folder(folder: Path) -> dict[str, int]:
    """Return bytes and number of the files below a folder."""
    sizes = []
    for path in folder.rglob("*"):
        with contextlib.suppress(OSError):  # deleted since
            if path.is_file():
                sizes.append(path.stat().st_size)
    return {"bytes": sum(sizes), "files": len(sizes)}
