"""States of processes of this machine, and processes that end with their parent. Linux only."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
from pathlib import Path

from ds_hetero.elastic.node.place import AGENT_PID

_PR_SET_PDEATHSIG = 1  # of prctl(2)


def end_with_agent() -> None:
    """Do `end_with_parent` for a worker; end at once if its agent was killed while the worker was still importing."""
    end_with_parent()
    agent = os.environ.get(AGENT_PID)
    if agent is not None and state_of(int(agent)) in "XZ":
        os._exit(1)


def state_of(pid: int) -> str:
    """Return the state of a process by proc(5): T and t stopped, Z zombie, X not existing."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return "X"


def stopped_children(parent: int) -> list[int]:
    """Return the process ids of the stopped children of a process."""
    children = []
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError, IndexError):  # the process has just ended
            # "PID (COMMAND) STATE PPID ...", and the command may contain blanks and parentheses.
            state, parent_of_entry = (entry / "stat").read_text().rpartition(")")[2].split()[:2]
            if int(parent_of_entry) == parent and state in "Tt":
                children.append(int(entry.name))
    return children


def end_with_parent() -> None:
    """Let the kernel kill this process when its parent ends."""
    if sys.platform == "linux":
        parent = os.getppid()
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
        if os.getppid() != parent:  # it ended before prctl, so no signal will come
            os._exit(1)
