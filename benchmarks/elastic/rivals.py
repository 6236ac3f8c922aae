"""Measure seconds and samples lost by the death of a worker: ours, DeepSpeed with checkpoints under torchrun, torchft.

    python -m benchmarks.elastic.rivals --time-s 230 --json                     # ours and stock
    python -m benchmarks.elastic.rivals --torchft FOLDER --time-s 230 --json    # and torchft, installed in that folder

Three ranks train the same model on one machine. One of them is killed by seed, repeatedly, for a share of the time.
Each fault has a line: ``seconds`` from the kill to the next new step, ``whole_s`` to the first new step of all three
ranks, steps done twice, and samples below it that no step has used.

torchrun's own stores keep the addresses of dead ranks (pytorch issue 135712), so stock runs with the variable that
gives each round its own store. torchft runs with short timeouts: 1 s for heartbeats and for latecomers.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.elastic.baseline_jobs import RANKS
from benchmarks.elastic.nodes import Cluster, Event, EventLog, environment_of_ranks, warm_server

_REPOSITORY = Path(__file__).resolve().parents[2]
_FIRST_STEP = 10  # done before the first fault


class BaselineJob(EventLog):
    """A job of three ranks.

    Args:
        folder: of its logs.
        kind: see `baseline_jobs`.
    """

    def __init__(self, folder: Path, kind: str) -> None:
        folder.mkdir()
        super().__init__(folder / "events.jsonl")
        self.folder, self.kind = folder, kind
        self.environment = environment_of_ranks()
        self._processes: list[subprocess.Popen[bytes]] = []

    def start(self) -> None:
        """Start all of its processes."""
        raise NotImplementedError

    def kill(self, draw: random.Random) -> None:
        """Kill a worker."""
        alive = [pid for pid in self._workers() if _lives(pid)]
        os.kill(draw.choice(alive), signal.SIGKILL)

    def _workers(self) -> list[int]:
        return list({event["rank"]: event["pid"] for event in self.events() if event["event"] == "spawn"}.values())

    def look_after(self) -> None:
        """Restart processes that have ended, if the job does not do so itself."""

    def end(self) -> None:
        """End all of its processes."""
        for process in self._processes:
            process.terminate()
        for process in self._processes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(20)
            process.kill()
            process.wait()
        for pid in self._workers():
            if _lives(pid):
                os.kill(pid, signal.SIGKILL)

    def _run(self, command: list[str], **variables: str) -> subprocess.Popen[bytes]:
        with (self.folder / "job.log").open("ab") as log:
            process = subprocess.Popen(
                [sys.executable, *command],
                env={**self.environment, **variables},
                cwd=_REPOSITORY,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        self._processes.append(process)
        return process


class Stock(BaselineJob):
    """DeepSpeed under torchrun with checkpoints."""

    def start(self) -> None:
        """Start torchrun, which restarts all workers when one dies."""
        command = ["-m", "torch.distributed.run", "--nnodes", "1", "--nproc-per-node", str(RANKS)]
        command += ["--max-restarts", "1000", "--monitor-interval", "0.1", "--rdzv-backend", "c10d"]
        command += ["--rdzv-endpoint", "127.0.0.1:0", "-m", "benchmarks.elastic.baseline_jobs", "stock"]
        command += ["--events", str(self.log), "--folder", str(self.folder / "checkpoints")]
        self._run(command, TORCH_DISABLE_SHARE_RDZV_TCP_STORE="1")


class Torchft(BaselineJob):
    """Replicas of one process each, and torchft's lighthouse.

    Args:
        installed: folder of torchft.
    """

    def __init__(self, folder: Path, kind: str, installed: Path) -> None:
        super().__init__(folder, kind)
        self.environment["PYTHONPATH"] += f"{os.pathsep}{installed}"
        with socket.create_server(("127.0.0.1", 0)) as server:
            self._port = server.getsockname()[1]

    def start(self) -> None:
        """Start the lighthouse and the replicas."""
        serve = (
            "import time; from torchft.coordination import LighthouseServer as Server; "
            f"server = Server(bind='127.0.0.1:{self._port}', min_replicas={RANKS - 1}, join_timeout_ms=1000, "
            "quorum_tick_ms=50, heartbeat_timeout_ms=1000); time.sleep(1e6)"
        )
        self._run(["-c", serve])
        self._replicas = [self._start_replica(number) for number in range(RANKS)]

    def _start_replica(self, number: int) -> subprocess.Popen[bytes]:
        command = [
            "-m",
            "benchmarks.elastic.baseline_jobs",
            "torchft",
            "--events",
            str(self.log),
            "--replica",
            str(number),
        ]
        return self._run(command, TORCHFT_LIGHTHOUSE=f"http://127.0.0.1:{self._port}")

    def look_after(self) -> None:
        """Restart replicas that have died."""
        for number, replica in enumerate(self._replicas):
            if replica.poll() is not None:
                self._replicas[number] = self._start_replica(number)


class Ours(BaselineJob):
    """An elastic job. Its workers share every sample, so that a step takes one sample."""

    def __init__(self, folder: Path, kind: str, warm_socket: Path) -> None:
        super().__init__(folder, kind)
        self._cluster = Cluster(folder, [1] * RANKS, ["--stage", "1", "--every", "2"], warm_socket)

    def start(self) -> None:
        """Start all nodes."""
        self._cluster.start()

    def _workers(self) -> list[int]:
        return [pid for node in self._cluster.nodes for pid in node.worker_pids()]

    def end(self) -> None:
        """Kill all nodes."""
        self._cluster.end()


def _lives(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def faults_of(job: BaselineJob, draw: random.Random, end_s: float) -> Iterator[dict[str, Any]]:
    """Strike a job until the time ends; yield a line for each fault."""
    job.start()
    if not _wait(job, lambda: _newest(job.events()) >= _FIRST_STEP, end_s):
        yield {"job": job.kind, "hang": 1, "log": _latest_log(job)}
        return
    judged = 0
    while time.monotonic() < end_s:
        time.sleep(draw.uniform(0.5, 2.5))
        before, killed_s = _newest(job.events()) + 1, time.time()  # the step under way may still end
        job.kill(draw)

        def next_step(ranks: int = 1, before: int = before, killed_s: float = killed_s) -> float | None:
            """Seconds to the first step of at least so many ranks that nobody had done."""
            of_events = (e for e in job.events() if e["event"] == "step" and e["step"] > before)
            times = [e["time"] for e in of_events if e["world_size"] >= ranks and e["time"] > killed_s]
            return None if not times else min(times) - killed_s

        if not _wait(job, lambda: next_step(RANKS) is not None, end_s):
            return  # it had no more time; no fault is judged half
        until = before
        ready = [event["step"] for event in job.events() if event["event"] == "ready" and event["time"] > killed_s]
        repeats = job.kind != "torchft"  # which never goes back
        yield {
            "job": job.kind,
            "seconds": round(next_step() or 0.0, 2),
            "whole_s": round(next_step(RANKS) or 0.0, 2),
            "steps_repeated": max(0, before - max(ready)) if ready and repeats else 0,
            "samples_lost": _num_lost(job, judged, until),
        }
        judged = until


def _num_lost(job: BaselineJob, since: int, until: int) -> int:
    """Return the samples of the steps after ``since``, up to ``until``, that no step has used."""
    events = [event for event in job.events() if event["event"] in ("step", "ready")]
    if job.kind == "ours":  # one that was saved, and killed before it was logged, is gone on from
        return len(set(range(since + 1, until + 1)) - {event["step"] for event in events})
    expected = set(range(since * RANKS, until * RANKS))
    return len(expected - {event["sample"] for event in events if event["event"] == "step"})


def _newest(events: list[Event]) -> int:
    return max((event["step"] for event in events if event["event"] == "step"), default=0)


def _wait(job: BaselineJob, holds: Any, end_s: float) -> bool:
    while time.monotonic() < end_s:
        if holds():
            return True
        job.look_after()
        time.sleep(0.05)
    return False


def _latest_log(job: BaselineJob) -> str:
    return " | ".join(path.read_text()[-1500:] for path in sorted(job.folder.glob("*.log")))


def summarize(lines: list[dict[str, Any]]) -> dict[str, Any]:
    """Return medians by job."""
    summary: dict[str, Any] = {}
    for kind in dict.fromkeys(line["job"] for line in lines):
        of_kind = [line for line in lines if line["job"] == kind and "seconds" in line]
        if of_kind:
            medians = {
                name: statistics.median(line[name] for line in of_kind)
                for name in ("seconds", "whole_s", "steps_repeated")
            }
            lost = sum(line["samples_lost"] for line in of_kind)
            summary[kind] = {"faults": len(of_kind), **medians, "samples_lost": lost}
    return summary


def main() -> None:
    """Parse the options, run the jobs, print the lines."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--torchft", type=Path, help="folder that torchft is installed in, by pip's --target")
    parser.add_argument("--jobs", default="ours,stock,torchft", help="of these")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--time-s", type=float, default=230.0, help="after which all has ended")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    kinds = [kind for kind in options.jobs.split(",") if kind != "torchft" or options.torchft is not None]
    draw, lines, end_s = random.Random(options.seed), [], time.monotonic() + options.time_s - 10
    with tempfile.TemporaryDirectory(prefix="rivals-") as root, contextlib.ExitStack() as stack:
        socket_path = stack.enter_context(warm_server(Path(root))) if "ours" in kinds else Path()
        for number, kind in enumerate(kinds):
            share_s = (end_s - time.monotonic()) / (len(kinds) - number)
            job = _make_job(kind, Path(root, kind), options.torchft, socket_path)
            try:
                for line in faults_of(job, draw, time.monotonic() + share_s):
                    lines.append(line)
                    print(json.dumps(line) if options.json else line, flush=True)
            finally:
                job.end()
    print(json.dumps(summarize(lines)) if options.json else summarize(lines), flush=True)


def _make_job(kind: str, folder: Path, installed: Path, warm_socket: Path) -> BaselineJob:
    if kind == "stock":
        return Stock(folder, kind)
    return Ours(folder, kind, warm_socket) if kind == "ours" else Torchft(folder, kind, installed)


if __name__ == "__main__":
    main()
