"""Run the processes of one part: start them together, receive their messages, and end them with all that they started.

Each process leads a process group of its own, so that the processes that it starts can be ended with it, and no others.
A part that reaches its limit first writes the stacks of its ranks, gets a SIGTERM, and is killed a moment later.
"""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import multiprocessing
import os
import select
import signal
import sys
import threading
import time
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

from benchmarks.first_gpu.parts import Context, Part, Row, environment_of_rank
from benchmarks.measure.ports import free_port

_STACKS_S = 0.5  # for the ranks to write their stacks
_TERM_S = 1.0  # between SIGTERM and SIGKILL, as ``timeout -k``
_KILL_S = 5.0  # for the kernel to end a process that was killed; one that waits for a driver may never end
_OUTPUT_BYTES = 3000  # of the end of a failed rank's output


class Outcome(NamedTuple):
    """How a part ended; ``why`` is empty if it is done."""

    name: str  # "done", "failed", "timed out", "left out"
    why: str = ""


@dataclass(frozen=True)
class Settings:
    """Settings of all parts of a run.

    Args:
        rehearsal: see `Context`.
        start_method: of multiprocessing: "forkserver", or "spawn" if forked processes cannot use CUDA.
        env: variables of all processes.
        preload: modules that the fork server imports.
    """

    rehearsal: bool
    start_method: str = "forkserver"
    env: Mapping[str, str] = field(default_factory=dict)
    preload: tuple[str, ...] = ("benchmarks.first_gpu.preload",)


class Crew:
    """The running processes of a part."""

    def __init__(self, part: Part, settings: Settings, folder: Path, limit_s: float) -> None:
        self.part, self._folder = part, folder
        self._failures: dict[int, str] = {}
        self._done: set[int] = set()
        self._leads_group: set[int] = set()
        self.ended_s: dict[int, float] = {}  # by rank, since the start
        self.outcome: Outcome | None = None
        folder.mkdir(parents=True)
        is_fresh = settings.rehearsal and part.rehearsed_fresh
        server: Any = multiprocessing.get_context("spawn" if is_fresh else settings.start_method)
        if server.get_start_method() == "forkserver":
            server.set_forkserver_preload(list(settings.preload))
        extra = {**settings.env, **part.env} | (dict(part.rehearsed_env) if settings.rehearsal else {})
        port = free_port()
        self.began = time.monotonic()
        self.deadline = self.began + limit_s
        self._processes: list[Any] = []
        self._rank_of: dict[Connection, int] = {}
        for rank in range(part.ranks):
            receiver, sender = server.Pipe(duplex=False)
            env = {**environment_of_rank(rank, part.ranks, port), **extra}
            process = server.Process(
                target=_main, args=(part, rank, settings.rehearsal, env, str(folder), sender), daemon=True
            )
            with mock.patch.dict(os.environ, env):  # a new interpreter imports before it comes to `_main`
                process.start()
            sender.close()
            self._processes.append(process)
            self._rank_of[receiver] = rank

    @property
    def connections(self) -> list[Connection]:
        """Connections on which messages may still come."""
        return list(self._rank_of)

    @property
    def seconds(self) -> float:
        """Seconds since the start."""
        return time.monotonic() - self.began

    def receive(self, connection: Connection) -> Row | None:
        """Receive one message; return its row, None for other messages."""
        rank = self._rank_of[connection]
        try:
            kind, value = connection.recv()
        except (EOFError, ConnectionResetError):
            kind, value = "gone", None
        if kind == "started":
            self._leads_group.add(rank)
        elif kind == "row":
            return {"rank": rank, **value} if self.part.ranks > 1 else value
        else:
            self._note_end(connection, rank, kind, value)
        return None

    def _note_end(self, connection: Connection, rank: int, kind: str, value: str | None) -> None:
        """Record that a rank is done or has failed."""
        del self._rank_of[connection]
        connection.close()
        self.ended_s[rank] = self.seconds
        if kind == "done":
            self._done.add(rank)
        else:
            self._failures[rank] = value if kind == "failed" and value else self._cause_of_death(rank)
            self.deadline = min(self.deadline, time.monotonic() + self.part.grace_s)
        if not self._rank_of:
            self._settle()

    def _settle(self) -> None:
        if not self._failures:
            self.outcome = Outcome("done")
        else:
            by_rank = (f"rank {rank}: {text}" for rank, text in sorted(self._failures.items()))
            self.outcome = Outcome("failed", "\n".join(by_rank))

    def _cause_of_death(self, rank: int) -> str:
        """Return why a rank ended without a message."""
        process = self._processes[rank]
        process.join(_TERM_S)
        code = process.exitcode
        how = f"signal {signal.Signals(-code).name}" if code is not None and code < 0 else f"exit code {code}"
        return f"ended with {how} and without an exception"

    def end(self) -> None:
        """End all remaining processes: each has timed out, or waited for a rank that failed."""
        running = [rank for rank in self._rank_of.values() if self._processes[rank].is_alive()]
        for rank in running:
            self._signal(rank, signal.SIGUSR1, group=False)
        if running:
            time.sleep(_STACKS_S)
        for rank in running:
            self._signal(rank, signal.SIGTERM)
        deadline = time.monotonic() + _TERM_S
        for rank in running:
            self._processes[rank].join(max(0.0, deadline - time.monotonic()))
        for rank, process in enumerate(self._processes):
            self._signal(rank, signal.SIGKILL)
            process.join(_KILL_S)
        if self.outcome is None:
            self.outcome = self._outcome_of_unfinished()
        if alive := [rank for rank, process in enumerate(self._processes) if process.is_alive()]:
            name, why = self.outcome
            text = f"rank {', '.join(map(str, alive))} could not be killed"
            self.outcome = Outcome("failed" if name == "done" else name, f"{why}\n{text}".strip())

    def _outcome_of_unfinished(self) -> Outcome:
        if self._failures:
            self._settle()
            assert self.outcome is not None
            return self.outcome
        waiting = ", ".join(map(str, sorted(self._rank_of.values())))
        return Outcome("timed out", f"rank {waiting} did not end within {self.seconds:.0f} s")

    def _signal(self, rank: int, number: signal.Signals, group: bool = True) -> None:
        """Send a rank a signal, and the processes that it has started, if it leads a group."""
        process = self._processes[rank]
        with contextlib.suppress(ProcessLookupError):
            if group and rank in self._leads_group:
                os.killpg(process.pid, number)
            elif process.is_alive():
                os.kill(process.pid, number)

    def outputs(self) -> dict[str, str]:
        """Return the end of each rank's output, with the stacks of its last moment."""
        texts = {}
        for file in sorted(self._folder.glob("output*")):
            text = file.read_text(errors="replace")
            if text:
                texts[file.name] = text[-_OUTPUT_BYTES:]
        return texts


def wait_for(crews: Sequence[Crew], until: float) -> list[tuple[Crew, Connection]]:
    """Return connections of ``crews`` with a message; none if it is ``until``."""
    from multiprocessing.connection import wait

    crew_of = {connection: crew for crew in crews for connection in crew.connections}
    remaining_s = until - time.monotonic()
    if remaining_s <= 0:
        return []
    if not crew_of:
        time.sleep(remaining_s)
    ready = wait(list(crew_of), timeout=remaining_s)
    return [(crew_of[each], each) for each in ready]  # type: ignore[index, misc]


# --- in a process of the part -------------------------------------------------------------------------


def _main(part: Part, rank: int, rehearsal: bool, env: Mapping[str, str], folder: str, sender: Connection) -> None:
    """Run a rank of a part."""
    os.setpgid(0, 0)
    output = os.open(f"{folder}/output{rank}", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(output, 1)
    os.dup2(output, 2)
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    threading.Thread(target=_end_with_the_runner, args=(sender,), daemon=True).start()
    sender.send(("started", None))
    os.environ.update(env)
    gc.freeze()  # a collection would copy all pages of the server
    context = Context(
        rank=rank,
        ranks=part.ranks,
        rehearsal=rehearsal,
        folder=Path(folder),
        report=lambda row: sender.send(("row", row)),
    )
    try:
        if rehearsal:
            import torch

            torch.set_num_threads(1)
        if rehearsal and part.strict:
            _run_strictly(part, context)
        else:
            part.run(context)
        sender.send(("done", None))
    except BaseException:
        sender.send(("failed", traceback.format_exc(limit=-12)))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # the interpreter's own way out waits for process groups


def _end_with_the_runner(sender: Connection) -> None:
    """End this process, and those that it has started, when the runner that reads its messages has ended.

    A runner that was killed cannot do so, and its fork server lives as long as one of its processes.
    """
    poll = select.poll()
    poll.register(sender.fileno(), 0)  # an error alone: the other end is closed
    poll.poll()
    os.killpg(0, signal.SIGKILL)


def _run_strictly(part: Part, context: Context) -> None:
    from tests.strict_group import install

    device = install(str(context.folder), context.rank)
    part.run(context)
    device.drain()  # with what others wait for
