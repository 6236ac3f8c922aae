"""One thread per process that answers where this rank is, asks when it waits in vain, and ends what cannot go on.

It costs one small request to the store four times a second and looks at nothing else, unless this rank has been in the
same place for a second. All requests to the store are made by this thread, for a store may be gone, or stopped.
"""

from __future__ import annotations

import atexit
import os
import socket
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.distributed as dist

from ds_hetero import errors
from ds_hetero.runtime.peers.board import ENDED, FAILED, STOPPED, Board, End, Status, default_group
from ds_hetero.runtime.peers.calls import own_calls
from ds_hetero.runtime.peers.diagnosis import GONE, Diagnosis, Evidence, diagnose
from ds_hetero.runtime.peers.place import own_place

__all__ = ["Watch", "before_forced_exit", "current_watch", "start_watch"]

_TICK_S = 0.25
_PATIENCE_S = 1.0  # in one place, before this rank asks where the others are; doubled after every answer
_LONGEST_PATIENCE_S = 60.0
_ANSWER_S = 1.2  # within which the others answer
_SAID_S = 0.9  # for rank 0 to say what this rank would say too
_GRACE_S = 1.25  # for a rank that waits in vain to be freed by its backend: `_SAID_S`, and for the other to end
_LINGER_S = 2.0  # for the others to read the last words, on the rank that keeps the store


class Watch:
    """What this rank knows of the others, by a thread of its own.

    Args:
        group: of all ranks of the job.
        timeout_s: after which a rank that waits in vain may take one that does not answer for gone.
    """

    def __init__(self, group: dist.ProcessGroup, timeout_s: float) -> None:
        self.group, self._timeout_s = group, timeout_s
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        self.diagnosis: Diagnosis | None = None
        self._board = Board()
        self._processes = _introduce(self._board, self.rank, self.size)
        self._answered = self._board.asked()
        self._place, self._since_s = own_place(), time.monotonic()
        self._num_calls, self._patience_s = own_calls.number, _PATIENCE_S
        self._diagnosed_s: float | None = None
        self._has_lost_peer = False
        self._own_end: End | None = None
        self._settled = threading.Event()  # a diagnosis is there, or will not come
        self._waits_for_rank_0 = False  # to say its last words
        self._ends: list[End] = []
        self._wake = threading.Event()
        self._is_over = False
        self._thread = threading.Thread(target=self._run, name="ds_hetero.peers", daemon=True)
        self._thread.start()
        atexit.register(self._end_of_process)

    def explain(self) -> Diagnosis | None:
        """Find out which rank is gone, after the backend has reported that one is; None if nobody is to blame."""
        if self.diagnosis is None and self._thread.is_alive():
            self._settled.clear()
            self._has_lost_peer = True
            self._wake.set()
            if not self._settled.wait(2 * _ANSWER_S):  # the store does not answer: its process may be stopped
                self._note(self._diagnose_alone())
        return self.diagnosis

    def say_last_words(self, how: str, text: str) -> None:
        """Have the other ranks know why this one ends, the first time; see `End`."""
        self._own_end = self._own_end or End(self.rank, how, text)
        self._wake.set()

    def is_said_by_rank_0(self, text: str) -> bool:
        """Whether rank 0 ends with ``text`` too; waits a moment for its last words, unless this rank is rank 0."""
        self._waits_for_rank_0 = self.rank > 0
        deadline = time.monotonic() + _SAID_S
        while self._waits_for_rank_0 and self._thread.is_alive() and time.monotonic() < deadline:
            if any(end.rank == 0 for end in self._ends):
                break
            time.sleep(0.01)
        self._waits_for_rank_0 = False
        return any(end.rank == 0 != self.rank and end.text == text for end in self._ends)

    def _end_of_process(self) -> None:
        self.say_last_words(ENDED, "")
        self._thread.join(_LINGER_S + 1.0)

    # --- the thread -----------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while not self._is_over:
                self._wake.wait(_TICK_S)
                self._wake.clear()
                if dist.group.WORLD is not self.group:  # destroyed: this rank is done with the others
                    self.say_last_words(ENDED, "")
                self._tick()
        except RuntimeError:  # the store is gone
            self._note(self._diagnose_alone())
        finally:
            self._settled.set()

    def _tick(self) -> None:
        place, now_s = own_place(), time.monotonic()
        if place.mark != self._place.mark or own_calls.number != self._num_calls:
            self._place, self._num_calls = place, own_calls.number
            self._since_s, self._patience_s = now_s, _PATIENCE_S
        if self._own_end is not None:
            self._write_end(self._own_end)
            return
        self._answer()
        unchanged_s = now_s - self._since_s
        if self.diagnosis is not None:
            self._end_if_stuck(now_s, unchanged_s)
        elif self._has_lost_peer or any(end.how == FAILED for end in self._ends):
            self._inquire()
        elif unchanged_s >= self._patience_s and self._board.may_ask(self._board.asked()):
            # A group that DeepSpeed made has a timeout of its own, half an hour, whatever the job's is.
            self._has_lost_peer = self._place.waits and unchanged_s >= self._timeout_s
            self._patience_s = self._next_patience_s(unchanged_s)
            self._inquire()

    def _next_patience_s(self, unchanged_s: float) -> float:
        """Doubled, but not beyond the moment at which the job's timeout is over."""
        doubled_s = min(2 * self._patience_s, _LONGEST_PATIENCE_S)
        return min(doubled_s, self._timeout_s) if unchanged_s < self._timeout_s else doubled_s

    def _answer(self) -> None:
        asked = self._board.asked()
        if asked > self._answered:
            self._answered = asked
            unchanged_s = time.monotonic() - self._since_s
            place = self._place
            status = Status(asked, place.text, place.waits, place.in_script, unchanged_s, own_calls.history())
            self._board.write_status(self.rank, status)
            self._ends = self._board.ends()
            settled = self._board.diagnosis()
            if settled is not None:
                self._note(Diagnosis(*settled))

    def _inquire(self) -> None:
        """Ask all ranks where they are, and settle on a diagnosis if their answers allow one."""
        number = self._board.ask()
        deadline = time.monotonic() + _ANSWER_S
        while self.diagnosis is None and self._own_end is None:
            self._answer()
            is_late = time.monotonic() > deadline
            evidence = self._evidence(number, is_late)
            is_complete = is_late or len(evidence.statuses) + len(evidence.ends) >= self.size
            urgent = bool(evidence.dead or evidence.ends)
            diagnosis = diagnose(evidence) if is_complete or urgent else None
            if diagnosis is not None:
                self._note(Diagnosis(*self._board.settle(list(diagnosis))))
                self._board.ask()
            elif is_complete:
                break
            else:
                time.sleep(0.02)
        if self._has_lost_peer:
            self._settled.set()
            self._has_lost_peer = False

    def _note(self, diagnosis: Diagnosis | None) -> None:
        if self.diagnosis is None and diagnosis is not None:
            self.diagnosis, self._diagnosed_s = diagnosis, time.monotonic()
            self._settled.set()

    def _end_if_stuck(self, now_s: float, unchanged_s: float) -> None:
        """End this process where the backend does not free it: nobody will ever answer it."""
        assert self.diagnosis is not None and self._diagnosed_s is not None
        grace_s = _GRACE_S if self.diagnosis.error == GONE else 0.1  # who went another way closes no connection
        if min(now_s - self._diagnosed_s, unchanged_s) >= grace_s and self._place.waits:
            sys.stdout.flush()
            name = f"{errors.__name__}.{self.diagnosis.error}"
            print(f"{name}: {self.diagnosis.text}", file=sys.stderr, flush=True)
            for call in _before_forced_exit:
                call(f"{name}: {self.diagnosis.text}")
            self._write_end(End(self.rank, STOPPED, self.diagnosis.text))
            os._exit(1)

    def _write_end(self, end: End) -> None:
        """Write the last words; wait while they, or those of others, are still to be read.

        Rank 0 may keep the store, which the others need until they have ended.
        """
        self._board.write_end(end)
        if end.how != ENDED or self.rank == 0:
            self._board.ask()
        deadline = time.monotonic() + _LINGER_S
        while time.monotonic() < deadline:
            self._ends = self._board.ends()
            over = {*self._dead(), *self._in_state("T"), *(other.rank for other in self._ends)}
            is_needed = self.rank == 0 and len(over) < self.size
            if not (is_needed or self._waits_for_rank_0):
                break
            time.sleep(0.02)
        self._is_over = True

    # --- evidence ----------------------------------------------------------------------------------------

    def _evidence(self, number: int, is_late: bool) -> Evidence:
        read = {rank: self._board.status(rank) for rank in range(self.size)}
        statuses = {rank: status for rank, status in read.items() if status is not None and status.asked >= number}
        ends = self._ends = self._board.ends()
        ended = {end.rank for end in ends}
        return Evidence(
            statuses={rank: status for rank, status in statuses.items() if rank not in ended},
            ends=ends,
            dead=self._dead(),
            stopped=self._in_state("T"),
            silent=[rank for rank in range(self.size) if rank not in statuses] if is_late else [],
            has_lost_peer=self._has_lost_peer,
        )

    def _diagnose_alone(self) -> Diagnosis:
        """Who is gone, without the store: a process may take a moment to end after its connections have."""
        deadline = time.monotonic() + _ANSWER_S
        while time.monotonic() < deadline:
            dead = self._dead()
            if 0 in dead and all(end.rank != 0 for end in self._ends):
                dead = [0]  # it would have kept the store until the others end, had it not been killed
            if dead or self._in_state("T"):
                alone = diagnose(Evidence({}, self._ends, dead, self._in_state("T"), has_lost_peer=True))
                if alone is not None:
                    return alone
            time.sleep(0.02)
        return Diagnosis(
            GONE, "rank 0 or the launcher, whichever keeps the store of the job, cannot be reached any more."
        )

    def _dead(self) -> list[int]:
        """Ranks of this host whose process is gone."""
        return self._in_state("ZX-")

    def _in_state(self, states: str) -> list[int]:
        own_host = self._processes[self.rank]["host"]
        here = {rank: process for rank, process in enumerate(self._processes) if process["host"] == own_host}
        return [rank for rank, process in here.items() if _state(process["pid"], process["started"])[0] in states]


_current: Watch | None = None


_before_forced_exit: list[Callable[[str], object]] = []


def before_forced_exit(call: Callable[[str], object]) -> Callable[[], None]:
    """Have ``call`` be called with the reason before a process that waits in vain is ended, in the watch's thread.

    Returns:
        What takes this back.
    """
    _before_forced_exit.append(call)
    return lambda: _before_forced_exit.remove(call) if call in _before_forced_exit else None


def current_watch() -> Watch | None:
    """The watch of this process, where one runs."""
    return _current


def start_watch(timeout_s: float) -> Watch:
    """The watch over the default process group; the first call starts it, on every rank of the group.

    Args:
        timeout_s: of the group's collectives, see `Watch`.
    """
    global _current
    if _current is None or _current.group is not dist.group.WORLD:
        _current = Watch(default_group(), timeout_s)
    return _current


def _introduce(board: Board, rank: int, size: int) -> list[dict[str, Any]]:
    """Tell the others which process this rank is, and wait until all have done so."""
    pid = os.getpid()
    board.introduce(rank, {"host": _host(), "pid": pid, "started": _state(pid, "")[1]})
    processes: list[dict[str, Any]] = []
    while len(processes) < size:
        process = board.process(len(processes))
        if process is None:
            time.sleep(0.005)
        else:
            processes.append(process)
    return processes


def _host() -> str:
    """Which processes can see each other's state: those of one host and one container."""
    try:
        return f"{socket.gethostname()} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return f"{socket.gethostname()} {os.getpid()}"


def _state(pid: int, started: str) -> tuple[str, str]:
    """State letter and start time of a process; state "-" where it does not exist or is another one."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return "-", ""
    return (fields[0], fields[19]) if started in ("", fields[19]) else ("-", "")
