"""Where ranks meet while collectives are in question: the launcher's key-value store.

A store knows who has come to which call, also when that call hangs. It is the one at MASTER_ADDR and MASTER_PORT, kept
by torchrun's agent, or else by rank 0.

Every call under a deadline: a rank that does not answer ends the test with a report instead of a hang.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch.distributed import HashStore, TCPStore  # type: ignore[attr-defined]
from torch.distributed.distributed_c10d import PrefixStore, Store

from ds_hetero.common.text import ranks_by_value
from ds_hetero.engine.process import is_kept_by_launcher, name_of_start
from ds_hetero.errors import HeteroError, PeerError

_REPORT_S = 10.0  # for another rank to write the report of a failure
_ANSWER_S = 3.0  # for a rank to say where it is


@dataclass(frozen=True, slots=True)
class Failure:
    """Why the test cannot go on."""

    rank: int
    number: int  # of the call, which counts alike on all ranks
    call: str  # what the rank was doing
    cause: str


class Meeting:
    """A connection to the store. ``store``: for keys of this test alone."""

    def __init__(self, store: Store, rank: int, size: int) -> None:
        self.store, self.rank, self.size = store, rank, size

    def gather(self, name: str, value: Any, limit_s: float) -> list[Any]:
        """Return all ranks' values, in order; every rank calls it once per ``name``. Raises `PeerError`: who did not.

        Args:
            value: of this rank, as JSON can carry it.
        """
        keys = [f"{name}/{rank}" for rank in range(self.size)]
        self.store.set(keys[self.rank], json.dumps(value))
        try:
            self.store.wait(keys, timedelta(seconds=limit_s))
        except RuntimeError as error:
            raise PeerError(f"{self._absent(keys)} did not come to {name} within {limit_s:.0f} s") from error
        return [json.loads(self.store.get(key)) for key in keys]

    def _absent(self, keys: list[str]) -> str:
        """The ranks whose keys are missing."""
        try:
            absent = [str(rank) for rank, key in enumerate(keys) if not self.store.check([key])]
        except RuntimeError:
            return "some rank, and rank 0 no longer keeps the store that says which:"
        if self.rank == 0:
            time.sleep(_ANSWER_S)  # the others ask as well
        return f"rank {', '.join(absent)}"

    def come_to(self, number: int, call: str) -> None:
        """Note that this rank has come to a call."""
        self.store.set(f"at/{self.rank}", json.dumps([number, call]))

    def tell_site(self, site: str) -> None:
        """Note which line of code this rank is at, once a call has failed somewhere."""
        self.store.set(f"site/{self.rank}", site)

    def standing(self, number: int) -> list[str]:
        """Where every rank is, seen from call ``number``: one line for the ranks that are at the same place."""
        with contextlib.suppress(RuntimeError):  # who does not answer in time is told below
            self.store.wait([f"site/{rank}" for rank in range(self.size)], timedelta(seconds=_ANSWER_S))
        places = ((rank, f"{self._place(rank, number)}; {self._site(rank)}") for rank in range(self.size))
        return [f"rank {', '.join(map(str, ranks))}: {place}" for place, ranks in ranks_by_value(places).items()]

    def _place(self, rank: int, number: int) -> str:
        key = f"at/{rank}"
        if not self.store.check([key]):
            return "has not started"
        at, call = json.loads(self.store.get(key))
        if at == number:
            return "has come to the call"
        return f"has not come to the call, its last one is {call}" if at < number else f"is past the call, at {call}"

    def _site(self, rank: int) -> str:
        key = f"site/{rank}"
        if not self.store.check([key]):
            return "does not answer: its process has ended, or is stopped"
        return f"its process is in {self.store.get(key).decode()}"

    def declare(self, failure: Failure) -> Failure:
        """Make a failure that of all ranks, unless there is one already; return the one that counts."""
        return Failure(**json.loads(self.store.compare_set("failure", "", json.dumps(asdict(failure)))))

    def failure(self) -> Failure | None:
        """The failure that a rank has declared, if any."""
        return Failure(**json.loads(self.store.get("failure"))) if self.store.check(["failure"]) else None

    def takes_report(self) -> bool:
        """Whether this rank is the first to ask, and so is to write the report of a failure."""
        return bool(self.store.add("reporters", 1) == 1)

    def end_report(self) -> None:
        """Let the other ranks end: the report is written."""
        self.store.set("reported", "1")

    def wait_for_report(self) -> None:
        """Wait until another rank has written the report, but not for long."""
        try:
            self.store.wait(["reported"], timedelta(seconds=_REPORT_S))
        except RuntimeError:
            return

    def leave(self, limit_s: float) -> None:
        """End together, when rank 0 has written the report: it may keep the store, and goes last."""
        keys = [f"left/{rank}" for rank in range(1, self.size)]
        if self.rank == 0:
            self.end_report()
            if keys:
                self.store.wait(keys, timedelta(seconds=limit_s))
        else:
            self.store.wait(["reported"], timedelta(seconds=limit_s))
            self.store.set(f"left/{self.rank}", "1")


def meet(limit_s: float) -> tuple[Meeting, Meeting]:
    """Two connections to the launcher's store or to one of its own. Raises `PeerError`: nobody keeps or reaches it.

    Args:
        limit_s: seconds to wait for whoever keeps the store.
    """
    if "RANK" not in os.environ:
        own = HashStore()
        return Meeting(own, 0, 1), Meeting(own, 0, 1)
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    keeps = rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    meetings: list[Meeting] = []
    name = ""
    for is_master in (keeps, False):
        try:
            store = TCPStore(
                address,
                port,
                is_master=is_master,
                timeout=timedelta(seconds=limit_s),
                wait_for_workers=False,
                multi_tenant=True,
            )
        except RuntimeError as error:
            whose = "this rank" if is_master else "rank 0, or torchrun's agent,"
            raise PeerError(
                f"rank {rank} reaches no store at MASTER_ADDR and MASTER_PORT within {limit_s:.0f} s: {whose} does not "
                "keep one there. Is rank 0 started, is the port free, and does the address lead to its host?"
            ) from error
        if not meetings and is_kept_by_launcher(address, port):
            name = name_of_start(store, rank, size)
        meetings.append(Meeting(PrefixStore(f"ds_hetero/selftest/{name}", store), rank, size))
    return meetings[0], meetings[1]


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

    Args:
        meeting: a connection to the store that nobody else waits on.
        report: writes the report of a failure: what failed, and a line for where each rank stands.
    """

    def __init__(
        self, meeting: Meeting, device: torch.device, limit_s: float, report: Callable[[Failure, Sequence[str]], None]
    ) -> None:
        self._meeting, self._device, self._limit_s, self._report = meeting, device, limit_s, report
        self._number = 0
        self._call: _Call | None = None
        self._ending = threading.Lock()
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._look, name="ds_hetero selftest watch", daemon=True)
        self._thread.start()

    def begin_check(self, index: int) -> None:
        """Let the numbers of calls be alike on all ranks again."""
        self._number = index * _CALLS_PER_CHECK

    @contextlib.contextmanager
    def call(self, name: str, times: float = 1.0) -> Iterator[None]:
        """End what runs inside in time, on the device too. ``times``: the usual limit to allow."""
        self._number += 1
        limit_s = times * self._limit_s
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

    def _look(self) -> None:
        while not self._closed.wait(_POLL_S):
            call = self._call
            try:
                failure = self._meeting.failure()
            except RuntimeError as error:
                failure = Failure(self._meeting.rank, self._number, "the store", f"does not answer: {error}")
            if failure is None and call is not None and time.monotonic() > call.deadline:
                failure = self._failure(call, f"did not end within {call.limit_s:.0f} s")
            if failure is not None:
                self._end(failure)

    def _failure(self, call: _Call, cause: str) -> Failure:
        return Failure(self._meeting.rank, call.number, call.name, cause)

    def _end(self, failure: Failure) -> None:
        """Report, and end this process: its main thread may never come back from where it waits."""
        with self._ending:
            try:
                failure = self._meeting.declare(failure)
                self._meeting.tell_site(_site_of_main_thread())
                if self._meeting.takes_report():
                    self._report(failure, self._meeting.standing(failure.number))
                    self._meeting.end_report()
                else:
                    self._meeting.wait_for_report()
            except RuntimeError as error:  # the store is gone with the rank that kept it
                self._report(failure, [f"rank 0 keeps the store and does not answer: {error}"])
            finally:
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(1)


@dataclass(frozen=True, kw_only=True)
class Session:
    """One run of the self-test on one rank, once the default process group exists."""

    rank: int
    size: int
    device: torch.device
    watch: CallWatch  # sets every call a deadline
    nodes: tuple[tuple[int, ...], ...]  # by node, its ranks
    quick: bool


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
