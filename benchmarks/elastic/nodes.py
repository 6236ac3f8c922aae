"""Emulated nodes of an elastic job on this machine: their processes, and the faults that can strike them.

Signals go only to processes that were started here: the launcher of a node, its children, and the workers whose process
ids are in the node's files.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.elastic.network import Network, address_of
from benchmarks.measure.ports import free_port
from ds_hetero.elastic.node.place import NodePlace
from ds_hetero.elastic.segments import SUFFIX, read_header

_REPOSITORY = Path(__file__).resolve().parents[2]
_SCRIPT = Path(__file__).with_name("training.py")
Event = dict[str, Any]


def children_of(pid: int) -> dict[int, str]:
    """Return the process ids of the children of a process, with their command lines."""
    command_lines = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError, IndexError):
                if int((entry / "stat").read_text().rpartition(")")[2].split()[1]) == pid:
                    command_lines[int(entry.name)] = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode()
    return command_lines


def _is_ours(pid: int) -> bool:
    """Return whether a live process was started here; process ids are reused."""
    try:
        line, status = (Path(f"/proc/{pid}/{name}").read_bytes() for name in ("cmdline", "stat"))
    except OSError:
        return False
    return b"ds_hetero" in line and status.rpartition(b")")[2].split()[0] != b"Z"


def _signal(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


class Node:
    """One node.

    Args:
        cluster: the job's nodes.
        number: of its name and address.
        workers: number of its ranks.
    """

    def __init__(self, cluster: Cluster, number: int, workers: int) -> None:
        self._cluster, self.number, self.name, self.workers = cluster, number, f"n{number}", workers
        self.place = NodePlace.of(cluster.job, self.name, cluster.environment)
        self.address = f"127.0.0.1:{free_port()}" if cluster.network is None else f"{address_of(number)}:29400"
        self.process: subprocess.Popen[bytes] | None = None

    @property
    def is_up(self) -> bool:
        """Whether its launcher runs."""
        return self.process is not None and self.process.poll() is None

    def start(self) -> None:
        """Start its launcher. The first node's command is always the same; others join any node that is up."""
        cluster = self._cluster
        others = [node for node in cluster.nodes if node.is_up and node is not self]
        command = [] if cluster.network is None else cluster.network.prefix(self.number)
        command += [sys.executable, "-m", "ds_hetero.run", "--elastic", "--job", cluster.job, "--node", self.name]
        command += ["--listen", self.address, "--workers", str(self.workers)]
        command += ["--silence-s", str(cluster.silence_s)]
        command += [] if cluster.warm_socket is None else ["--warm", str(cluster.warm_socket_of(self))]
        command += [] if cluster.keeps_majority else ["--min-ranks", "1"]
        command += ["--ranks", str(sum(node.workers for node in cluster.nodes))]
        command += ["--join", others[0].address] if others and self.number else []
        with (cluster.folder / f"{self.name}.log").open("ab") as log:
            self.process = subprocess.Popen(
                [*command, str(cluster.script), "--events", str(cluster.log), *cluster.arguments],
                env=cluster.environment,
                cwd=_REPOSITORY,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def worker_pids(self) -> list[int]:
        """Return the process ids of its live workers, from their first lines or their heartbeats."""
        latest = {}
        for event in self._cluster.events():
            if event["event"] == "spawn" and event["agent"].rpartition("-")[0] == self.name:
                latest[event["agent"]] = event["pid"]
        beats = [self.place.read(path.name) for path in sorted(self.place.folder.glob("beat-*.json"))]
        pids = {*latest.values(), *(int(beat["pid"]) for beat in beats if beat is not None)}
        return sorted(pid for pid in pids if _is_ours(pid))

    def dirty_segments(self) -> list[Path]:
        """Return saves of its workers that are being written, here or as copies on other nodes."""
        places = [node.place.folder for node in self._cluster.nodes]
        paths = [*self.place.folder.glob(f"own-*{SUFFIX}")]
        paths += [path for place in places for path in place.glob(f"from-{self.name}-*{SUFFIX}")]
        return [path for path in paths if path.exists() and read_header(path) is None]

    def children(self, module: str) -> list[int]:
        """Return the process ids of its children that run ``module``: ``agent``, ``node_server`` or ``fork_server``."""
        assert self.process is not None
        return [pid for pid, line in children_of(self.process.pid).items() if f"elastic.node.{module}" in line]

    def all_pids(self) -> list[int]:
        """Return all of its processes; those that would restart others come first."""
        assert self.process is not None
        agents = self.children("agent")
        clients = [pid for agent in agents for pid in children_of(agent)]
        servers = [*self.children("node_server"), *self.children("fork_server")]
        return [self.process.pid, *agents, *servers, *clients, *self.worker_pids()]

    def die(self) -> None:
        """Kill all of its processes, and delete its memory."""
        assert self.process is not None
        for pid in self.all_pids():
            _signal(pid, signal.SIGKILL)
        self.process.wait()
        shutil.rmtree(self.place.folder, ignore_errors=True)

    def leave(self) -> None:
        """Send it a preemption notice."""
        assert self.process is not None
        self.process.terminate()
        try:
            self.process.wait(60)
        except subprocess.TimeoutExpired:
            self.die()  # and the job hangs or loses steps
        shutil.rmtree(self.place.folder, ignore_errors=True)

    def signal_all(self, number: int) -> None:
        """Stop or continue all of its processes."""
        for pid in self.all_pids():
            _signal(pid, number)


class EventLog:
    """Events that the processes of a job write, one line of JSON each.

    Args:
        path: of the file.
    """

    def __init__(self, path: Path) -> None:
        self.log = path
        self.log.touch()
        self._events: list[Event] = []
        self._position = 0

    def events(self) -> list[Event]:
        """Return all events so far."""
        with self.log.open() as file:
            file.seek(self._position)
            for line in file:
                if not line.endswith("\n"):
                    break
                self._position += len(line.encode())
                self._events.append(json.loads(line))
        return self._events

    def wait_for(self, holds: Callable[[list[Event]], bool], limit_s: float) -> bool:
        """Wait until ``holds(events)`` is true; return False at the limit."""
        end_s = time.monotonic() + limit_s
        while time.monotonic() < end_s:
            if holds(self.events()):
                return True
            time.sleep(0.03)
        return False


class Cluster(EventLog):
    """All nodes of a job.

    Args:
        folder: of logs. workers: by node. arguments: of the script. warm_socket: of a running fork server; fork servers
        of nodes in a network are forked from it. None if the launcher
            of each node starts a fork server.
        network: that connects the nodes; None for loopback.
        keeps_majority: whether fewer than half of the ranks wait for the others.
        script: of the ranks; it takes ``--events`` and a file.
        silence_s: seconds after which a silent worker is killed.
    """

    def __init__(
        self,
        folder: Path,
        workers: list[int],
        arguments: list[str],
        warm_socket: Path | None,
        network: Network | None = None,
        *,
        keeps_majority: bool = False,
        script: Path = _SCRIPT,
        silence_s: float = 8,
    ) -> None:
        self.folder, self.arguments, self.script = folder, arguments, script
        self.silence_s = silence_s
        self.warm_socket = warm_socket
        self.network, self.keeps_majority = network, keeps_majority
        self.job = f"bench-{os.getpid()}-{secrets.token_hex(3)}"
        self.environment = environment_of_ranks()
        if network is not None:
            self.environment["GLOO_SOCKET_IFNAME"] = "eth0"
        super().__init__(folder / "events.jsonl")
        self.nodes: list[Node] = []
        for number, count in enumerate(workers):
            self.nodes.append(Node(self, number, count))
        self._warm_servers: list[subprocess.Popen[bytes]] = []

    def warm_socket_of(self, node: Node) -> Path | None:
        """Return the socket of the fork server of a node, which is in the namespace of its workers."""
        if self.warm_socket is None or self.network is None:
            return self.warm_socket
        return self.warm_socket.with_name(f"{self.job}-{node.name}.sock")

    def start(self) -> None:
        """Start all nodes."""
        if self.network is not None and self.warm_socket is not None:
            for node in self.nodes:
                path = self.warm_socket_of(node)
                assert path is not None
                self._warm_servers.append(self.network.fork_warm_server(node.number, self.warm_socket, path))
        for node in self.nodes:
            node.start()

    @property
    def num_workers(self) -> int:
        """Ranks on the nodes that are up."""
        return sum(node.workers for node in self.nodes if node.is_up)

    def end(self) -> None:
        """Kill all processes that were started."""
        for node in self.nodes:
            if node.is_up:
                node.die()
            node_server = node.place.read("node_server.json")
            if node_server is not None and _is_ours(int(node_server["pid"])):  # of a torchrun that was killed
                _signal(int(node_server["pid"]), signal.SIGKILL)
            shutil.rmtree(node.place.folder, ignore_errors=True)
        for server in self._warm_servers:
            server.kill()
            server.wait()
        with contextlib.suppress(OSError):
            self.nodes[0].place.folder.parent.rmdir()


def exit_at_sigterm() -> None:
    """Let SIGTERM end this process by SystemExit, so that it ends the processes of nodes; ignore it from then on.

    The command `timeout` sends it twice, to the process and to its group. The second one would interrupt the end.
    """

    def leave(*_: Any) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        sys.exit(1)

    signal.signal(signal.SIGTERM, leave)


def environment_of_ranks() -> dict[str, str]:
    """Return the environment of all processes that are started here."""
    path = os.pathsep.join(filter(None, [str(_REPOSITORY), os.environ.get("PYTHONPATH")]))
    fixed = {
        "ACCELERATE_USE_CPU": "false",
        "DS_ACCELERATOR": "cpu",
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": path,
        "PYTHONWARNINGS": "ignore",
    }
    token = {"DS_HETERO_ELASTIC_TOKEN": os.environ.get("DS_HETERO_ELASTIC_TOKEN", secrets.token_hex(16))}
    return {**os.environ, **token, **fixed}


@contextlib.contextmanager
def warm_server(folder: Path, limit_s: float = 300) -> Any:
    """Start a fork server for all nodes of this machine; yield its socket."""
    path = folder / "warm.sock"
    with (folder / "warm.log").open("wb") as log:
        server = subprocess.Popen(
            [sys.executable, "-m", "ds_hetero.elastic.node.fork_server", str(path)],
            env=environment_of_ranks(),
            stdout=log,
            stderr=log,
            cwd=_REPOSITORY,
        )
    try:
        end_s = time.monotonic() + limit_s
        while not path.exists():
            if server.poll() is not None or time.monotonic() > end_s:
                raise RuntimeError(f"the fork server did not start: {(folder / 'warm.log').read_text()[-2000:]}")
            time.sleep(0.1)
        yield path
    finally:
        server.kill()
        server.wait()
