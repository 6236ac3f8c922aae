"""Split brain: keepers of one job that serve rounds without one another find together.

It happens when a link is cut, a stopped machine goes on, or a node comes back by the command that once began the job.
Each keeper asks those of nodes that are missing. The one with the lower `Rounds.epoch` sends its agents to the other;
no step is lost by it that was committed, as both sides trained on the same batches.

    here                          another keeper answers                   done
    any round                     a later epoch                            agents end their workers and go there
    a round runs                  agents wait there for a first round      that keeper is told to send them here
    a round that lacks members    nobody has a later epoch                 the round may begin without them
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from typing import NamedTuple

from ds_hetero.elastic.node.place import NodePlace
from ds_hetero.elastic.node.rounds import Rounds
from ds_hetero.elastic.node.wire import Message

_PROBE_TIMEOUT_S = 1.0
_PROBE_PERIOD_S = 0.1
_PERIODS_FORMING = 10  # between two probes that no round waits for: once a second
_PERIODS_RUNNING = 50  # likewise while a round runs: every five seconds
_MAX_PROBES_AT_ONCE = 32

HostPort = tuple[str, int]
Ask = Callable[[HostPort, Message, float], Message]


class Epoch(NamedTuple):
    """How far the rounds of a keeper are; the larger one of two goes on."""

    number: int
    is_running: bool
    num_here: int  # members of the round that are connected to the keeper
    keeper: str  # its address; decides between equals

    @classmethod
    def of_status(cls, status: Message) -> Epoch:
        """The epoch of another keeper, by what it answers."""
        return cls(status["round"], not status["is_broken"], status["num_here"], str(tuple(status["keeper"])))


class SplitBrainResolver:
    """Probes the other keepers of the job.

    Args:
        lock: of the rounds.
        ask: asks a keeper, with a timeout in seconds.
    """

    def __init__(self, place: NodePlace, rounds: Rounds, lock: AbstractContextManager[object], ask: Ask) -> None:
        self._place, self._rounds, self._lock, self._ask = place, rounds, lock, ask

    def run(self, has_ended: threading.Event) -> None:
        """Probe for as long as the keeper lives: at once where a round has to wait for it."""
        count = 0
        while not has_ended.wait(_PROBE_PERIOD_S):
            count += 1
            with self._lock:
                is_urgent = self._rounds.must_search
                periods = _PERIODS_FORMING if self._rounds.is_broken else _PERIODS_RUNNING
            if is_urgent or count % periods == 0:
                self.probe()

    def probe(self) -> None:
        """Ask once, and act on the answers."""
        with self._lock:
            keepers = self._other_keepers()
        with ThreadPoolExecutor(min(_MAX_PROBES_AT_ONCE, len(keepers)) or 1) as pool:
            answers = list(pool.map(self._status_of, keepers))
        statuses = [(keeper, status) for keeper, status in zip(keepers, answers, strict=True) if status]
        with self._lock:
            epoch = Epoch(*self._rounds.epoch, str(self._place.address()))
            latest = max(((Epoch.of_status(status), keeper) for keeper, status in statuses), default=None)
            if latest is not None and latest[0] > epoch:
                self._send_agents_to(latest[1])
                return
            self._rounds.note_search()
        if epoch.is_running:
            for keeper, status in statuses:
                if status["is_waited_for"] and not status["round"]:
                    with contextlib.suppress(OSError):
                        self._ask(keeper, {"do": "come", "to": self._place.address()}, _PROBE_TIMEOUT_S)

    def _other_keepers(self) -> list[HostPort]:
        """Keepers that may serve other rounds of the job."""
        keepers: list[HostPort] = []
        if self._rounds.number:
            keepers = [(str(host), int(str(port))) for host, port in self._rounds.absent_keepers.values()]
        elif self._rounds.is_waited_for:  # newcomers have come to a keeper whose own agents meet at another one
            files = [self._place.read(path.name) for path in self._place.folder.glob("meeting-*.json")]
            keepers = [(at["host"], at["port"]) for at in files if at is not None]
        return [keeper for keeper in dict.fromkeys(keepers) if keeper != self._place.address()]

    def _status_of(self, keeper: HostPort) -> Message | None:
        """What a keeper says; None where it cannot be reached, or its job has ended."""
        try:
            status = self._ask(keeper, {"do": "status"}, _PROBE_TIMEOUT_S)
        except OSError:
            return None
        return None if status["closed"] or not status["keeper"] else status

    def _send_agents_to(self, keeper: HostPort) -> None:
        if not self._rounds.is_broken:
            self._rounds.break_for_redirect(f"the job goes on at {keeper[0]}:{keeper[1]}", time.monotonic())
        self._rounds.redirect(list(keeper))
