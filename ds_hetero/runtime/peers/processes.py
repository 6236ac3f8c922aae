"""The processes of a job's ranks, as far as this one can look at them: those of its own host and container."""

from __future__ import annotations

import os
import socket
import time
from pathlib import Path

from ds_hetero.common.reading import JsonDict
from ds_hetero.runtime.peers.board import Board

_GONE = "ZX-"
_EXITING = 0x4  # of the kernel's flags of a process: it gives its memory back, which takes a while, and answers nobody


class Processes:
    """The processes of all ranks.

    Args:
        board: by which ranks tell each other who they are.
        rank: of this process.
        size: number of ranks.

    Caller: every rank; waits until all have introduced themselves.
    """

    def __init__(self, board: Board, rank: int, size: int) -> None:
        pid = os.getpid()
        board.introduce(rank, {"host": _host(), "pid": pid, "started": _state(pid, "")[1]})
        processes: list[JsonDict] = []
        while len(processes) < size:
            process = board.process(len(processes))
            if process is None:
                time.sleep(0.005)
            else:
                processes.append(process)
        own_host = processes[rank]["host"]
        self._here = {number: process for number, process in enumerate(processes) if process["host"] == own_host}

    def dead(self) -> list[int]:
        """Ranks of this host whose process is gone."""
        return self._in_state(_GONE)

    def has_lost_rank_0(self) -> bool:
        """Whether rank 0 is of this host, and its process gone."""
        process = self._here.get(0)
        return process is not None and _state(process["pid"], process["started"])[0] in _GONE

    def stopped(self) -> list[int]:
        """Ranks of this host whose process is stopped by a signal."""
        return self._in_state("T")

    def _in_state(self, states: str) -> list[int]:
        return [rank for rank, process in self._here.items() if _state(process["pid"], process["started"])[0] in states]


def _host() -> str:
    """Which processes can see each other's state: those of one host and one container."""
    try:
        return f"{socket.gethostname()} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return f"{socket.gethostname()} {os.getpid()}"


def _state(pid: int, started: str) -> tuple[str, str]:
    """State letter and start time of a process; state "-" where it does not exist or is another one, "X" on its way."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return "-", ""
    state = "X" if int(fields[6]) & _EXITING else fields[0]
    return (state, fields[19]) if started in ("", fields[19]) else ("-", "")
