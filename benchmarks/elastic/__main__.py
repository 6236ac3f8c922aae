"""Kill parts of an elastic job by seed, and compare every step with one process.

    python -m benchmarks.elastic --faults 500 --seed 1 --json     # one line per fault, then one for the run
    python -m benchmarks.elastic --quick                          # 20 faults

Ranks, agents, node servers and nodes are processes of this machine; a node has a memory folder of its own, which is
deleted with it. Most jobs run over loopback. The others run in network namespaces, whose links can be cut (which needs
root); in one of them each node has its own fork server, which can be killed. Every fault waits for the next step,
--limit-s at most; longer is a hang. With --at-once several jobs share the machine, which uses the seconds in which a
job waits for a silence; the phases of a fault are measured with one job alone.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import queue
import random
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.elastic.faults import KINDS, PHASES, FaultRun
from benchmarks.elastic.network import network_of
from benchmarks.elastic.nodes import Cluster, warm_server


class Job(NamedTuple):
    """One job of the benchmark."""

    stage: int  # of ZeRO
    workers: list[int]  # by node
    has_network: bool = False  # of its own; then fewer than half of the ranks wait, else any number goes on
    loop: str = "own"  # of `training.LOOPS`
    is_lora: bool = False  # its adapters alone are trained
    warms_itself: bool = False  # each node starts a fork server, which imports the frameworks


JOBS = (
    Job(1, [1, 1, 1]),
    Job(3, [1, 1, 1], has_network=True, warms_itself=True),
    Job(2, [2, 1]),
    Job(0, [1, 1]),
    Job(2, [2, 1, 1], has_network=True),
    Job(3, [2, 2]),
    Job(1, [2, 2, 2], has_network=True),
    Job(0, [2, 2, 1]),
    Job(3, [3, 3]),
    Job(1, [1, 1, 1], loop="trainer"),
    Job(3, [2, 1], loop="trainer"),
    Job(3, [1, 1, 1], is_lora=True),
    Job(0, [2, 2, 2]),
    Job(2, [3, 2], has_network=True),
    Job(1, [1, 1, 1], loop="pipelines"),
    Job(1, [2, 2, 2], loop="pipelines"),
    Job(1, [1, 1, 1], loop="pipelines", is_lora=True),
    Job(1, [1, 1, 1], loop="accelerate"),
    Job(3, [2, 1], loop="accelerate"),
    Job(1, [2, 1], loop="sft"),
    Job(3, [1, 1], loop="sft"),
    Job(1, [1, 1, 1], loop="trainer_of_pipelines"),
    Job(1, [2, 2], loop="trainer_of_pipelines"),
    Job(1, [3, 2], loop="pipelines", is_lora=True),
)


def summarize(lines: list[dict[str, Any]], every: int) -> dict[str, Any]:
    """Return one line on all faults."""
    back = [line for line in lines if not line["hang"]]
    lost = [line["lost_steps"] for line in back]
    seconds: dict[str, list[float]] = {}
    for line in back:
        if line["seconds"] and line["phase"] == "step":
            seconds.setdefault(line["fault"], []).append(line["seconds"]["all"])
    return {
        "faults": len(lines),
        "hangs": sum(line["hang"] for line in lines),
        "lost_at_most": max(lost, default=0),
        "lost_within_every": sum(one <= every for one in lost) / max(1, len(lost)),
        "lost_with_notice": max((x["lost_steps"] for x in back if _is_notice_alone(x)), default=0),
        **{
            name: max((line[name] for line in back), default=0)
            for name in ("steps_missing", "loss_difference", "norm_difference", "parameter_difference")
        },
        "steps": sum(line["steps"] for line in back),
        "median_s": {kind: round(statistics.median(of_kind), 2) for kind, of_kind in sorted(seconds.items())},
    }


def _is_notice_alone(line: dict[str, Any]) -> bool:
    return line["fault"] == "notice" and line["phase"] in ("step", "save", "copy")


def run_jobs(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Divide the faults over the jobs, and run all jobs."""
    jobs = [JOBS[number] for number in options.jobs]
    shares = [options.faults // len(jobs) + (i < options.faults % len(jobs)) for i in range(len(jobs))]
    end_s, has_ended = time.monotonic() + options.time_s, threading.Event()
    lines: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()

    def run_job(number: int, job: Job, share: int) -> None:
        if time.monotonic() > end_s:
            return
        folder = Path(options.logs or root) / f"job{number}"
        folder.mkdir(parents=True)
        draw = random.Random(f"{options.seed} {number}")
        with cluster_of(job, folder, options.every, socket, options.pause_s) as cluster:
            faults = FaultRun(cluster, draw, options.every, options.limit_s)
            for line in faults.run(share, options.kinds, options.phases):
                lines.put({"stage": job.stage, "world": job.workers, "loop": job.loop, **line})
                if has_ended.is_set() or time.monotonic() > end_s:
                    return

    with tempfile.TemporaryDirectory(prefix="elastic-") as root, contextlib.ExitStack() as stack:
        needs_server = not all(job.warms_itself for job in jobs)
        socket = stack.enter_context(warm_server(Path(root))) if needs_server else None
        with ThreadPoolExecutor(options.at_once) as pool:
            running = [pool.submit(run_job, *future) for future in zip(options.jobs, jobs, shares, strict=True)]
            try:
                while not lines.empty() or not all(future.done() for future in running):
                    with contextlib.suppress(queue.Empty):
                        yield lines.get(timeout=0.1)
                for future in running:
                    future.result()
            finally:
                has_ended.set()
                for future in running:
                    future.cancel()


@contextlib.contextmanager
def cluster_of(job: Job, folder: Path, every: int, socket: Path | None, pause_s: float = 0.05) -> Iterator[Cluster]:
    """Yield the nodes of a job, and end them. ``socket``: of a fork server for jobs that have none."""
    arguments = ["--stage", str(job.stage), "--every", str(every), "--pause-s", str(pause_s)]
    arguments += [*([] if job.loop == "own" else ["--loop", job.loop]), *(["--lora"] if job.is_lora else [])]
    with contextlib.ExitStack() as stack:
        network = stack.enter_context(network_of(len(job.workers))) if job.has_network else None
        warm_socket = None if job.warms_itself else socket
        cluster = Cluster(folder, job.workers, arguments, warm_socket, network, keeps_majority=job.has_network)
        stack.callback(cluster.end)
        yield cluster


def main() -> None:
    """Parse the options, run the jobs, print the lines."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--faults", type=int, default=60)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--every", type=int, default=2, help="steps between two saves")
    parser.add_argument("--kinds", type=_listed(KINDS), default=KINDS, help=f"of {','.join(KINDS)}")
    parser.add_argument("--phases", type=_listed(PHASES), default=PHASES, help=f"of {','.join(PHASES)}")
    parser.add_argument(
        "--jobs", type=lambda text: [int(one) for one in text.split(",")], default=list(range(len(JOBS)))
    )
    parser.add_argument("--at-once", type=int, default=1, help="jobs that run at the same time")
    parser.add_argument("--pause-s", type=float, default=0.05, help="after each step")
    parser.add_argument("--limit-s", type=float, default=120.0)
    parser.add_argument("--time-s", type=float, default=36_000.0, help="after which no further fault is given")
    parser.add_argument("--logs", type=Path, help="keep the logs of all processes there")
    parser.add_argument("--quick", action="store_true", help="20 faults on two jobs over loopback")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    if options.quick:
        options.faults, options.jobs = 20, [0, 5]
    lines = []
    for line in run_jobs(options):
        lines.append(line)
        print(json.dumps(line) if options.json else _text(line), flush=True)
    summary = summarize(lines, options.every)
    print(json.dumps(summary) if options.json else "\n".join(f"{k}: {v}" for k, v in summary.items()), flush=True)
    is_well = not summary["hangs"] and not summary["steps_missing"] and summary["lost_at_most"] < 2 * options.every
    sys.exit(0 if is_well else 1)


def _listed(choices: tuple[str, ...]) -> Any:
    def parse(text: str) -> tuple[str, ...]:
        if unknown := set(text.split(",")) - set(choices):
            raise argparse.ArgumentTypeError(f"{sorted(unknown)} is not of {', '.join(choices)}")
        return tuple(text.split(","))

    return parse


def _text(line: dict[str, Any]) -> str:
    if line["hang"]:
        return f"{line['fault']:8} {line['phase']:8} HANG {line['status']}"
    seconds = ", ".join(f"{name} {value}" for name, value in line["seconds"].items())
    return (
        f"ZeRO-{line['stage']} {line['fault']:8} {line['phase']:8} {line['node']} -> {line['ranks']} ranks, "
        f"lost {line['lost_steps']}, loss {line['loss_difference']:.0e}, parameters "
        f"{line['parameter_difference']:.0e}; {seconds}"
    )


if __name__ == "__main__":
    main()
