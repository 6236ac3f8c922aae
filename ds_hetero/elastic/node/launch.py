"""``python -m ds_hetero.run --elastic``: the processes of one node of an elastic job.

this process      starts the others again when they die, and passes SIGTERM on
keeper            holds the segments; on the first node, serves the rendezvous
warm server       forks workers (not with --cold)
agents            one of torchrun's for each device, each with one worker
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
from ds_hetero.elastic.node.keeper_requests import ask
from ds_hetero.elastic.node.leftovers import free_node, hold, leftovers, sweep
from ds_hetero.elastic.node.place import NodePlace, token_of
from ds_hetero.elastic.node.processes import end_with_parent
from ds_hetero.errors import ConfigError

_USAGE = "python -m ds_hetero.run --elastic [options] SCRIPT ARGS"
_POLL_S = 0.05
_MAX_RESTARTS = 1_000_000  # of workers; the rendezvous ends a job that cannot go on
_STOP_GRACE_S = 30


def parse_options(arguments: list[str]) -> argparse.Namespace:
    """Read the options before the script."""
    parser = argparse.ArgumentParser(prog="python -m ds_hetero.run --elastic", description=__doc__, allow_abbrev=False)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--join", metavar="HOST:PORT", help="of the first node; on all nodes but that")
    parser.add_argument("--listen", metavar="HOST[:PORT]", default="127.0.0.1", help="interface of this node's keeper")
    parser.add_argument("--min-ranks", type=int, help="below which the job waits for more (default: more than half)")
    parser.add_argument("--ranks", type=int, help="that the job begins with (default: all that come in 30 s)")
    parser.add_argument("--workers", type=int, help="on this node (default: one a GPU, else one)")
    parser.add_argument(
        "--card",
        help="of this node, by which a job that runs judges whether it pays (default: the driver's; none: it does)",
    )
    parser.add_argument("--job", default="job", help="name of the job")
    parser.add_argument("--node", default=socket.gethostname(), help="name of this node (default: its host name)")
    parser.add_argument("--memory-gib", type=float, help="of shared memory that segments may take (default: all)")
    parser.add_argument("--notice-s", type=int, default=25, help="between SIGTERM and the end of this node")
    parser.add_argument("--silence-s", type=float, default=30, help="after which a worker that shows no life is killed")
    parser.add_argument("--cold", action="store_true", help="no warm server: workers import for themselves")
    parser.add_argument("--warm", metavar="SOCKET", help="of a warm server that runs already, such as of another job")
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
        parser.error("no script was given")
    return options


class NodeProcesses:
    """The processes of this node."""

    def __init__(self, options: argparse.Namespace, place: NodePlace) -> None:
        self._options, self._place = options, place
        self._host, _, port = options.listen.partition(":")
        self._port = int(port or 0)
        self._socket = Path(options.warm) if options.warm else place.folder / "warm.sock"
        self._keeper: subprocess.Popen[bytes] | None = None
        self._warm: subprocess.Popen[bytes] | None = None
        self._agents: list[subprocess.Popen[bytes] | None] = []
        self._codes: dict[int, int] = {}
        self._environment = {**os.environ, place_of.JOB: options.job, place_of.NODE: options.node}
        self._environment.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # no stacks of those who lose a peer
        self._is_leaving = False

    def run(self) -> int:
        """Run until the agents have ended; return the exit code."""
        signal.signal(signal.SIGTERM, self._leave)
        signal.signal(signal.SIGINT, self._leave)
        try:
            self._start_keeper(is_first=True)
            if not (self._options.cold or self._options.warm):
                self._start_warm()
            self._agents = [self._start_agent(number) for number in range(self._num_agents)]
            while len(self._codes) < len(self._agents):
                time.sleep(_POLL_S)
                self._look_after()
            code = max(self._codes.values())
            if code == 0:
                ask(self._address, token_of(self._place.job), {"do": "free"})
            return code
        finally:
            self._end()

    @property
    def _address(self) -> tuple[str, int]:
        return self._host, self._port

    @property
    def _endpoint(self) -> str:
        return self._options.join or f"{self._host}:{self._port}"

    @property
    def _num_agents(self) -> int:
        return self._options.workers or _count_gpus() or 1

    def _rules(self) -> str:
        ranks, least = self._options.ranks, self._options.min_ranks
        rules = {"least": least or ((ranks or 1) // 2 + 1 if ranks else 1), "majority": least is None}
        return json.dumps({**rules, "start": ranks})

    def _start_keeper(self, *, is_first: bool = False) -> None:
        gib = self._options.memory_gib
        memory = [] if gib is None else ["--memory-bytes", str(int(gib * 2**30))]
        self._keeper = self._start(
            [
                "ds_hetero.elastic.node.keeper",
                "--job",
                self._place.job,
                "--node",
                self._place.node,
                "--host",
                self._host,
            ]
            + ["--port", str(self._port), "--rules", self._rules(), *memory, *(["--fresh"] if is_first else [])]
        )
        while (address := self._place.address(of=self._keeper.pid)) is None:
            if self._keeper.poll() is not None:
                raise ConfigError(f"the keeper of node {self._place.node} cannot run; its message is above.")
            time.sleep(0.01)
        self._port = address[1]

    def _start_warm(self) -> None:
        self._warm = self._start(["ds_hetero.elastic.node.warm", str(self._socket)])

    def _start_agent(self, number: int) -> subprocess.Popen[bytes]:
        client = str(Path(__file__).with_name("client.py"))
        most, least = 100_000, self._options.min_ranks or 1
        arguments = ["--nnodes", f"{least}:{most}", "--nproc-per-node", "1", "--max-restarts", str(_MAX_RESTARTS)]
        arguments += [
            "--monitor-interval",
            "0.05",
            "--rdzv-backend",
            "ds_hetero_agent",
            "--rdzv-endpoint",
            self._endpoint,
        ]
        arguments += ["--rdzv-id", self._place.job, "--local-addr", self._host, "--no-python"]
        arguments += ["--shutdown-timeout", str(self._options.notice_s)]
        worker = [sys.executable, "-S", "-E", client, str(self._socket), "--", "-m", "ds_hetero.run"]
        agent = f"{self._place.node}-{number}"
        self._place.remove(f"done-{agent}.json")
        own = {place_of.AGENT: agent, place_of.SILENCE: str(self._options.silence_s)}
        if _count_gpus():
            own["CUDA_VISIBLE_DEVICES"] = _visible_gpus()[number]
        card = self._options.card or _card_of(own.get("CUDA_VISIBLE_DEVICES", ""))
        if card not in (None, "none"):
            own[place_of.CARD] = card
        return self._start(["ds_hetero.elastic.node.agent", *arguments, *worker, *self._options.command], own)

    def _start(self, module: list[str], variables: dict[str, str] | None = None) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            [sys.executable, "-m", *module],
            env={**self._environment, **(variables or {})},
            preexec_fn=end_with_parent,
            start_new_session=True,
        )

    def _look_after(self) -> None:
        """Start again what was killed; note the agents that have ended."""
        if self._keeper is not None and self._keeper.poll() is not None:
            self._start_keeper()
        if self._warm is not None and self._warm.poll() is not None:
            self._start_warm()
        for number, agent in enumerate(self._agents):
            if agent is None or number in self._codes or (code := agent.poll()) is None:
                continue
            if code < 0 and not self._is_leaving:  # killed: whoever did it wanted the agent, not the node
                self._agents[number] = self._start_agent(number)
            else:
                self._codes[number] = abs(code) if code >= 0 else 128 - code

    def _leave(self, *_: object) -> None:
        """Pass the notice on: workers save, commit and end, and the job goes on without this node."""
        self._is_leaving = True
        for number, agent in enumerate(self._agents):
            if agent is not None and number not in self._codes:
                agent.terminate()

    def _end(self) -> None:
        for process in (*self._agents, self._warm, self._keeper):
            if process is not None and process.poll() is None:
                process.terminate()
                try:
                    process.wait(_STOP_GRACE_S if process in self._agents else 3)
                except subprocess.TimeoutExpired:
                    process.kill()
                    process.wait()
        if self._codes and max(self._codes.values()) == 0:
            free_node(self._place)


def _say_leftovers(place: NodePlace) -> None:
    """Say what takes room in the shared memory and could go on."""
    for one in leftovers(place):
        announce(
            f"{one.folder} holds {one.num_bytes / 2**30:,.2f} GiB of saves of job {one.job}, which ended "
            f"{one.seconds / 3600:,.1f} hours ago without coming to its end. Start its command again to go on; else "
            "delete the folder. It is deleted when a job of yours needs the room."
        )


def _visible_gpus() -> list[str]:
    chosen = os.environ.get("CUDA_VISIBLE_DEVICES")
    if chosen is not None:
        return [name for name in chosen.split(",") if name]
    return [str(number) for number in range(len(list(Path("/proc/driver/nvidia/gpus").glob("*"))))]


def _card_of(gpu: str) -> str | None:
    """The driver's name of a GPU; None where it does not say."""
    folders = sorted(Path("/proc/driver/nvidia/gpus").glob("*"))
    try:
        text = (folders[int(gpu)] / "information").read_text()
    except (ValueError, IndexError, OSError):
        return None
    return next((line.partition(":")[2].strip() for line in text.splitlines() if line.startswith("Model")), None)


def _count_gpus() -> int:
    return len(_visible_gpus()) if os.environ.get("DS_ACCELERATOR", "cuda") == "cuda" else 0


def main(arguments: list[str]) -> NoReturn:
    """Run one node of an elastic job."""
    options = parse_options(arguments)
    try:
        place = NodePlace.of(options.job, options.node)
        token_of(options.job)
        hold(place)
        sweep(place)
        _say_leftovers(place)
        sys.exit(NodeProcesses(options, place).run())
    except (ConfigError, OSError) as error:
        print(f"{_USAGE}: {error}", file=sys.stderr)
        sys.exit(2)
