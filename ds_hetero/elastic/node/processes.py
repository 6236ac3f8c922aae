"""Processes of this machine: what state they are in, and child processes that end with their parent. Linux only."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
from pathlib import Path

from ds_hetero.elastic.node.place import AGENT_PID

_PR_SET_PDEATHSIG = 1


def end_with_agent() -> None:
    """As `end_with_parent`, for a worker; at once where its agent was killed while the worker still imported."""
    end_with_parent()
    agent = os.environ.get(AGENT_PID)
    if agent is not None and state_of(int(agent)) in "XZ":
        os._exit(1)


def state_of(pid: int) -> str:
    """The state of a process as the kernel writes it, such as T for stopped; X where there is none."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return "X"


def stopped_children(parent: int) -> list[int]:
    """Process ids of the children of a process that are stopped."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError, IndexError):  # it has ended meanwhile
            state, of = (entry / "stat").read_text().rpartition(")")[2].split()[:2]
            if int(of) == parent and state in "Tt":
                found.append(int(entry.name))
    return found


def end_with_parent() -> None:
    """Let the kernel kill this process when its parent ends."""
    if sys.platform == "linux":
        parent = os.getppid()
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
        if os.getppid() != parent:
            os._exit(1)
