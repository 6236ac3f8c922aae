"""This process as a worker of an elastic job: its names, notice, signs of life and last words. Imports no torch.

SIGTERM means one of two things. Where the round is broken, torchrun ends the workers: this one ends at once, without
waiting for peers that are gone. Else the node was given notice: the next step's end takes a save, and all leave.
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

from ds_hetero.elastic.node.keeper_requests import ask
from ds_hetero.elastic.node.leftovers import hold
from ds_hetero.elastic.node.place import AGENT, ROUND, NodePlace, token_of
from ds_hetero.elastic.node.processes import end_with_agent
from ds_hetero.elastic.node.wire import Message

LEFT = 75  # exit code of workers that leave after a commit
_BEAT_S = 1.0
_BREAK_POLL_S = 0.1
_SHORT = 500  # characters; each takes six bytes of JSON at most


@dataclass(kw_only=True)
class Worker:
    """A worker of an elastic job."""

    place: NodePlace
    agent: str
    local_rank: int  # among the workers of its agent
    round_number: int  # of the world that it belongs to

    def __post_init__(self) -> None:
        self.token = token_of(self.place.job)
        self.has_notice = False
        self.step = -1  # optimizer steps done
        self._wakeup = socket.socketpair()

    @property
    def name(self) -> str:
        """The same over all worlds, and no other worker's."""
        return f"{self.agent}-{self.local_rank}"

    def ask_keeper(self, message: Message) -> Message:
        """Ask the node's keeper, which may be about to start again.

        Raises:
            OSError: it cannot be reached, or refuses.
        """
        address = self.place.address()
        if address is None:
            raise OSError(f"node {self.place.node} has no keeper")
        return ask(address, self.token, message)

    def ask_meeting(self, message: Message) -> Message:
        """Ask the keeper that serves the rendezvous; see `ask_keeper`."""
        at = self.place.read(f"meeting-{self.agent}.json")
        if at is None:
            raise OSError("the agent has no meeting")
        return ask((at["host"], at["port"]), self.token, message)

    def start(self) -> None:
        """Take notice by SIGTERM, say that this process lives, and end with the agent."""
        end_with_agent()
        hold(self.place)
        self.place.remove(f"end-{self.name}.json")
        if threading.current_thread() is threading.main_thread():
            reading, writing = self._wakeup
            writing.setblocking(False)
            signal.signal(signal.SIGTERM, lambda *_: None)
            signal.set_wakeup_fd(writing.fileno(), warn_on_full_buffer=False)
            threading.Thread(target=self._take_signals, args=(reading,), daemon=True).start()
        threading.Thread(target=self._beat, daemon=True).start()

    def _take_signals(self, reading: socket.socket) -> None:
        """In a thread: the main one may wait for the dead, and sees no signal."""
        while numbers := reading.recv(64):
            if signal.SIGTERM not in numbers:
                continue
            self.has_notice = True
            while not self._is_broken():
                time.sleep(_BREAK_POLL_S)
            os._exit(LEFT)

    def _is_broken(self) -> bool:
        return self.place.read(f"broken-{self.round_number}.json") is not None

    def _beat(self) -> None:
        while True:
            self._show_life()
            time.sleep(_BEAT_S)

    def _show_life(self) -> None:
        with contextlib.suppress(OSError):  # the node's folder is gone, and so is the node
            self.place.show_life(self.name, os.getpid(), self.round_number, has_stepped=self.step >= 0)

    def note_step(self, step: int) -> None:
        """Note an optimizer step; the first one shows that the round came to something."""
        is_first, self.step = self.step < 0, step
        if is_first:
            self._show_life()

    def note_error(self, text: str, *, is_refusal: bool = False, is_of_peer: bool = False) -> None:
        """Leave behind why this process ends, for its agent.

        Args:
            is_refusal: another start would end in the same way.
            is_of_peer: it ends because another one has ended, or cannot be reached.
        """
        end = {"error": text, "is_refusal": is_refusal and self.step < 0, "is_of_peer": is_of_peer, "step": self.step}
        try:
            self.place.write(f"end-{self.name}.json", end)
        except OSError:  # the shared memory is full, where short files have room all the same
            with contextlib.suppress(OSError):
                self.place.write(f"end-{self.name}.json", {**end, "error": text[:_SHORT]})

    def note_success(self) -> None:
        """Leave behind that the script has come to its end."""
        with contextlib.suppress(OSError):
            self.place.write(f"done-{self.agent}.json", {"step": self.step})

    def leave(self) -> None:
        """End after a commit; the agent meets the others again, or leaves with its node."""
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(LEFT)


_own: Worker | None = None


def own_worker() -> Worker | None:
    """This process as a worker, started at the first call; None in a job that is not elastic."""
    global _own
    if any(name not in os.environ for name in (AGENT, ROUND, "RANK")) or (place := NodePlace.of_environment()) is None:
        return None
    if _own is None:
        _own = Worker(
            place=place,
            agent=os.environ[AGENT],
            local_rank=int(os.environ.get("LOCAL_RANK", "0")),
            round_number=int(os.environ[ROUND]),
        )
        _own.start()
    return _own
