"""Emulated nodes of an elastic job on this machine: their processes, and what can happen to them.

Only processes that were started here are ever signalled: the launcher of a node, its children, and the workers whose
numbers the node's own files give.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ds_hetero.elastic.node.wire import NodePlace

_REPOSITORY = Path(__file__).resolve().parents[2]
_SCRIPT = Path(__file__).with_name("training.py")
Event = dict[str, Any]


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


def _children(pid: int) -> dict[int, str]:
    """Process ids of the children of a process, with their command lines."""
    found = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError, IndexError):
                if int((entry / "stat").read_text().rpartition(")")[2].split()[1]) == pid:
                    found[int(entry.name)] = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode()
    return found


def _signal(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


class Node:
    """One node.

    Args:
        cluster: that it belongs to.
        name: its own.
        workers: its ranks.
    """

    def __init__(self, cluster: Cluster, name: str, workers: int) -> None:
        self._cluster, self.name, self.workers = cluster, name, workers
        self.place = NodePlace.of(cluster.job, name, cluster.environment)
        self.port = _free_port()
        self.process: subprocess.Popen[bytes] | None = None

    @property
    def is_up(self) -> bool:
        """Whether its launcher runs."""
        return self.process is not None and self.process.poll() is None

    def start(self) -> None:
        """Start its launcher, which joins whatever node is up."""
        cluster = self._cluster
        others = [node for node in cluster.nodes if node.is_up and node is not self]
        command = [sys.executable, "-m", "ds_hetero.run", "--elastic", "--job", cluster.job, "--node", self.name]
        command += ["--listen", f"127.0.0.1:{self.port}", "--workers", str(self.workers), "--silence-s", "8"]
        command += ["--warm", str(cluster.warm_socket), "--min-ranks", "1"]
        command += ["--ranks", str(sum(node.workers for node in cluster.nodes))]
        command += ["--join", f"127.0.0.1:{others[0].port}"] if others else []
        with (cluster.folder / f"{self.name}.log").open("ab") as log:
            self.process = subprocess.Popen(
                [*command, str(_SCRIPT), "--log", str(cluster.log), *cluster.arguments],
                env=cluster.environment,
                cwd=_REPOSITORY,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def worker_pids(self) -> list[int]:
        """Process ids of its workers, from their signs of life."""
        beats = [self.place.read(path.name) for path in sorted(self.place.folder.glob("beat-*.json"))]
        return [int(beat["pid"]) for beat in beats if beat is not None]

    def children(self, module: str) -> list[int]:
        """Process ids of its agents (``agent``) or its keeper (``keeper``)."""
        assert self.process is not None
        return [pid for pid, line in _children(self.process.pid).items() if f"elastic.node.{module}" in line]

    def all_pids(self) -> list[int]:
        """All of its processes, those first that would start others again."""
        assert self.process is not None
        agents = self.children("agent")
        clients = [pid for agent in agents for pid in _children(agent)]
        return [self.process.pid, *agents, *self.children("keeper"), *clients, *self.worker_pids()]

    def die(self) -> None:
        """Lose everything, memory too."""
        assert self.process is not None
        for pid in self.all_pids():
            _signal(pid, signal.SIGKILL)
        self.process.wait()
        shutil.rmtree(self.place.folder, ignore_errors=True)

    def signal_all(self, number: int) -> None:
        """Stop or continue all of its processes."""
        for pid in self.all_pids():
            _signal(pid, number)


class Cluster:
    """All nodes of a job.

    Args:
        folder: of logs.
        workers: by node.
        arguments: of the script.
        warm_socket: of a warm server that runs.
    """

    def __init__(self, folder: Path, workers: list[int], arguments: list[str], warm_socket: Path) -> None:
        self.folder, self.arguments, self.warm_socket = folder, arguments, warm_socket
        self.job = f"bench-{os.getpid()}-{secrets.token_hex(3)}"
        self.environment = environment_of_ranks()
        self.log = folder / "events.jsonl"
        self.log.touch()
        self.nodes: list[Node] = []
        for number, count in enumerate(workers):
            self.nodes.append(Node(self, f"n{number}", count))
        self._events: list[Event] = []
        self._position = 0

    def start(self) -> None:
        """Start all nodes."""
        for node in self.nodes:
            node.start()

    def events(self) -> list[Event]:
        """All events so far."""
        with self.log.open() as file:
            file.seek(self._position)
            for line in file:
                if not line.endswith("\n"):
                    break
                self._position += len(line.encode())
                self._events.append(json.loads(line))
        return self._events

    def wait_for(self, holds: Callable[[list[Event]], bool], limit_s: float) -> bool:
        """Wait until something holds of the events; whether it did within the limit."""
        end_s = time.monotonic() + limit_s
        while time.monotonic() < end_s:
            if holds(self.events()):
                return True
            time.sleep(0.03)
        return False

    @property
    def num_workers(self) -> int:
        """Ranks on the nodes that are up."""
        return sum(node.workers for node in self.nodes if node.is_up)

    def end(self) -> None:
        """Kill all that was started."""
        for node in self.nodes:
            if node.is_up:
                node.die()
            shutil.rmtree(node.place.folder, ignore_errors=True)
        with contextlib.suppress(OSError):
            self.nodes[0].place.folder.parent.rmdir()


def environment_of_ranks() -> dict[str, str]:
    """Of everything that is started here."""
    path = os.pathsep.join(filter(None, [str(_REPOSITORY), os.environ.get("PYTHONPATH")]))
    fixed = {"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1", "PYTHONPATH": path, "PYTHONWARNINGS": "ignore"}
    token = {"DS_HETERO_ELASTIC_TOKEN": os.environ.get("DS_HETERO_ELASTIC_TOKEN", secrets.token_hex(16))}
    return {**os.environ, **token, **fixed}


@contextlib.contextmanager
def warm_server(folder: Path, limit_s: float = 300) -> Any:
    """A warm server for all nodes of this machine; yields its socket."""
    path = folder / "warm.sock"
    with (folder / "warm.log").open("wb") as log:
        server = subprocess.Popen(
            [sys.executable, "-m", "ds_hetero.elastic.node.warm", str(path)],
            env=environment_of_ranks(),
            stdout=log,
            stderr=log,
            cwd=_REPOSITORY,
        )
    try:
        end_s = time.monotonic() + limit_s
        while not path.exists():
            if server.poll() is not None or time.monotonic() > end_s:
                raise RuntimeError(f"the warm server did not start: {(folder / 'warm.log').read_text()[-2000:]}")
            time.sleep(0.1)
        yield path
    finally:
        server.kill()
        server.wait()
