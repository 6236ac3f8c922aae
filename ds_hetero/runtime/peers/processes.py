"""Watch the processes of the ranks on the same host and container: whether they are gone, or stopped by a signal."""

from __future__ import annotations

import os
import socket
import time
from pathlib import Path
from typing import Protocol

from ds_hetero.common.reading import JsonDict

_GONE_STATES = "ZX-"  # letters of `_process_state`: zombie, dead or exiting, and does not exist
_PF_EXITING = 0x4  # flag of Linux: the process frees its memory, which takes a while, and does not answer any more


class Introductions(Protocol):
    """The methods of a `Board` by which ranks tell each other the host and id of their processes."""

    def introduce(self, rank: int, process: JsonDict) -> None:
        """Write the process of ``rank``, which is this rank."""

    def process(self, rank: int) -> JsonDict | None:
        """Return the process that a rank has written; None if the rank has not written it yet."""


class Processes:
    """The processes of the ranks on this host.

    The constructor waits until all ``size`` ranks have written their processes.
    """

    def __init__(self, board: Introductions, rank: int, size: int) -> None:
        pid = os.getpid()
        board.introduce(rank, {"host": _host(), "pid": pid, "started": _process_state(pid, "")[1]})
        processes: list[JsonDict] = []
        while len(processes) < size:
            process = board.process(len(processes))
            if process is None:
                time.sleep(0.005)
            else:
                processes.append(process)
        own_host = processes[rank]["host"]
        self._on_this_host: dict[int, JsonDict] = {}
        for number, process in enumerate(processes):
            if process["host"] == own_host:
                self._on_this_host[number] = process

    def dead(self) -> list[int]:
        """Return ranks of this host whose process is gone."""
        return self._in_state(_GONE_STATES)

    def has_lost_rank_0(self) -> bool:
        """Whether rank 0 is on this host, and its process is gone."""
        process = self._on_this_host.get(0)
        return process is not None and _process_state(process["pid"], process["started"])[0] in _GONE_STATES

    def stopped(self) -> list[int]:
        """Return ranks of this host whose process is stopped by a signal."""
        return self._in_state("T")

    def _in_state(self, states: str) -> list[int]:
        """Return ranks of this host whose process has one of these state letters."""
        ranks = []
        for rank, process in self._on_this_host.items():
            state, _ = _process_state(process["pid"], process["started"])
            if state in states:
                ranks.append(rank)
        return ranks


def _host() -> str:
    """Return a name of this host and container: processes with an equal name see each other in /proc."""
    try:
        return f"{socket.gethostname()} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return f"{socket.gethostname()} {os.getpid()}"


def _process_state(pid: int, started: str) -> tuple[str, str]:
    """Return the state letter and the start time (clock ticks since boot, as text) of a process: /proc/PID/stat.

    The letter is "X" for a process that is exiting. It is "-" if no process has this id, or if the start time is not
    ``started``: then a later process has got the same id. With ``started`` "", any start time will do.
    """
    try:
        # The name of the process, in brackets, may contain spaces. Behind it: state (field 3), ..., flags (9), ...,
        # start time (22), in the numbering of proc_pid_stat(5).
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return "-", ""
    state, flags, start_time = fields[0], int(fields[6]), fields[19]
    if started not in ("", start_time):
        return "-", ""
    return ("X" if flags & _PF_EXITING else state), start_time
