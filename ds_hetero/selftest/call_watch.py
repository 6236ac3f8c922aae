"""Watch the calls of the self-test: each has a deadline, and a rank that hangs or dies ends the test with a report."""

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
from ds_hetero.runtime.peers.processes import Processes
from ds_hetero.selftest.store_connection import Failure, StoreConnection
from ds_hetero.selftest.terminations import Terminations

_POLL_S = 0.25
# Ranks may make different calls in a check, so that the numbers of calls differ at its end. Every check begins at a
# multiple of this number, so that the numbers agree again.
_CALLS_PER_CHECK = 1000


@dataclass(frozen=True, slots=True)
class _Call:
    """The call of the self-test that the main thread executes now, with its deadline."""

    number: int  # from `CallWatch.begin_check` on, the same on all ranks
    name: str
    limit_s: float  # seconds that it may take
    deadline: float  # by `time.monotonic`


class CallWatch:
    """Watches the calls of this rank from a background thread.

    A call that does not end in time, or raises anything but a `HeteroError`, leaves process groups in an unknown
    state. So the first such call on any rank ends the test on all ranks: one rank reports it, with the position of
    every rank, and all processes exit with 1.

    A rank whose process ends also ends the test. gloo tells the other ranks, NCCL does not. Launchers then end the
    others with a SIGTERM within 0.1 s (torchrun's ``--monitor-interval``), and torchrun waits 30 s for them. So this
    thread watches the processes of its host, and reports a SIGTERM as a failure instead of ending at once.

    Args:
        connection: a connection to the store on which no other thread waits.
        limit_s: seconds that a call may take; a call may ask for a multiple, see `call`.
        report: writes the report. It gets the failure, and one line for every position that ranks are at.
    """

    def __init__(
        self,
        connection: StoreConnection,
        device: torch.device,
        limit_s: float,
        report: Callable[[Failure, Sequence[str]], None],
    ) -> None:
        self._connection, self._device, self.limit_s, self._report = connection, device, limit_s, report
        self._number = 0
        self._call: _Call | None = None
        self._ending = threading.Lock()
        self._closed = threading.Event()
        self._processes = Processes(connection, connection.rank, connection.size)
        self._terminations = Terminations()
        self._thread = threading.Thread(target=self._poll, name="ds_hetero selftest watch", daemon=True)
        self._thread.start()

    def begin_check(self, index: int) -> None:
        """Set the number of the next call, the same on all ranks.

        Args:
            index: number of the check.
        """
        self._number = index * _CALLS_PER_CHECK

    @contextlib.contextmanager
    def call(self, name: str, times: float = 1.0) -> Iterator[None]:
        """Watch the block inside the context, until the device has finished its work, too.

        A `HeteroError` of the block is raised; every other failure ends the process.

        Args:
            name: of the call, for the report.
            times: the call may take so many times ``limit_s``.
        """
        self._number += 1
        limit_s = times * self.limit_s
        call = _Call(self._number, name, limit_s, time.monotonic() + limit_s)
        self._connection.publish_call(call.number, name)
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
        """Stop the thread, and let SIGTERM end this process again."""
        self._closed.set()
        self._thread.join()
        self._terminations.close()

    def _poll(self) -> None:
        """Look for failures until `close`: a failure of another rank, a missed deadline, a dead process."""
        while not self._closed.wait(_POLL_S):
            call = self._call
            try:
                failure = self._connection.failure()
            except RuntimeError as error:
                failure = Failure(self._connection.rank, self._number, "the store", f"does not answer: {error}")
            if failure is None and call is not None and time.monotonic() > call.deadline:
                failure = self._failure(call, f"did not end within {call.limit_s:.0f} s")
            if failure is None and (reason := self._termination_reason()):
                failure = self._failure(call or _Call(self._number, "between two calls", 0.0, 0.0), reason)
            if failure is not None:
                self._end(failure)

    def _termination_reason(self) -> str:
        """Return a text that says which ranks' processes have ended, or that the launcher ends this process.

        Empty if neither has happened.
        """
        has_sigterm = self._terminations.arrived()
        if dead_ranks := self._processes.dead():
            return f"{ranks_text(dead_ranks)} ended meanwhile: killed, or crashed without a last word"
        if has_sigterm:
            return "was told to end (SIGTERM), as launchers do when another rank has ended"
        return ""

    def _failure(self, call: _Call, cause: str) -> Failure:
        """Return the `Failure` that says that ``call`` has failed on this rank because of ``cause``."""
        return Failure(self._connection.rank, call.number, call.name, cause)

    def _end(self, failure: Failure) -> None:
        """Report the failure and exit with 1, from this thread: the main thread may hang in a call forever."""
        with self._ending:
            try:
                failure = self._connection.declare(failure)
                self._connection.publish_site(_site_of_main_thread())
                if self._connection.claim_report():
                    self._report(failure, self._connection.describe_positions(failure.number, self._processes.dead()))
                    self._connection.end_report()
                else:
                    self._connection.wait_for_report()
            except RuntimeError as error:  # the store is gone with the rank that kept it
                self._report(failure, [f"rank 0 keeps the store and does not answer: {error}"])
            finally:
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(1)


def _site_of_main_thread() -> str:
    """Return the line that the main thread executes.

    For instance "wait (futures.py:12), called by _all_reduce (collectives.py:40)". The second place is the innermost
    line of this package; it is left out if the first one is in the package already. Folders are left out, because they
    may be private.
    """
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    sites: list[str] = []
    while frame is not None:
        path, name = Path(frame.f_code.co_filename), frame.f_code.co_name
        is_in_package = "ds_hetero" in path.parts and path.name != Path(__file__).name
        if not sites or is_in_package:
            sites.append(f"{name} ({path.name}:{frame.f_lineno})")
        if is_in_package:
            break
        frame = frame.f_back
    return ", called by ".join(sites)
