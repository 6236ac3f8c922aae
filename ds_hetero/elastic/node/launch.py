"""``python -m ds_hetero.run --elastic``: the processes of one node of an elastic job.

this process      restarts the others when they are killed, and forwards SIGTERM
node server       serves the segments; on the first node, also the rendezvous
fork server       forks workers (not with --cold)
agents            torchrun's agents, one for each GPU, each with one worker
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import NoReturn

from ds_hetero.common.announce import announce
from ds_hetero.elastic.node import place as place_of
from ds_hetero.elastic.node.leftovers import free_node, leftovers, lock_as_alive, sweep
from ds_hetero.elastic.node.node_server_requests import ask
from ds_hetero.elastic.node.place import NodePlace, token_of
from ds_hetero.elastic.node.processes import end_with_parent
from ds_hetero.errors import ConfigError

_USAGE = "python -m ds_hetero.run --elastic [options] SCRIPT ARGS"
_POLL_S = 0.05
_MAX_RESTARTS = 1_000_000  # no limit: the rendezvous ends a job that cannot go on, see `restart_policy`
_MAX_NODES = 100_000  # no limit
_STOP_GRACE_S = 30  # time that agents have to end, since their workers save
_STOP_GRACE_OF_SERVERS_S = 3


def parse_options(arguments: list[str]) -> argparse.Namespace:
    """Parse the launcher's options, which stand before the script on the command line."""
    parser = argparse.ArgumentParser(prog="python -m ds_hetero.run --elastic", description=__doc__, allow_abbrev=False)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--join", metavar="HOST:PORT", help="address of the first node; on all other nodes")
    parser.add_argument("--listen", metavar="HOST[:PORT]", default="127.0.0.1", help="address of this node's server")
    parser.add_argument("--min-ranks", type=int, help="least number of ranks to train with (default: more than half)")
    parser.add_argument("--ranks", type=int, help="number of ranks to begin with (default: all that join within 30 s)")
    parser.add_argument("--workers", type=int, help="number of workers on this node (default: one per GPU, else one)")
    parser.add_argument(
        "--card",
        help="GPU of this node, by which a running job decides whether to let it join (default: the driver's name; "
        "none: always join)",
    )
    parser.add_argument("--job", default="job", help="name of the job")
    parser.add_argument("--node", default=socket.gethostname(), help="name of this node (default: its host name)")
    parser.add_argument("--memory-gib", type=float, help="shared memory that segments may take (default: all)")
    parser.add_argument("--notice-s", type=int, default=25, help="seconds between SIGTERM and the end of this node")
    parser.add_argument("--silence-s", type=float, default=30, help="seconds after which a silent worker is killed")
    parser.add_argument("--cold", action="store_true", help="no fork server: each worker imports torch itself")
    parser.add_argument("--warm", metavar="SOCKET", help="socket of a running fork server, such as of another job")
    parser.add_argument("command", nargs=argparse.REMAINDER, help="script, or -m module, and its arguments")
    options = parser.parse_args(arguments)
    for name, least in (("min_ranks", 1), ("ranks", 1), ("workers", 1), ("notice_s", 1), ("silence_s", 3)):
        value = getattr(options, name)
        if value is not None and value < least:
            parser.error(f"--{name.replace('_', '-')} must be at least {least}; got {value}")
    if options.ranks is not None and options.min_ranks is not None and options.min_ranks > options.ranks:
        parser.error(
            f"--min-ranks {options.min_ranks} is more than the --ranks {options.ranks} that the job begins with"
        )
    if options.memory_gib is not None and not options.memory_gib > 0:
        parser.error(f"--memory-gib must be more than 0; got {options.memory_gib}")
    if not options.command:
        parser.error("no script was given. Add it and its arguments after the options.")
    return options


class NodeProcesses:
    """The processes of this node, which `run` starts, restarts and ends."""

    def __init__(self, options: argparse.Namespace, place: NodePlace) -> None:
        self._options = options
        self._place = place
        self._host, _, port = options.listen.partition(":")
        self._port = int(port or 0)
        self._socket = Path(options.warm) if options.warm else place.folder / "warm.sock"
        self._node_server: subprocess.Popen[bytes] | None = None
        self._fork_server: subprocess.Popen[bytes] | None = None
        self._agents: list[subprocess.Popen[bytes] | None] = []
        self._codes: dict[int, int] = {}  # exit codes of agents that have ended, by number
        self._environment = {**os.environ, place_of.JOB: options.job, place_of.NODE: options.node}
        self._environment.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # no C++ stack traces of lost peers
        self._is_leaving = False

    def run(self) -> int:
        """Run until all agents have ended. Return the largest of their exit codes."""
        signal.signal(signal.SIGTERM, self._leave)
        signal.signal(signal.SIGINT, self._leave)
        try:
            self._start_node_server(is_first=True)
            if not (self._options.cold or self._options.warm):
                self._start_fork_server()
            self._agents = [self._start_agent(number) for number in range(self._num_agents)]
            while len(self._codes) < len(self._agents):
                time.sleep(_POLL_S)
                self._restart_killed()
            code = max(self._codes.values())
            if code == 0:
                ask(self._address, token_of(self._place.job), {"do": "free"})
            return code
        finally:
            self._end()

    @property
    def _address(self) -> tuple[str, int]:
        """Host and port of this node's server."""
        return self._host, self._port

    @property
    def _endpoint(self) -> str:
        """HOST:PORT of the rendezvous."""
        return self._options.join or f"{self._host}:{self._port}"

    @property
    def _num_agents(self) -> int:
        """Number of agents, each with one worker: ``--workers``, else one for each GPU, else one."""
        return self._options.workers or _count_gpus() or 1

    def _rules(self) -> str:
        """Return the fields of `RoundRules` as JSON. With --min-ranks, no majority of the previous round is needed."""
        ranks = self._options.ranks
        min_ranks = self._options.min_ranks
        min_agents = min_ranks or (ranks // 2 + 1 if ranks else 1)
        return json.dumps({"min_agents": min_agents, "needs_majority": min_ranks is None, "agents_at_start": ranks})

    def _start_node_server(self, *, is_first: bool = False) -> None:
        """Start the node server, wait until it listens, and store its port, which the next server will get again."""
        arguments = ["--job", self._place.job, "--node", self._place.node]
        arguments += ["--host", self._host, "--port", str(self._port), "--rules", self._rules()]
        if self._options.memory_gib is not None:
            arguments += ["--memory-bytes", str(int(self._options.memory_gib * 2**30))]
        if is_first:
            arguments.append("--fresh")
        self._node_server = self._start(["ds_hetero.elastic.node.node_server", *arguments])
        while (address := self._place.address(pid=self._node_server.pid)) is None:
            if self._node_server.poll() is not None:
                raise ConfigError(f"the server of node {self._place.node} cannot run; its message is above.")
            time.sleep(0.01)
        self._port = address[1]

    def _start_fork_server(self) -> None:
        """Start the fork server; workers that start before it is ready import the frameworks themselves."""
        self._fork_server = self._start(["ds_hetero.elastic.node.fork_server", str(self._socket)])

    def _start_agent(self, number: int) -> subprocess.Popen[bytes]:
        """Start torchrun's agent with one worker. The worker is a `client` of the fork server."""
        arguments = ["--nnodes", f"{self._options.min_ranks or 1}:{_MAX_NODES}", "--nproc-per-node", "1"]
        arguments += ["--max-restarts", str(_MAX_RESTARTS), "--monitor-interval", "0.05"]
        arguments += ["--rdzv-backend", "ds_hetero_agent", "--rdzv-endpoint", self._endpoint]
        arguments += ["--rdzv-id", self._place.job, "--local-addr", self._host, "--no-python"]
        arguments += ["--shutdown-timeout", str(self._options.notice_s)]
        client = str(Path(__file__).with_name("client.py"))
        worker = [sys.executable, "-S", "-E", client, str(self._socket), "--", "-m", "ds_hetero.run"]
        agent = f"{self._place.node}-{number}"
        self._place.remove(f"done-{agent}.json")
        variables = {place_of.AGENT: agent, place_of.SILENCE: str(self._options.silence_s)}
        if _count_gpus():
            variables["CUDA_VISIBLE_DEVICES"] = _visible_gpus()[number]
        card = self._options.card or _card_of(variables.get("CUDA_VISIBLE_DEVICES", ""))
        if card not in (None, "none"):
            variables[place_of.CARD] = card
        return self._start(["ds_hetero.elastic.node.agent", *arguments, *worker, *self._options.command], variables)

    def _start(self, module: list[str], variables: dict[str, str] | None = None) -> subprocess.Popen[bytes]:
        """Start ``python -m MODULE ARGUMENTS``. It ends with this process, but gets no signals of its terminal."""
        return subprocess.Popen(
            [sys.executable, "-m", *module],
            env={**self._environment, **(variables or {})},
            preexec_fn=end_with_parent,
            start_new_session=True,
        )

    def _restart_killed(self) -> None:
        """Restart processes that were killed; record the exit codes of agents that have ended."""
        if self._node_server is not None and self._node_server.poll() is not None:
            self._start_node_server()
        if self._fork_server is not None and self._fork_server.poll() is not None:
            self._start_fork_server()
        for number, agent in enumerate(self._agents):
            if agent is None or number in self._codes or (code := agent.poll()) is None:
                continue
            if code < 0 and not self._is_leaving:  # killed by a signal: the node itself shall stay
                self._agents[number] = self._start_agent(number)
            else:
                self._codes[number] = abs(code) if code >= 0 else 128 - code

    def _leave(self, *_: object) -> None:
        """Forward the preemption notice: workers save, commit and end, and the job goes on without this node."""
        self._is_leaving = True
        for number, agent in enumerate(self._agents):
            if agent is not None and number not in self._codes:
                agent.terminate()

    def _end(self) -> None:
        """End all processes, and free the node's memory if the script has finished."""
        for process in (*self._agents, self._fork_server, self._node_server):
            if process is not None and process.poll() is None:
                process.terminate()
                try:
                    process.wait(_STOP_GRACE_S if process in self._agents else _STOP_GRACE_OF_SERVERS_S)
                except subprocess.TimeoutExpired:
                    process.kill()
                    process.wait()
        if self._codes and max(self._codes.values()) == 0:
            free_node(self._place)


def _announce_leftovers(place: NodePlace) -> None:
    """Announce saves of ended jobs that take shared memory and could be resumed."""
    for leftover in leftovers(place):
        announce(
            f"{leftover.folder} holds {leftover.num_bytes / 2**30:,.2f} GiB of saves of job {leftover.job}, which "
            f"ended {leftover.seconds / 3600:,.1f} hours ago before its script had finished. Start its command again "
            "to go on; else delete the folder. It is deleted when a job of yours needs the memory."
        )


def _visible_gpus() -> list[str]:
    """Return the entries of CUDA_VISIBLE_DEVICES, or the numbers of all GPUs; without the import of torch."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return [name for name in visible.split(",") if name]
    num_gpus = len(list(Path("/proc/driver/nvidia/gpus").glob("*")))
    return [str(number) for number in range(num_gpus)]


def _card_of(gpu: str) -> str | None:
    """Return the driver's name of a GPU; None if it is unknown."""
    folders = sorted(Path("/proc/driver/nvidia/gpus").glob("*"))
    try:
        text = (folders[int(gpu)] / "information").read_text()
    except (ValueError, IndexError, OSError):
        return None
    for line in text.splitlines():
        if line.startswith("Model"):  # "Model:  NVIDIA H100"
            return line.partition(":")[2].strip()
    return None


def _count_gpus() -> int:
    """Return the number of visible GPUs; 0 if DeepSpeed's accelerator is another one."""
    return len(_visible_gpus()) if os.environ.get("DS_ACCELERATOR", "cuda") == "cuda" else 0


def main(arguments: list[str]) -> NoReturn:
    """Run one node of an elastic job."""
    options = parse_options(arguments)
    try:
        place = NodePlace.of(options.job, options.node)
        token_of(options.job)
        lock_as_alive(place)
        sweep(place)
        _announce_leftovers(place)
        sys.exit(NodeProcesses(options, place).run())
    except (ConfigError, OSError) as error:
        print(f"{_USAGE}: {error}", file=sys.stderr)
        sys.exit(2)
