"""Resolve a split brain: two node servers of one job that serve rounds independently of each other.

The causes are a cut link, a stopped machine that continues, or a node that is restarted with the job's first command.
Each node server asks the servers of missing nodes for their status. The server with the lower `Rounds.epoch` sends its
agents to the other. No committed step is lost, because both sides trained on the same batches.

    this node server             answer of another node server          action
    has any round                it has a later epoch                   agents end their workers and go to it
    has a running round          agents wait there for a first round    tell it to send them here
    has a round that misses      no node server has a later epoch       the round may begin without the lost members
    lost members
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
# Probe periods between two probes, unless a round waits for a probe; chosen, never measured.
_PERIODS_FORMING = 10  # one second
_PERIODS_RUNNING = 50  # five seconds
_MAX_PROBES_AT_ONCE = 32

HostPort = tuple[str, int]
Ask = Callable[[HostPort, Message, float], Message]


class Epoch(NamedTuple):
    """Progress of a node server's rounds. Of two node servers, the rounds of that with the larger epoch go on."""

    number: int
    is_running: bool
    num_here: int  # members of the round that are connected to the node server
    node_server: str  # its address; decides between equals

    @classmethod
    def from_status(cls, status: Message) -> Epoch:
        """Return the epoch in a node server's answer to "status"."""
        return cls(status["round"], not status["is_broken"], status["num_here"], str(tuple(status["node_server"])))


class SplitBrainResolver:
    """Probes the other node servers of the job.

    Args:
        lock: of the rounds.
        ask: sends a request to a node server, with a timeout in seconds.
    """

    def __init__(self, place: NodePlace, rounds: Rounds, lock: AbstractContextManager[object], ask: Ask) -> None:
        self._place, self._rounds, self._lock, self._ask = place, rounds, lock, ask

    def run(self, has_ended: threading.Event) -> None:
        """Probe until ``has_ended``; at once if a round waits for the result."""
        count = 0
        while not has_ended.wait(_PROBE_PERIOD_S):
            count += 1
            with self._lock:
                is_urgent = self._rounds.must_search
                periods = _PERIODS_FORMING if self._rounds.is_broken else _PERIODS_RUNNING
            if is_urgent or count % periods == 0:
                self.probe()

    def probe(self) -> None:
        """Ask the other node servers once, and act on their answers."""
        with self._lock:
            node_servers = self._other_node_servers()
        with ThreadPoolExecutor(min(_MAX_PROBES_AT_ONCE, len(node_servers)) or 1) as pool:
            answers = list(pool.map(self._status_of, node_servers))
        statuses = [(node_server, status) for node_server, status in zip(node_servers, answers, strict=True) if status]
        with self._lock:
            epoch = Epoch(*self._rounds.epoch, str(self._place.address()))
            epochs = [(Epoch.from_status(status), node_server) for node_server, status in statuses]
            if epochs:
                latest_epoch, latest_node_server = max(epochs)
                if latest_epoch > epoch:
                    self._send_agents_to(latest_node_server)
                    return
            self._rounds.note_search()
        if not epoch.is_running:
            return
        for node_server, status in statuses:
            waits_for_first_round = status["is_waited_for"] and not status["round"]
            if waits_for_first_round:
                with contextlib.suppress(OSError):
                    self._ask(node_server, {"do": "come", "to": self._place.address()}, _PROBE_TIMEOUT_S)

    def _other_node_servers(self) -> list[HostPort]:
        """Return the addresses of node servers that may serve other rounds of the job."""
        node_servers: list[HostPort] = []
        if self._rounds.number:
            node_servers = [(str(host), int(str(port))) for host, port in self._rounds.absent_node_servers.values()]
        elif self._rounds.is_waited_for:
            # Newcomers wait at this node server, while the agents of its node may be in a round of another node server.
            for path in self._place.folder.glob("rendezvous-*.json"):
                address = self._place.read(path.name)
                if address is not None:
                    node_servers.append((address["host"], address["port"]))
        return [node_server for node_server in dict.fromkeys(node_servers) if node_server != self._place.address()]

    def _status_of(self, node_server: HostPort) -> Message | None:
        """Return a node server's status; None if it cannot be reached, or its job has ended."""
        try:
            status = self._ask(node_server, {"do": "status"}, _PROBE_TIMEOUT_S)
        except OSError:
            return None
        return None if status["closed"] or not status["node_server"] else status

    def _send_agents_to(self, node_server: HostPort) -> None:
        """Break the round if it runs, and redirect the waiting agents. The other agents follow at the next probe."""
        if not self._rounds.is_broken:
            self._rounds.break_for_redirect(f"the job goes on at {node_server[0]}:{node_server[1]}", time.monotonic())
        self._rounds.redirect(list(node_server))
