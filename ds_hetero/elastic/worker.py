"""This process as a worker of an elastic job: its name, heartbeat, preemption notice and reason of its end.

SIGTERM means one of two things:

    a file ``broken-<round>.json`` exists    the round is broken and torchrun ends the workers: end at once, because
                                             peers that are gone would never answer
    there is no such file                    the node is preempted: save at the end of the step, then all ranks leave

Imports no torch.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sys
import threading
import time
from dataclasses import dataclass

from ds_hetero.elastic.node.leftovers import lock_as_alive
from ds_hetero.elastic.node.node_server_requests import ask
from ds_hetero.elastic.node.place import AGENT, ROUND, NodePlace, token_of
from ds_hetero.elastic.node.processes import end_with_agent
from ds_hetero.elastic.node.wire import Message

EXIT_CODE_LEFT = 75  # of workers that leave after a committed save: EX_TEMPFAIL of sysexits.h
_HEARTBEAT_S = 1.0
_BREAK_POLL_S = 0.1
# Characters of an error that fit into a reserved page of shared memory, even as JSON escapes of six bytes each.
_MAX_SHORT_ERROR = 500


@dataclass(kw_only=True)
class Worker:
    """A worker of an elastic job: one rank of the present world."""

    place: NodePlace  # its node
    agent: str  # name of its agent
    local_rank: int  # among the workers of its agent
    round_number: int  # of the rendezvous that made this world

    def __post_init__(self) -> None:
        self.token = token_of(self.place.job)
        self.has_notice = False  # preemption: the node is going to be taken away
        self.step = -1  # number of the latest optimizer step; -1 before the first
        self._wakeup = socket.socketpair()

    @property
    def name(self) -> str:
        """Name of the worker: unique among the workers of the job, and the same in every world."""
        return f"{self.agent}-{self.local_rank}"

    def ask_node_server(self, message: Message) -> Message:
        """Send a request to the node's server.

        Raises:
            OSError: the node server cannot be reached, such as while it restarts; or it refuses.
        """
        address = self.place.address()
        if address is None:
            raise OSError(
                f"node {self.place.node} has no node server: there is no node_server.json in {self.place.folder}"
            )
        return ask(address, self.token, message)

    def ask_rendezvous(self, message: Message) -> Message:
        """Send a request to the node server that serves the rendezvous; see `ask_node_server`."""
        address = self.place.read(f"rendezvous-{self.agent}.json")
        if address is None:
            raise OSError(
                f"agent {self.agent} of this node has not joined a rendezvous yet: there is no "
                f"rendezvous-{self.agent}.json in {self.place.folder}"
            )
        return ask((address["host"], address["port"]), self.token, message)

    def start(self) -> None:
        """Handle SIGTERM, start the heartbeat, and let this process end with its agent."""
        end_with_agent()
        lock_as_alive(self.place)
        self.place.remove(f"end-{self.name}.json")
        if threading.current_thread() is threading.main_thread():
            reading, writing = self._wakeup
            writing.setblocking(False)
            # A handler that does nothing, so that Python writes the signal's number to the wakeup socket.
            signal.signal(signal.SIGTERM, lambda *_: None)
            signal.set_wakeup_fd(writing.fileno(), warn_on_full_buffer=False)
            threading.Thread(target=self._take_signals, args=(reading,), daemon=True).start()
        threading.Thread(target=self._beat, daemon=True).start()

    def _take_signals(self, reading: socket.socket) -> None:
        """Handle signals in a thread: the main one may be stuck in a collective and would run no Python handler."""
        while numbers := reading.recv(64):
            if signal.SIGTERM not in numbers:
                continue
            self.has_notice = True
            while not self._is_broken():
                time.sleep(_BREAK_POLL_S)
            os._exit(EXIT_CODE_LEFT)

    def _is_broken(self) -> bool:
        """Return True if the agent has written that the round is over."""
        return self.place.read(f"broken-{self.round_number}.json") is not None

    def _beat(self) -> None:
        """Write a heartbeat every second; runs in a thread."""
        while True:
            self._show_life()
            time.sleep(_HEARTBEAT_S)

    def _show_life(self) -> None:
        """Write a heartbeat."""
        with contextlib.suppress(OSError):  # the job's folder was deleted, so nobody reads the heartbeat
            self.place.show_life(self.name, os.getpid(), self.round_number, has_stepped=self.step >= 0)

    def note_step(self, step: int) -> None:
        """Record an optimizer step; the first one is shown at once, because a round without a step counts as failed."""
        is_first = self.step < 0
        self.step = step
        if is_first:
            self._show_life()

    def note_error(self, text: str, *, is_refusal: bool = False, is_of_peer: bool = False) -> None:
        """Write the reason why this process ends to a file, for its agent.

        Args:
            text: of the error.
            is_refusal: the error is about a setting, so a restart would end with it again.
            is_of_peer: this process ends because another worker has ended, or cannot be reached.
        """
        end = {"error": text, "is_refusal": is_refusal and self.step < 0, "is_of_peer": is_of_peer, "step": self.step}
        try:
            self.place.write(f"end-{self.name}.json", end)
        except OSError:  # the shared memory is full; a short file still fits into the page that is reserved
            with contextlib.suppress(OSError):
                self.place.write(f"end-{self.name}.json", {**end, "error": text[:_MAX_SHORT_ERROR]})

    def note_success(self) -> None:
        """Write a file that tells the agent that the script has finished."""
        with contextlib.suppress(OSError):
            self.place.write(f"done-{self.agent}.json", {"step": self.step})

    def leave(self) -> None:
        """End this process after a committed save; its agent goes to the next rendezvous, or ends with its node."""
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(EXIT_CODE_LEFT)


_worker: Worker | None = None


def is_elastic() -> bool:
    """Whether an agent of an elastic job has started this process."""
    return AGENT in os.environ


def own_worker() -> Worker | None:
    """Return this process as a worker, started by the first call; None in a job that is not elastic."""
    global _worker
    if any(name not in os.environ for name in (AGENT, ROUND, "RANK")):
        return None
    place = NodePlace.of_environment()
    if place is None:
        return None
    if _worker is None:
        _worker = Worker(
            place=place,
            agent=os.environ[AGENT],
            local_rank=int(os.environ.get("LOCAL_RANK", "0")),
            round_number=int(os.environ[ROUND]),
        )
        _worker.start()
    return _worker
