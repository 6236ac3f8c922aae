"""Rendezvous of torchrun's agents at a node server: ``--rdzv-backend ds_hetero``, a plugin of ``torchrun.handlers``.

An agent has one connection to the node server that serves the rendezvous (`rounds`). The server sends a message when
the round is broken; then ``num_nodes_waiting`` returns 1, and torchrun ends the workers and calls ``next_rendezvous``.
If the server dies, or is silent as behind a cut link, the agents connect to the node server of another member of their
round, and their workers go on.

Every round has a store and an address for the workers of its own, made by the agent of rank 0, so no data of an earlier
round is read. (torchrun's default rendezvous reads addresses of dead ranks, pytorch issue 135712.)
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Sequence
from importlib.metadata import version
from itertools import pairwise
from pathlib import Path

from torch.distributed import DistError, TCPStore  # type: ignore[attr-defined]
from torch.distributed.elastic.rendezvous import (
    RendezvousClosedError,
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStoreInfo,
)

from ds_hetero.elastic.node import place as place_of
from ds_hetero.elastic.node.leftovers import lock_as_alive, sweep
from ds_hetero.elastic.node.node_server import SILENCE_S
from ds_hetero.elastic.node.node_server_start import (
    CONNECT_TIMEOUT_S,
    address_towards,
    end_node_server,
    is_local_address,
    is_served,
    start_node_server,
)
from ds_hetero.elastic.node.place import NodePlace, token_of
from ds_hetero.elastic.node.processes import state_of, stopped_children
from ds_hetero.elastic.node.round_store import STORE_TIMEOUT, interface_of, store_at
from ds_hetero.elastic.node.wire import Message, Wire, WireError, connect
from ds_hetero.errors import ConfigError

logger = logging.getLogger(__name__)

AGENT_BACKEND = "ds_hetero_agent"  # the backend that `agent` registers, whether or not entry points are installed
ENDED_WELL = "the job has ended well"
PRIVATE_NAMES = (
    # Called at the end of a forked worker, see `fork_server`.
    "threading:_shutdown",
    "atexit:_run_exitfuncs",
)
"""Private names of Python that this module builds on; checked in the tests."""

# Times are chosen, never measured.
_NEXT_NODE_SERVER_S = 3.0  # how long a node server that cannot be reached is tried before the next one
_GIVE_UP_S = 120.0  # how long node servers are tried before the agent ends
_HEARTBEAT_S = 1.0
_RETRY_PERIOD_S = 0.1
_INTERFACE_VARIABLES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
# A worker that is not stopped may be silent for this many times longer: it may load, compile, or get no CPU time.
_BUSY_FACTOR = 10


class AgentRendezvous(RendezvousHandler):
    """torchrun's rendezvous handler of one agent.

        state      _is_waiting  _broken   _closed     torchrun
        waiting    True         None      None        waits in `next_rendezvous` for the round
        running    False        None      None        runs the workers
        broken     False        a reason  None        sees `num_nodes_waiting` = 1, ends the workers, meets
        closed     any          any       a reason    ends, because `next_rendezvous` raises

        event                                 transition
        message "round"                       waiting -> running
        message "broken"                      running -> broken
        torchrun calls `next_rendezvous`      broken -> waiting; running -> waiting if the workers have ended
        message "closed", or no node server   any -> closed
        lost connection, "redirect"           none: connect to another node server, and send "meet" or "attach"

    Two threads use the state under ``_news``: torchrun's, and `_listen`. `_send_heartbeats` only sends.

    Args:
        agent: name of this agent, which never changes.
        endpoint: host and port of the node server that serves the rendezvous at first.
        address: under which other nodes reach this one.
        terms: properties that all agents must have in common.
        backend: name under which torchrun has asked for the handler.
    """

    def __init__(
        self, place: NodePlace, agent: str, endpoint: tuple[str, int], address: str, terms: Message, backend: str
    ) -> None:
        self._backend = backend
        self._place, self._agent, self._address, self._terms = place, agent, address, terms
        self._token = token_of(place.job)
        # An agent that was killed first tries the node server that it had last: the rendezvous may have moved away from
        # ``endpoint``.
        latest = place.read(f"rendezvous-{agent}.json")
        latest_endpoints = [] if latest is None else [(str(latest["host"]), int(latest["port"]))]
        self._endpoints = list(dict.fromkeys([*latest_endpoints, endpoint]))  # in the order in which they are tried
        self._connected_to = endpoint
        self._wire: Wire | None = None
        self._is_connected = False
        self._news = threading.Condition()
        self._round: Message = {"number": 0, "members": []}
        self._store_address: tuple[str, int] | None = None  # of the present round
        self._broken: str | None = None
        self._closed: str | None = None
        self._is_waiting = False
        self._round_began_s = time.monotonic()
        self._last: Message = {}  # `LastWords` to send with the next "meet"
        self._has_left = threading.Event()
        self._store: TCPStore | None = None

    def get_backend(self) -> str:
        """Return the name under which torchrun has asked for the handler."""
        return self._backend

    @property
    def use_agent_store(self) -> bool:
        """True: workers use the store of the round, which is new and has no keys of earlier ranks."""
        return True

    def get_run_id(self) -> str:
        """Return the name of the job."""
        return self._place.job

    def is_closed(self) -> bool:
        """Return True if the job has ended."""
        return self._closed is not None

    def set_closed(self) -> None:
        """Do nothing: torchrun calls it when an agent ends, but the other agents shall go on."""

    def num_nodes_waiting(self) -> int:
        """Return 1 if the round is broken; torchrun then ends its workers and calls `next_rendezvous`."""
        if self._broken is None and self._closed is None:
            return 0
        try:
            self._place.write(f"broken-{self._round['number']}.json", {"reason": self._broken or self._closed})
        except OSError as error:
            logger.warning("torchrun has to kill the workers: the file that ends them cannot be written: %s", error)
        return 1

    def next_rendezvous(self) -> RendezvousInfo:
        """Wait for the next round; return this agent's rank, the number of agents and the round's store.

        Waits again if a member is lost before this agent has reached the store.

        Raises:
            RendezvousClosedError: the job has ended; the message is the reason.
        """
        self._last = self._last_words()
        while True:
            begun_round = self._meet()
            self._last = {}
            try:
                return self._information(begun_round)
            except (DistError, OSError) as error:
                logger.warning("a member was lost during the rendezvous, which is repeated: %s", error)

    def _meet(self) -> Message:
        """Come to the rendezvous, and wait until a round begins. Raises `RendezvousClosedError`: the job has ended."""
        previous_number = self._round["number"]
        with self._news:
            self._is_waiting = True
            self._broken = None
            self._store_address = None
            self._send_if_connected(self._first_message("meet"))
        if not self._is_connected:
            self._is_connected = True
            self._connect()
            threading.Thread(target=self._listen, daemon=True).start()
            threading.Thread(target=self._send_heartbeats, daemon=True).start()
        with self._news:
            while self._is_waiting and self._closed is None:
                self._news.wait()
            if self._closed is not None:
                raise RendezvousClosedError(self._closed)
            assert self._round["number"] > previous_number
            return self._round

    def _information(self, begun_round: Message) -> RendezvousInfo:
        """Create the round's store, or connect to it; set the environment of the workers."""
        rank = begun_round["rank"]
        world_size = len(begun_round["members"])
        if rank == 0:
            self._store = store_at(self._address)
            store_address = (self._address, self._store.port)
            self._send_if_connected({"do": "store", "store": store_address, "number": begun_round["number"]})
        else:
            store_address = self._wait_for_store_address()
            self._store = TCPStore(*store_address, is_master=False, wait_for_workers=False, timeout=STORE_TIMEOUT)
        os.environ.update(
            {
                place_of.JOB: self._place.job,
                place_of.NODE: self._place.node,
                place_of.AGENT: self._agent,
                place_of.AGENT_PID: str(os.getpid()),
                place_of.ROUND: str(begun_round["number"]),
                # All agents have the same number of workers, see `_terms`.
                "TORCH_ELASTIC_WORKER_IDENTICAL": "1",
            }
        )
        interface = interface_of(self._address)
        if interface is not None:
            # By default, gloo listens at the address of the host's name, and NCCL at all addresses.
            for name in _INTERFACE_VARIABLES:
                os.environ.setdefault(name, interface)
        return RendezvousInfo(self._store, rank, world_size, RendezvousStoreInfo(*store_address))

    def _wait_for_store_address(self) -> tuple[str, int]:
        """Return the address of the store, which rank 0's agent sends. Raises `WireError`: the round ended first."""
        with self._news:
            while self._store_address is None and self._broken is None and self._closed is None:
                self._news.wait()
            if self._store_address is None:
                reason = self._broken or self._closed
                raise WireError(f"the round ended before rank 0's agent sent the address of its store: {reason}")
            return self._store_address

    def shutdown(self) -> bool:
        """Leave the job; the other agents go on."""
        self._has_left.set()
        is_done = self._place.read(f"done-{self._agent}.json") is not None
        wire, self._wire = self._wire, None
        if wire is not None:
            with contextlib.suppress(OSError):
                wire.send({"do": "leave", "is_done": is_done})
            wire.close()
        return True

    @property
    def reason(self) -> str | None:
        """Reason why the job has ended; None while it runs."""
        return self._closed

    def _first_message(self, kind: str) -> Message:
        """Return the first message of a connection: "meet" or "attach", see `messages`."""
        info = {
            "node": self._place.node,
            "address": self._address,
            "node_server": self._place.address(),
            "terms": self._terms,
            "card": os.environ.get(place_of.CARD),
        }
        keys = [key for key in ("number", "members", "node_servers") if key in self._round]
        latest_round = {key: self._round[key] for key in keys}
        return {"do": kind, "agent": self._agent, "info": info, "round": latest_round, "last": self._last}

    def _last_words(self) -> Message:
        """Return `LastWords` of the workers of the previous round: the first error that is not about a lost peer."""
        words: Message = {}
        for path in sorted(self._place.folder.glob(f"end-{self._agent}-*.json")):
            words_of_worker = self._place.read(path.name)
            if words_of_worker is not None and (not words or words["is_of_peer"]):
                words = words_of_worker
            path.unlink(missing_ok=True)
        return {**words, "has_stepped": any(beat["has_stepped"] for _, beat in self._heartbeats())}

    def _heartbeats(self) -> list[tuple[Path, Message]]:
        """Return the latest heartbeat of each worker in the present round, with its file."""
        heartbeats = []
        for path in self._place.folder.glob(f"beat-{self._agent}-*.json"):
            beat = self._place.read(path.name)
            if beat is not None and beat["round"] == self._round["number"]:
                heartbeats.append((path, beat))
        return heartbeats

    def _connect(self) -> None:
        """Connect to the first node server that answers; close the rendezvous if none answers for `_GIVE_UP_S`.

        The first endpoint is tried alone for `_NEXT_NODE_SERVER_S`, then the first two in turn, then the first three,
        and so on. So the agents of a round, which all have the same list, do not scatter over several node servers.
        """
        begin_s = time.monotonic()
        latest_error = ""
        while time.monotonic() - begin_s < _GIVE_UP_S and not self._has_left.is_set():
            num_endpoints = 1 + int((time.monotonic() - begin_s) / _NEXT_NODE_SERVER_S)
            for endpoint in self._endpoints[:num_endpoints]:
                try:
                    wire = connect(*endpoint, self._token, CONNECT_TIMEOUT_S)
                    wire.timeout_s = SILENCE_S
                    # Under the lock: otherwise `_meet` could change the state after "attach" was sent, and would not
                    # send "meet" over this connection.
                    with self._news:
                        wire.send(self._first_message("meet" if self._is_waiting else "attach"))
                        self._wire = wire
                        self._connected_to = endpoint
                except OSError as error:
                    latest_error = f"{endpoint[0]}:{endpoint[1]}: {error}"
                    continue
                try:
                    self._place.write(f"rendezvous-{self._agent}.json", {"host": endpoint[0], "port": endpoint[1]})
                except OSError as error:
                    logger.warning("workers of node %s cannot reach the rendezvous: %s", self._place.node, error)
                return
            time.sleep(_RETRY_PERIOD_S)
        with self._news:
            self._closed = f"no node server of job {self._place.job} could be reached: {latest_error}"
            self._news.notify_all()

    def _listen(self) -> None:
        """Receive messages, and connect to another node server when the connection is lost; runs in a thread."""
        while not self._has_left.is_set() and self._closed is None:
            wire = self._wire
            try:
                if wire is None:
                    raise WireError("this agent is not connected to a node server")
                self._apply_message(wire.receive())
            except (OSError, ValueError, AttributeError):
                if self._has_left.is_set() or self._closed is not None:
                    return
                if wire is not None:
                    wire.close()
                self._connect()

    def _apply_message(self, message: Message) -> None:
        """Apply a message of the node server. Raises `WireError` for a redirect: `_listen` then connects anew."""
        with self._news:
            if "round" in message:
                self._round = message["round"]
                self._is_waiting = False
                self._broken = None
                self._round_began_s = time.monotonic()
                node_servers = [tuple(info["node_server"]) for info in self._round["infos"] if info.get("node_server")]
                self._endpoints = list(dict.fromkeys([self._connected_to, *node_servers]))
            elif "store" in message and message["number"] == self._round["number"]:
                self._store_address = tuple(message["store"])
            elif "redirect" in message:
                host, port = message["redirect"]
                self._endpoints = list(dict.fromkeys([(str(host), int(port)), *self._endpoints]))
                raise WireError("the agents meet at another node server")
            elif "broken" in message and not self._is_waiting:
                self._broken = message["broken"]
            elif "closed" in message or "error" in message:
                self._closed = message.get("closed") or message["error"]
            self._news.notify_all()

    def _send_if_connected(self, message: Message) -> None:
        """Send a message. If the connection is lost, `_listen` makes a new one, which starts with `_first_message`."""
        wire = self._wire
        try:
            if wire is not None:
                wire.send(message)
        except OSError:
            wire.close()  # type: ignore[union-attr]

    def _send_heartbeats(self) -> None:
        """Send heartbeats of this agent, and watch the heartbeats of its workers; runs in a thread."""
        while not self._has_left.wait(_HEARTBEAT_S):
            self._send_if_connected({"do": "alive"})
            self._end_silent_workers()

    def _end_silent_workers(self) -> None:
        """Kill silent workers: stopped ones after ``SILENCE`` seconds, others after `_BUSY_FACTOR` times as long."""
        limit_s = float(os.environ.get(place_of.SILENCE, "30"))
        heartbeats = self._heartbeats()
        for path, beat in heartbeats:
            with contextlib.suppress(OSError):
                silent_s = time.time() - path.stat().st_mtime
                pid = int(beat["pid"])
                if silent_s > limit_s and (state_of(pid) in "Tt" or silent_s > _BUSY_FACTOR * limit_s):
                    path.unlink()
                    os.kill(pid, signal.SIGKILL)
        is_round_old = not self._is_waiting and time.monotonic() - self._round_began_s > limit_s
        if is_round_old and not heartbeats:  # workers that were stopped before their first heartbeat
            for pid in stopped_children(os.getpid()):
                with contextlib.suppress(OSError):
                    os.kill(pid, signal.SIGKILL)


def create_handler(params: RendezvousParameters) -> RendezvousHandler:
    """Create the handler of an agent; start the node's server if none runs.

    Args:
        params: of torchrun: ``--rdzv-id`` is the name of the job, ``--rdzv-endpoint`` the address of the first node's
            node server, which may not run yet.

    Raises:
        ConfigError: a name or the endpoint is invalid.
    """
    host, _, port = params.endpoint.rpartition(":")
    if not host or not port.isdigit() or not 0 < int(port) < 65536:
        raise ConfigError(f"--rdzv-endpoint must be HOST:PORT with a port of its own; got {params.endpoint!r}.")
    node = os.environ.get(place_of.NODE) or socket.gethostname()
    place = NodePlace.of(params.run_id, node)
    lock_as_alive(place)
    sweep(place)
    address = params.local_addr or address_towards(host, int(port))
    agent = os.environ.get(place_of.AGENT) or f"{node}-0"
    if not is_served(place):
        local_port = int(port) if is_local_address(host) else 0
        rules = f'{{"min_agents": {params.min_nodes}, "agents_at_start": {params.max_nodes}}}'
        try:
            node_server = start_node_server(place, address, local_port, rules)
        except ConfigError:
            if not local_port:
                raise
            # A node server of another node on this machine has the port already, as in tests.
            node_server = start_node_server(place, address, 0, rules)
        atexit.register(end_node_server, node_server, place, agent)
    return AgentRendezvous(place, agent, (host, int(port)), address, _terms(), params.backend)


def get_handler() -> Callable[[RendezvousParameters], RendezvousHandler]:
    """Entry point of ``torchrun.handlers``."""
    return create_handler


def _terms() -> Message:
    """Return properties that all agents must have in common: releases, and the number of workers of an agent."""
    releases = {f"release of {name}": version(name) for name in ("torch", "deepspeed", "transformers")}
    return {"number of workers of an agent": _worker_count(sys.argv), **releases}


_WORKER_COUNT_OPTIONS = ("nproc-per-node", "nproc_per_node")


def _worker_count(arguments: Sequence[str]) -> str:
    """Return torchrun's ``--nproc-per-node N`` or ``--nproc-per-node=N`` on the command line; its default is 1."""
    for option, following in pairwise(arguments):
        if option.strip("-") in _WORKER_COUNT_OPTIONS:
            return following
    for argument in arguments:
        option, _, value = argument.partition("=")
        if option.strip("-") in _WORKER_COUNT_OPTIONS:
            return value
    return "1"
