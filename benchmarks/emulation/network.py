"""A network of nodes on one Linux machine, with the rate and the delay of every link chosen.

    with emulate(nodes=2, rate_bit_per_s=1e9, delay_s=100e-6) as network:
        print(network.describe())                      # what was asked for, and what was measured
        start_rank(..., node=network.nodes[0])         # picklable; the rank calls node.enter() before it opens a socket

A node is a network namespace. A rank that entered it uses gloo through `Node.environment`; a command that must be
started whole runs under ``nsenter --net=<node.namespace>``. See `benchmarks.emulation.relay` for how the links are
made, and why nothing is left behind by a crash.

Needs Linux, the ``ip`` and ``tc`` commands (Debian package iproute2) and the right to make network namespaces: root, or
``unshare --user --map-root-user --net`` before the command.
"""

from __future__ import annotations

import json
import os
import select
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.emulation.relay import DEVICE, address, device_of, enter_namespace

METHODS = ("relay", "veth")
_START_S = 20
_PROBE_S = 0.15  # of traffic per measured link
_PINGS = 40


class EmulationError(RuntimeError):
    """This machine does not let us emulate the network; the message says why, and the remedy."""


@dataclass(frozen=True)
class Node:
    """One emulated machine.

    Args:
        namespace: path of its network namespace; None for the machine itself.
        address: at which other nodes reach it.
        device: network device of this address.
    """

    namespace: str | None
    address: str
    device: str = DEVICE

    def enter(self) -> None:
        """Move the calling thread, and every process and thread it starts later, to this node."""
        if self.namespace is not None:
            enter_namespace(self.namespace)
            os.environ.update(self.environment)

    @property
    def environment(self) -> dict[str, str]:
        """Environment variables for torch.distributed; `enter` sets them."""
        return {} if self.namespace is None else {"GLOO_SOCKET_IFNAME": self.device}


@dataclass(frozen=True)
class LinkMeasurement:
    """Rate and round trip of TCP between two otherwise idle nodes."""

    sender: int
    receiver: int
    rate_bit_per_s: float
    round_trip_s: float


@dataclass(frozen=True)
class Network:
    """Nodes and the links between them.

    Args:
        method: ``"relay"``, ``"veth"``, or ``"none"``: all nodes are this machine, connected by loopback.
        nodes: one after the other; with several links each, once for every link.
        rate_bit_per_s: of every node's link, each way.
        delay_s: one way, by pair.
        measured: from every node to the next, before anything else ran on it.
        process: of `benchmarks.emulation.relay`.
    """

    method: str
    nodes: tuple[Node, ...]
    rate_bit_per_s: tuple[float, ...] = ()
    delay_s: tuple[tuple[float, ...], ...] = ()
    pair_bit_per_s: tuple[tuple[float | None, ...], ...] | None = None
    measured: tuple[LinkMeasurement, ...] = ()
    process: subprocess.Popen[str] | None = None
    links: int = 1

    def asked(self, sender: int, receiver: int) -> tuple[float, float]:
        """Return the requested (rate, round trip) between two nodes."""
        rates = [self.rate_bit_per_s[sender], self.rate_bit_per_s[receiver]]
        if self.pair_bit_per_s and (pair := self.pair_bit_per_s[sender][receiver]):
            rates.append(pair)
        return min(rates), self.delay_s[sender][receiver] + self.delay_s[receiver][sender]

    def describe(self) -> str:
        """Describe request and measurement in one line, and whether they agree."""
        if self.method == "none":
            return "loopback, not shaped"
        asked = [self.asked(link.sender, link.receiver) for link in self.measured]
        got = [(link.rate_bit_per_s, link.round_trip_s) for link in self.measured]
        rates, trips = ([[pair[i] for pair in pairs] for pairs in (asked, got)] for i in (0, 1))
        # A TCP ping waits for two wake-ups of a process besides the delay; half a millisecond is a busy machine.
        off = any(not 0.9 * a <= g <= 1.1 * a for a, g in zip(*rates, strict=True))
        off = off or any(g > a + 0.5e-3 for a, g in zip(*trips, strict=True))
        return (
            f"{self.method}: {_span(rates[0], 1e6)} Mbit/s and {_span(trips[0], 1e-3)} ms round trip asked for, "
            f"{_span(rates[1], 1e6)} Mbit/s and {_span(trips[1], 1e-3)} ms measured"
            + (" (NOT as asked: the machine is too busy, or this method cannot do it)" if off else "")
        )

    def to_dict(self) -> dict[str, Any]:
        """Return plain data for result files."""
        return {
            "method": self.method,
            "rate_bit_per_s": self.rate_bit_per_s,
            "delay_s": self.delay_s,
            "pair_bit_per_s": self.pair_bit_per_s,
            "measured": [vars(link) for link in self.measured],
        }

    def carried(self) -> dict[str, float]:
        """Return the relay's packets so far: their number, how many were dropped, and how late they left on average."""
        if self.process is None or self.method != "relay":
            return {}
        assert self.process.stdout is not None
        self.process.send_signal(signal.SIGUSR1)
        counts: dict[str, float] = json.loads(self.process.stdout.readline())
        return counts

    @property
    def pids(self) -> tuple[int, ...]:
        """Processes whose CPU time is the cost of the emulation."""
        return () if self.process is None else (self.process.pid,)


def _span(values: Sequence[float], unit: float) -> str:
    low, high = (f"{pick(values) / unit:.4g}" for pick in (min, max))
    return low if low == high else f"{low}-{high}"


@contextmanager
def emulate(
    *,
    nodes: int,
    rate_bit_per_s: float | Sequence[float],
    delay_s: float | Sequence[Sequence[float]] = 0.0,
    pair_bit_per_s: Sequence[Sequence[float | None]] | None = None,
    methods: Sequence[str] = METHODS,
    links: int = 1,
) -> Iterator[Network]:
    """Make the network, measure it, and remove it at the end.

    Args:
        nodes: number of nodes, at most 250.
        rate_bit_per_s: of every node's link to the switch, each way; one number or one per node.
        delay_s: one way between different nodes; one number or a matrix by (sender, receiver).
        pair_bit_per_s: further limits by (sender, receiver), None for no limit; the relay only.
        methods: to try, in this order. ``"veth"`` has no delay, no pair limits and one link per node, and is skipped if
            they are requested. ``"none"`` always works and limits nothing, for callers that can do without limits.
        links: number of links of every node, each with the node's rate; rates, delays and pairs are then by node and
        link.

    Raises:
        EmulationError: no method works here.
    """
    nodes *= links
    rates = _per_node(rate_bit_per_s, nodes)
    delays = _per_pair(delay_s, nodes)
    pairs = tuple(map(tuple, pair_bit_per_s)) if pair_bit_per_s is not None else None
    reasons = []
    for method in methods:
        if method == "none":
            yield Network("none", (Node(None, "127.0.0.1"),) * nodes)
            return
        if method == "veth" and (pairs or links > 1 or any(map(any, delays))):
            reasons.append("veth: has no delay, no limits by pair and one link a node")
            continue
        try:
            process, namespaces = _start(
                {"method": method, "rate_bit_per_s": rates, "delay_s": delays, "pair_bit_per_s": pairs, "links": links}
            )
        except OSError as error:
            reasons.append(f"{method}: {error}")
            continue
        try:
            emulated_nodes = tuple(
                Node(path, address(node, link), device_of(link))
                for node, path in enumerate(namespaces)
                for link in range(links)
            )
            network = Network(method, emulated_nodes, rates, delays, pairs, process=process, links=links)
            pairs_of_nodes = [(node, (node + links) % nodes) for node in range(nodes if nodes > links else 0)]
            yield replace(network, measured=tuple(_measure(network, *pair) for pair in pairs_of_nodes))
        finally:
            process.terminate()
            _close(process)
        return
    raise EmulationError(
        f"no emulated network on this machine ({'; '.join(reasons)}). It needs Linux, the commands ip and tc "
        "(package iproute2), /dev/net/tun, and root or: unshare --user --map-root-user --net COMMAND"
    )


def _per_node(value: float | Sequence[float], nodes: int) -> tuple[float, ...]:
    rates = tuple(value) if isinstance(value, Sequence) else (value,) * nodes
    if not 1 <= nodes <= 250 or len(rates) != nodes or min(rates) <= 0:
        raise ValueError(
            f"rate_bit_per_s needs a positive number for each of the {nodes} nodes (1 to 250), got {value}."
        )
    return rates


def _per_pair(value: float | Sequence[Sequence[float]], nodes: int) -> tuple[tuple[float, ...], ...]:
    if isinstance(value, Sequence):
        matrix = tuple(map(tuple, value))
        if [len(row) for row in matrix] != [nodes] * nodes:
            raise ValueError(f"delay_s needs a number for each of {nodes} x {nodes} pairs, got {value}.")
        return matrix
    return tuple(tuple(value if i != j else 0.0 for j in range(nodes)) for i in range(nodes))


def _start(config: dict[str, Any]) -> tuple[subprocess.Popen[str], list[str]]:
    """Start the process that has the namespaces; return it, and their paths."""
    for command in ("ip", "tc"):
        if shutil.which(command) is None:
            raise FileNotFoundError(f"the command {command} is missing: install the package iproute2")
    # Not in our session, so that Ctrl-C reaches us first and the ranks still find their network while they stop.
    process = subprocess.Popen(
        [sys.executable, str(Path(__file__).with_name("relay.py")), json.dumps(config | {"parent": os.getpid()})],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert process.stdout is not None and process.stderr is not None
    ready, _, _ = select.select([process.stdout], [], [], _START_S)
    line = process.stdout.readline() if ready else ""
    if not line:
        process.kill()
        error_lines = process.stderr.read().strip().splitlines()
        _close(process)
        raise OSError(error_lines[-1] if error_lines else f"not ready within {_START_S} s")
    namespaces: list[str] = json.loads(line)["namespaces"]
    return process, namespaces


def _close(process: subprocess.Popen[str]) -> None:
    """Wait for the end of the process, and close its pipes."""
    with process:
        process.wait()


# --- measuring --------------------------------------------------------------------------------------


def _measure(network: Network, sender: int, receiver: int) -> LinkMeasurement:
    """Measure a TCP connection from ``sender`` to ``receiver``: pings, then a stream whose second half is timed."""
    size = max(1 << 19, int(network.asked(sender, receiver)[0] / 8 * _PROBE_S))
    listener = _socket_in(network.nodes[receiver])
    listener.bind((network.nodes[receiver].address, 0))
    listener.listen()
    rates: list[float] = []
    serving = threading.Thread(target=lambda: rates.append(_serve(listener, size)))
    serving.start()
    with listener, _socket_in(network.nodes[sender]) as connection:
        connection.connect(listener.getsockname())
        trips = []
        for _ in range(_PINGS):
            begin = time.perf_counter()
            connection.sendall(b"?")
            connection.recv(1)
            trips.append(time.perf_counter() - begin)
        connection.sendall(bytes(size))
        serving.join()
    return LinkMeasurement(sender, receiver, rates[0], statistics.median(trips))


def _serve(listener: socket.socket, size: int) -> float:
    """Answer the pings, receive ``size`` bytes, and return the rate of their second half in bit/s."""
    connection, _ = listener.accept()
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    buffer = bytearray(1 << 20)
    with connection:
        for _ in range(_PINGS):
            connection.recv(1)
            connection.sendall(b"!")
        remaining_bytes = size
        while remaining_bytes > size // 2:
            remaining_bytes -= connection.recv_into(buffer)
        second_half, begin = remaining_bytes, time.perf_counter()
        while remaining_bytes > 0:
            remaining_bytes -= connection.recv_into(buffer)
        return second_half * 8 / (time.perf_counter() - begin)


def _socket_in(node: Node) -> socket.socket:
    """Make a socket in a node's namespace, by a thread that enters it: a socket belongs to its thread's namespace."""
    sockets: list[socket.socket] = []

    def make() -> None:
        assert node.namespace is not None
        enter_namespace(node.namespace)
        sockets.append(socket.socket())

    thread = threading.Thread(target=make)
    thread.start()
    thread.join()
    sockets[0].setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return sockets[0]
