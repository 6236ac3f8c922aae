"""Rendezvous of torchrun's agents at a keeper: ``--rdzv-backend ds_hetero``, an entry point of ``torchrun.handlers``.

An agent keeps one connection to the keeper that serves the rendezvous (`rounds`). It is told when the round is broken,
and its ``num_nodes_waiting`` says so to torchrun, which ends the workers and meets again. If that keeper is gone, or
silent as one behind a cut link, the agents go to the keeper of the next member of their round, while their workers go
on.

Every round has a store of its own, kept by the agent of rank 0, and an address of its own for the workers: nothing of a
round before is read again (torchrun's default reads the addresses of the dead, pytorch issue 135712).
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
from ds_hetero.elastic.node.keeper import SILENCE_S
from ds_hetero.elastic.node.keeper_start import (
    CONNECT_TIMEOUT_S,
    address_towards,
    end_keeper,
    is_own,
    is_served,
    start_keeper,
)
from ds_hetero.elastic.node.leftovers import hold, sweep
from ds_hetero.elastic.node.place import NodePlace, token_of
from ds_hetero.elastic.node.processes import state_of, stopped_children
from ds_hetero.elastic.node.round_store import STORE_TIMEOUT, interface_of, store_at
from ds_hetero.elastic.node.wire import Message, Wire, WireError, connect
from ds_hetero.errors import ConfigError

logger = logging.getLogger(__name__)

AGENT_BACKEND = "ds_hetero_agent"  # of our own agents, which need no entry point
ENDED_WELL = "the job has ended well"
PRIVATE_NAMES = (
    "torch.distributed.elastic.agent.server.api:SimpleElasticAgent._assign_worker_ranks",  # its environment variable
    "threading:_shutdown",  # the next two: how a forked worker ends, see `warm`
    "atexit:_run_exitfuncs",
)
"""Private names that this room builds on; checked in the tests."""

_NEXT_KEEPER_S = 3.0  # with a keeper that cannot be reached, before the next one is tried
_GIVE_UP_S = 120.0
_ALIVE_S = 1.0
_INTERFACE_VARIABLES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
_BUSY_TIMES = 10  # a worker that loads, compiles or gets no share of its machine may say nothing for so much longer


class KeeperRendezvous(RendezvousHandler):
    """The handler of one agent.

        state      _is_meeting  _broken  _closed    what torchrun does
        meeting    True         None     None       waits in `next_rendezvous` for the round
        running    False        None     None       runs the workers
        broken     False        a reason None       is told by `num_nodes_waiting`, ends the workers, meets
        closed     any          any      a reason   ends: `next_rendezvous` raises

    A message "round" leads from meeting to running, "broken" from running to broken, "closed" from any to closed; a
    lost connection, or "redirect", leads to another keeper and leaves the state as it is.

    Args:
        agent: name of this agent, the same over its life.
        endpoint: of the keeper that serves the rendezvous at first.
        address: under which other nodes reach this one.
        terms: what all agents must share.
        backend: name under which it was asked for.
    """

    def __init__(
        self, place: NodePlace, agent: str, endpoint: tuple[str, int], address: str, terms: Message, backend: str
    ) -> None:
        self._backend = backend
        self._place, self._agent, self._address, self._terms = place, agent, address, terms
        self._token = token_of(place.job)
        # One that was killed goes where it was: the rendezvous may have left the keeper that it was begun at.
        at = place.read(f"meeting-{agent}.json")
        last = [] if at is None else [(str(at["host"]), int(at["port"]))]
        self._endpoints = list(dict.fromkeys([*last, endpoint]))
        self._at = endpoint  # of the present connection
        self._wire: Wire | None = None
        self._is_connected = False
        self._news = threading.Condition()
        self._round: Message = {"number": 0, "members": []}
        self._store_at: tuple[str, int] | None = None  # of the present round
        self._broken: str | None = None
        self._closed: str | None = None
        self._is_meeting = False
        self._began_s = time.monotonic()  # the present round
        self._last: Message = {}
        self._has_left = threading.Event()
        self._store: TCPStore | None = None

    def get_backend(self) -> str:
        """The name under which torchrun finds it."""
        return self._backend

    @property
    def use_agent_store(self) -> bool:
        """Yes: the store of the round is new, and workers find nothing of ranks before in it."""
        return True

    def get_run_id(self) -> str:
        """The name of the job."""
        return self._place.job

    def is_closed(self) -> bool:
        """Whether the job has ended."""
        return self._closed is not None

    def set_closed(self) -> None:
        """Nothing: an agent that ends leaves, and never ends the job of the others."""

    def num_nodes_waiting(self) -> int:
        """1 if the round is broken, which makes torchrun end its workers and call `next_rendezvous`."""
        if self._broken is None and self._closed is None:
            return 0
        try:
            self._place.write(f"broken-{self._round['number']}.json", {"reason": self._broken or self._closed})
        except OSError as error:
            logger.warning("workers are not told that the round is over, and torchrun has to kill them: %s", error)
        return 1

    def next_rendezvous(self) -> RendezvousInfo:
        """Meet; again if somebody is lost before the store of the round is reached.

        Raises:
            RendezvousClosedError: the job has ended, with its reason.
        """
        self._last = self._last_words()
        while True:
            round_ = self._meet()
            self._last = {}
            try:
                return self._information(round_)
            except (DistError, OSError) as error:
                logger.warning("somebody was lost amid the meeting, meeting again: %s", error)

    def _meet(self) -> Message:
        before = self._round["number"]
        with self._news:
            self._is_meeting, self._broken, self._store_at = True, None, None
            self._say_or_lose(self._hello("meet"))
        if not self._is_connected:
            self._is_connected = True
            self._connect()
            threading.Thread(target=self._listen, daemon=True).start()
            threading.Thread(target=self._say_alive, daemon=True).start()
        with self._news:
            while self._is_meeting and self._closed is None:
                self._news.wait()
            if self._closed is not None:
                raise RendezvousClosedError(self._closed)
            assert self._round["number"] > before
            return self._round

    def _information(self, round_: Message) -> RendezvousInfo:
        """Make or reach the store of the round."""
        rank, size = round_["rank"], len(round_["members"])
        if rank == 0:
            self._store = store_at(self._address)
            at = (self._address, self._store.port)
            self._say_or_lose({"do": "store", "store": at, "number": round_["number"]})
        else:
            with self._news:
                while self._store_at is None and self._broken is None and self._closed is None:
                    self._news.wait()
                if self._store_at is None:
                    raise WireError(self._broken or self._closed or "no store")
                at = self._store_at
            self._store = TCPStore(at[0], at[1], is_master=False, wait_for_workers=False, timeout=STORE_TIMEOUT)
        os.environ.update(
            {
                place_of.JOB: self._place.job,
                place_of.NODE: self._place.node,
                place_of.AGENT: self._agent,
                place_of.AGENT_PID: str(os.getpid()),
                place_of.ROUND: str(round_["number"]),
                "TORCH_ELASTIC_WORKER_IDENTICAL": "1",  # as the terms demand
            }
        )
        interface = interface_of(self._address)
        if interface is not None:
            for name in _INTERFACE_VARIABLES:  # gloo and NCCL would listen where the host's name leads, or anywhere
                os.environ.setdefault(name, interface)
        return RendezvousInfo(self._store, rank, size, RendezvousStoreInfo(*at))

    def shutdown(self) -> bool:
        """Leave; the job of the others goes on."""
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
        """Why the job has ended; None while it has not."""
        return self._closed

    def _hello(self, kind: str) -> Message:
        keeper = self._place.address()
        info = {"node": self._place.node, "address": self._address, "keeper": keeper, "terms": self._terms}
        info["card"] = os.environ.get(place_of.CARD)
        round_ = {name: self._round[name] for name in ("number", "members", "keepers") if name in self._round}
        return {"do": kind, "agent": self._agent, "info": info, "round": round_, "last": self._last}

    def _last_words(self) -> Message:
        """The error that the workers of the round before have left behind, if any, and whether they had stepped."""
        words: Message = {}
        for path in sorted(self._place.folder.glob(f"end-{self._agent}-*.json")):
            of_worker = self._place.read(path.name)
            if of_worker is not None and (not words or words["is_of_peer"]):
                words = of_worker
            path.unlink(missing_ok=True)
        return {**words, "has_stepped": any(beat["has_stepped"] for _, beat in self._signs_of_life())}

    def _signs_of_life(self) -> list[tuple[Path, Message]]:
        """The latest one of each worker in the present round."""
        paths = self._place.folder.glob(f"beat-{self._agent}-*.json")
        signs = [(path, beat) for path in paths if (beat := self._place.read(path.name)) is not None]
        return [(path, beat) for path, beat in signs if beat["round"] == self._round["number"]]

    def _connect(self) -> None:
        """Connect to the first keeper that answers, those before it tried for a while.

        Raises:
            RendezvousClosedError: none answers.
        """
        begin_s, refusals = time.monotonic(), ""
        while time.monotonic() - begin_s < _GIVE_UP_S and not self._has_left.is_set():
            passed_s = time.monotonic() - begin_s
            for endpoint in self._endpoints[: 1 + int(passed_s / _NEXT_KEEPER_S)]:
                try:
                    wire = connect(*endpoint, self._token, CONNECT_TIMEOUT_S)
                    wire.timeout_s = SILENCE_S
                    with self._news:  # or what is due would change between the message and the wire's being known
                        wire.send(self._hello("meet" if self._is_meeting else "attach"))
                        self._wire, self._at = wire, endpoint
                except OSError as error:
                    refusals = f"{endpoint[0]}:{endpoint[1]}: {error}"
                    continue
                try:
                    self._place.write(f"meeting-{self._agent}.json", {"host": endpoint[0], "port": endpoint[1]})
                except OSError as error:
                    logger.warning("workers of node %s cannot ask the meeting: %s", self._place.node, error)
                return
            time.sleep(0.1)
        with self._news:
            self._closed = f"no keeper of job {self._place.job} could be reached: {refusals}"
            self._news.notify_all()

    def _listen(self) -> None:
        """Take messages; find another keeper when the connection is lost."""
        while not self._has_left.is_set() and self._closed is None:
            wire = self._wire
            try:
                if wire is None:
                    raise WireError("no connection")
                self._take(wire.receive())
            except (OSError, ValueError, AttributeError):
                if self._has_left.is_set() or self._closed is not None:
                    return
                if wire is not None:
                    wire.close()
                self._connect()

    def _take(self, message: Message) -> None:
        with self._news:
            if "round" in message:
                self._round, self._is_meeting, self._broken = message["round"], False, None
                self._began_s = time.monotonic()
                keepers = [tuple(info["keeper"]) for info in self._round["infos"] if info.get("keeper")]
                self._endpoints = list(dict.fromkeys([self._at, *keepers]))
            elif "store" in message and message["number"] == self._round["number"]:
                self._store_at = tuple(message["store"])
            elif "redirect" in message:
                host, port = message["redirect"]
                self._endpoints = list(dict.fromkeys([(str(host), int(port)), *self._endpoints]))
                raise WireError("the agents meet at another keeper")
            elif "broken" in message and not self._is_meeting:
                self._broken = message["broken"]
            elif "closed" in message or "error" in message:
                self._closed = message.get("closed") or message["error"]
            self._news.notify_all()

    def _say_or_lose(self, message: Message) -> None:
        """Send a message; `_listen` notices a lost connection, and its new one begins with what is due then."""
        wire = self._wire
        try:
            if wire is not None:
                wire.send(message)
        except OSError:
            wire.close()  # type: ignore[union-attr]

    def _say_alive(self) -> None:
        while not self._has_left.wait(_ALIVE_S):
            self._say_or_lose({"do": "alive"})
            self._end_silent_workers()

    def _end_silent_workers(self) -> None:
        """Kill workers that have not said for long that they live; those that are not stopped may just be busy."""
        most_s = float(os.environ.get(place_of.SILENCE, "30"))
        signs = self._signs_of_life()
        for path, beat in signs:
            with contextlib.suppress(OSError):
                silent_s = time.time() - path.stat().st_mtime
                pid = int(beat["pid"])
                if silent_s > most_s and (state_of(pid) in "Tt" or silent_s > _BUSY_TIMES * most_s):
                    path.unlink()
                    os.kill(pid, signal.SIGKILL)
        if not signs and not self._is_meeting and time.monotonic() - self._began_s > most_s:
            for pid in stopped_children(os.getpid()):  # before their first sign of life
                with contextlib.suppress(OSError):
                    os.kill(pid, signal.SIGKILL)


def create_handler(params: RendezvousParameters) -> RendezvousHandler:
    """Make the handler of an agent; start the node's keeper if it has none.

    Args:
        params: of torchrun: ``--rdzv-id`` names the job, ``--rdzv-endpoint`` is where the keeper of the first node
            listens, or shall listen.

    Raises:
        ConfigError: a name or the endpoint cannot be.
    """
    host, _, port = params.endpoint.rpartition(":")
    if not host or not port.isdigit() or not 0 < int(port) < 65536:
        raise ConfigError(f"--rdzv-endpoint must be HOST:PORT with a port of its own; got {params.endpoint!r}.")
    node = os.environ.get(place_of.NODE) or socket.gethostname()
    place = NodePlace.of(params.run_id, node)
    hold(place)
    sweep(place)
    address = params.local_addr or address_towards(host, int(port))
    agent = os.environ.get(place_of.AGENT) or f"{node}-0"
    if not is_served(place):
        own_port = int(port) if is_own(host) else 0
        rules = f'{{"least": {params.min_nodes}, "start": {params.max_nodes}}}'
        try:
            keeper = start_keeper(place, address, own_port, rules)
        except ConfigError:
            if not own_port:
                raise
            keeper = start_keeper(place, address, 0, rules)  # another node of this machine was first, as in tests
        atexit.register(end_keeper, keeper, place, agent)
    return KeeperRendezvous(place, agent, (host, int(port)), address, _terms(), params.backend)


def get_handler() -> Callable[[RendezvousParameters], RendezvousHandler]:
    """Entry point of ``torchrun.handlers``."""
    return create_handler


def _terms() -> Message:
    """Terms that all agents must share: releases, and the workers of an agent."""
    releases = {f"release of {name}": version(name) for name in ("torch", "deepspeed", "transformers")}
    return {"number of workers of an agent": _worker_count(sys.argv), **releases}


_COUNTS = ("nproc-per-node", "nproc_per_node")


def _worker_count(arguments: Sequence[str]) -> str:
    """What torchrun was given by ``--nproc-per-node N`` or ``--nproc-per-node=N``; 1 if it was not."""
    for option, following in pairwise(arguments):
        if option.strip("-") in _COUNTS:
            return following
    for argument in arguments:
        option, _, value = argument.partition("=")
        if option.strip("-") in _COUNTS:
            return value
    return "1"
