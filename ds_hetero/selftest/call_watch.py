"""Every call under a deadline: a rank that does not answer ends the test with a report instead of a hang."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from ds_hetero.common.text import ranks_text
from ds_hetero.errors import HeteroError
from ds_hetero.runtime.peers.board import Processes
from ds_hetero.selftest.meeting import Failure, Meeting
from ds_hetero.selftest.terminations import Terminations

_POLL_S = 0.25
_CALLS_PER_CHECK = 1000  # checks may make other calls on each rank; their numbers begin alike


@dataclass(frozen=True, slots=True)
class _Call:
    number: int
    name: str
    limit_s: float
    deadline: float


class CallWatch:
    """Watches the calls of this rank from a thread of its own.

    A call that does not end in time, or fails with what is no rule of ds_hetero's, leaves process groups of which
    nobody can tell in which state they are. So the first one on any rank ends the test on all ranks: one of them
    reports it, with where every rank stands, and all processes exit with 1.

    A rank whose process ends is another reason. gloo tells the others, NCCL does not, and launchers end them within
    0.1 s (torchrun's ``--monitor-interval``) by a SIGTERM, after which torchrun waits 30 s for them. So this thread
    looks at the processes of its host, and takes that signal for a failure to be reported instead of ending at once.

    Args:
        meeting: a connection to the store on which no other thread waits.
        limit_s: seconds that a call may take, if it is not given some times as many.
        report: writes the report of a failure: what failed, and a line for where each rank stands.
    """

    def __init__(
        self, meeting: Meeting, device: torch.device, limit_s: float, report: Callable[[Failure, Sequence[str]], None]
    ) -> None:
        self._meeting, self._device, self.limit_s, self._report = meeting, device, limit_s, report
        self._number = 0
        self._call: _Call | None = None
        self._ending = threading.Lock()
        self._closed = threading.Event()
        self._processes = Processes(meeting, meeting.rank, meeting.size)
        self._terminations = Terminations()
        self._thread = threading.Thread(target=self._look, name="ds_hetero selftest watch", daemon=True)
        self._thread.start()

    def begin_check(self, index: int) -> None:
        """Let the numbers of calls be alike on all ranks again."""
        self._number = index * _CALLS_PER_CHECK

    @contextlib.contextmanager
    def call(self, name: str, times: float = 1.0) -> Iterator[None]:
        """End what runs inside in time, on the device too. ``times``: the usual limit to allow."""
        self._number += 1
        limit_s = times * self.limit_s
        call = _Call(self._number, name, limit_s, time.monotonic() + limit_s)
        self._meeting.come_to(call.number, name)
        self._call = call
        try:
            yield
            if self._device.type == "cuda":
                torch.cuda.synchronize(self._device)
        except HeteroError:
            raise  # every rank raises it, at the same place
        except Exception as error:
            self._end(self._failure(call, f"failed: {type(error).__name__}: {error}"))
        finally:
            self._call = None

    def close(self) -> None:
        """Watch no longer."""
        self._closed.set()
        self._thread.join()
        self._terminations.close()

    def _look(self) -> None:
        while not self._closed.wait(_POLL_S):
            call = self._call
            try:
                failure = self._meeting.failure()
            except RuntimeError as error:
                failure = Failure(self._meeting.rank, self._number, "the store", f"does not answer: {error}")
            if failure is None and call is not None and time.monotonic() > call.deadline:
                failure = self._failure(call, f"did not end within {call.limit_s:.0f} s")
            if failure is None and (gone := self._gone()):
                failure = self._failure(call or _Call(self._number, "between two calls", 0.0, 0.0), gone)
            if failure is not None:
                self._end(failure)

    def _gone(self) -> str:
        """Return why other ranks cannot go on, as this one sees it; empty if they can."""
        was_told_to_end = self._terminations.arrived()
        if dead := self._processes.dead():
            return f"{ranks_text(dead)} ended meanwhile: killed, or crashed without a last word"
        if was_told_to_end:
            return "was told to end (SIGTERM), as launchers do when another rank has ended"
        return ""

    def _failure(self, call: _Call, cause: str) -> Failure:
        return Failure(self._meeting.rank, call.number, call.name, cause)

    def _end(self, failure: Failure) -> None:
        """Report, and end this process: its main thread may never come back from where it waits."""
        with self._ending:
            try:
                failure = self._meeting.declare(failure)
                self._meeting.tell_site(_site_of_main_thread())
                if self._meeting.takes_report():
                    self._report(failure, self._meeting.standing(failure.number, self._processes.dead()))
                    self._meeting.end_report()
                else:
                    self._meeting.wait_for_report()
            except RuntimeError as error:  # the store is gone with the rank that kept it
                self._report(failure, [f"rank 0 keeps the store and does not answer: {error}"])
            finally:
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(1)


def _site_of_main_thread() -> str:
    """Function and line that the main thread is in, and the line of this package that led there; no folders."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    sites: list[str] = []
    while frame is not None:
        path, name = Path(frame.f_code.co_filename), frame.f_code.co_name
        inside = "ds_hetero" in path.parts and path.name != Path(__file__).name
        if not sites or inside:
            sites.append(f"{name} ({path.name}:{frame.f_lineno})")
        if inside:
            break
        frame = frame.f_back
    return ", called by ".join(sites)
