"""Kill parts of an elastic job by seed, and compare every step with one process.

    python -m benchmarks.elastic --faults 500 --seed 1 --json     # one line a fault, then one for the run
    python -m benchmarks.elastic --quick                          # 20 faults

Ranks, agents, keepers and nodes are processes of this machine over loopback; nodes have their own memory folder, which
dies with them. Every fault waits at most --limit-s for the next step; that is a hang.
"""

from __future__ import annotations

import argparse
import json
import random
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.elastic.nodes import Cluster, Event, Node, warm_server
from benchmarks.elastic.training import train_alone

KINDS = ("worker", "node", "agent", "keeper", "stop", "freeze", "notice", "twice")
_LOSES_NODE = ("node", "notice")
_START_LIMIT_S = 180.0
_JOBS = ((1, [1, 1, 1]), (3, [1, 1, 1]), (2, [2, 1]), (0, [1, 1]), (3, [2, 2]), (1, [2, 2, 2]))  # stage, ranks by node


class FaultRun:
    """One job, and the faults that it is given.

    Args:
        cluster: its nodes.
        draw: chooses faults.
        every: steps between two saves.
        limit_s: seconds that a fault may take.
    """

    def __init__(self, cluster: Cluster, draw: random.Random, every: int, limit_s: float) -> None:
        self._cluster, self._draw, self._every, self._limit_s = cluster, draw, every, limit_s
        self._reference: list[dict[str, float]] = []

    def run(self, num_faults: int, kinds: tuple[str, ...]) -> Iterator[dict[str, Any]]:
        """Give the job faults one after the other; yields a line for each, and ends with the first hang."""
        if not self.start():
            yield {"fault": "start", "hang": 1}
            return
        for _ in range(num_faults):
            time.sleep(self._draw.uniform(0.1, 2.0))
            line = self.give(self._choose(kinds))
            yield line
            if line["hang"]:
                return

    def start(self) -> bool:
        """Start all nodes; whether they train."""
        self._cluster.start()
        return self._cluster.wait_for(lambda events: _last_step(events) >= 2, _START_LIMIT_S)

    def _choose(self, kinds: tuple[str, ...]) -> str:
        nodes = self._cluster.nodes
        num_up = sum(node.is_up for node in nodes)
        if num_up < len(nodes) and (num_up == 1 or self._draw.random() < 0.5):
            return "join"
        return self._draw.choice([kind for kind in kinds if num_up > 1 or kind not in (*_LOSES_NODE, "freeze")])

    def give(self, kind: str) -> dict[str, Any]:
        """Give the job one fault, and judge how it went on."""
        cluster = self._cluster
        up = [node for node in cluster.nodes if node.is_up]
        down = [node for node in cluster.nodes if not node.is_up]
        node = self._draw.choice(down if kind == "join" else up)
        began_s = time.time()
        expected = self._do(kind, node)
        if kind == "keeper":  # nobody has to notice
            last = _last_step(cluster.events())
            is_back = cluster.wait_for(lambda events: _last_step(events) >= last + 2 * self._every, self._limit_s)
            is_back = is_back and bool(node.children("keeper"))
        else:
            is_back = cluster.wait_for(lambda events: _is_back(events, began_s, expected), self._limit_s)
        if kind == "freeze" and is_back:
            node.signal_all(signal.SIGCONT)
            is_back = cluster.wait_for(lambda events: _is_back(events, began_s, cluster.num_workers), self._limit_s)
        line = {"fault": kind, "node": node.name, "ranks": cluster.num_workers, "hang": int(not is_back)}
        return {**line, **self._judge(kind, began_s)} if is_back else line

    def _do(self, kind: str, node: Node) -> int:
        """Do it; return the ranks with which the job is expected to go on."""
        cluster, draw = self._cluster, self._draw
        if kind == "join":
            node.start()
        elif kind == "node":
            node.die()
        elif kind == "notice":
            assert node.process is not None
            node.process.terminate()
            node.process.wait(60)
        elif kind == "freeze":
            node.signal_all(signal.SIGSTOP)
            return cluster.num_workers - node.workers
        elif kind in ("agent", "keeper"):
            _kill(draw.choice(node.children(kind)))
        elif kind == "stop":
            _kill(draw.choice(node.worker_pids()), signal.SIGSTOP)
        else:
            _kill(draw.choice(node.worker_pids()))
        if kind == "twice":
            time.sleep(draw.uniform(0.1, 4.0))
            other = draw.choice([one for one in cluster.nodes if one.is_up])
            _kill(draw.choice(other.worker_pids()))
        return cluster.num_workers

    def _judge(self, kind: str, began_s: float) -> dict[str, Any]:
        """Steps lost, differences from one process, and how long each phase took."""
        events = self._cluster.events()
        steps = [event for event in events if event["event"] == "step"]
        ready = [event for event in events if event["event"] == "ready" and event["time"] > began_s]
        lost = 0
        if ready:
            before = max(event["step"] for event in steps if event["time"] < ready[-1]["time"])
            lost = max(0, before - ready[-1]["step"])
        if len(self._reference) < _last_step(events):
            self._reference = train_alone(_last_step(events) + 200)
        after = [event for event in steps if event["time"] > began_s]
        # A step that was saved, and killed before it was logged, is seen in the next one's numbers.
        saved = {event["step"] for event in events if event["event"] == "ready"}
        missing = set(range(1, _last_step(events) + 1)) - {event["step"] for event in steps} - saved
        return {
            "lost_steps": lost,
            "steps_missing": len(missing),
            "loss_difference": self._worst(after, "loss"),
            "parameter_difference": self._worst(after, "parameters"),
            "seconds": _phases(events, began_s),
        }

    def _worst(self, steps: list[Event], name: str) -> float:
        pairs = [(step[name], self._reference[step["step"] - 1][name]) for step in steps]
        return max((abs(ours - theirs) / abs(theirs) for ours, theirs in pairs), default=0.0)


def _kill(pid: int, number: int = signal.SIGKILL) -> None:
    import contextlib
    import os

    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


def _last_step(events: list[Event]) -> int:
    return max((event["step"] for event in events if event["event"] == "step"), default=0)


def _is_back(events: list[Event], began_s: float, ranks: int) -> bool:
    """Whether a world of so many ranks was made ready after the fault, and has stepped."""
    ready = [e["time"] for e in events if e["event"] == "ready" and e["world_size"] == ranks and e["time"] > began_s]
    return any(
        e["event"] == "step" and e["world_size"] == ranks and ready and e["time"] > ready[0] for e in reversed(events)
    )


def _phases(events: list[Event], began_s: float) -> dict[str, float]:
    """Seconds of each phase of the last restart after a fault, from the last rank's arrival to the next one's."""
    after = [event for event in events if event["time"] > began_s]
    ends: dict[str, float] = {}
    for name in ("spawn", "init", "built", "ready"):
        times = [event["time"] for event in after if event["event"] == name]
        if not times:
            return {}
        ends[name] = max(times)
    first_step_s = min((e["time"] for e in after if e["event"] == "step" and e["time"] > ends["ready"]), default=None)
    if first_step_s is None:
        return {}
    marks = [began_s, *ends.values(), first_step_s]
    names = ("end_and_meet", "connect", "build", "load", "step")
    phases = {name: round(b - a, 2) for name, a, b in zip(names, marks, marks[1:], strict=False)}
    return {**phases, "all": round(first_step_s - began_s, 2)}


def summarize(lines: list[dict[str, Any]], every: int) -> dict[str, Any]:
    """One line for all faults."""
    back = [line for line in lines if not line["hang"]]
    lost = [line["lost_steps"] for line in back]
    seconds: dict[str, list[float]] = {}
    for line in back:
        if line["seconds"]:
            seconds.setdefault(line["fault"], []).append(line["seconds"]["all"])
    return {
        "faults": len(lines),
        "hangs": sum(line["hang"] for line in lines),
        "lost_at_most": max(lost, default=0),
        "lost_within_every": sum(one <= every for one in lost) / max(1, len(lost)),
        "lost_with_notice": max((x["lost_steps"] for x in back if x["fault"] == "notice"), default=0),
        "steps_missing": max((line["steps_missing"] for line in back), default=0),
        "loss_difference": max((line["loss_difference"] for line in back), default=0.0),
        "parameter_difference": max((line["parameter_difference"] for line in back), default=0.0),
        "median_s": {kind: round(statistics.median(of_kind), 2) for kind, of_kind in sorted(seconds.items())},
    }


def run_jobs(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """All faults, a share of them on each job."""
    draw = random.Random(options.seed)
    jobs = [job for job in _JOBS if options.stage is None or job[0] == options.stage][: options.jobs]
    shares = [options.faults // len(jobs) + (i < options.faults % len(jobs)) for i in range(len(jobs))]
    end_s = time.monotonic() + options.time_s
    with tempfile.TemporaryDirectory(prefix="elastic-") as root, warm_server(Path(root)) as socket:
        for number, ((stage, workers), share) in enumerate(zip(jobs, shares, strict=True)):
            folder = Path(options.logs or root) / f"job{number}"
            folder.mkdir(parents=True)
            arguments = ["--stage", str(stage), "--every", str(options.every)]
            cluster = Cluster(folder, workers, arguments, socket)
            try:
                for line in FaultRun(cluster, draw, options.every, options.limit_s).run(share, options.kinds):
                    yield {"stage": stage, "world": workers, **line}
                    if time.monotonic() > end_s:
                        return
            finally:
                cluster.end()


def main() -> None:
    """Parse, run, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--faults", type=int, default=60)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--every", type=int, default=2, help="steps between two saves")
    parser.add_argument("--stage", type=int, choices=(0, 1, 2, 3))
    parser.add_argument("--kinds", type=lambda text: tuple(text.split(",")), default=KINDS)
    parser.add_argument("--jobs", type=int, default=len(_JOBS))
    parser.add_argument("--limit-s", type=float, default=120.0)
    parser.add_argument("--time-s", type=float, default=36_000.0, help="after which no further fault is given")
    parser.add_argument("--logs", type=Path, help="keep the logs of all processes there")
    parser.add_argument("--quick", action="store_true", help="20 faults on two jobs")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    if options.quick:
        options.faults, options.jobs = 20, 2
    lines = []
    for line in run_jobs(options):
        lines.append(line)
        print(json.dumps(line) if options.json else _text(line), flush=True)
    summary = summarize(lines, options.every)
    print(json.dumps(summary) if options.json else "\n".join(f"{k}: {v}" for k, v in summary.items()), flush=True)
    is_well = not summary["hangs"] and not summary["steps_missing"] and summary["lost_at_most"] < 2 * options.every
    sys.exit(0 if is_well else 1)


def _text(line: dict[str, Any]) -> str:
    if line["hang"]:
        return f"{line['fault']:8} HANG"
    seconds = ", ".join(f"{name} {value}" for name, value in line["seconds"].items())
    return (
        f"ZeRO-{line['stage']} {line['fault']:8} {line['node']} -> {line['ranks']} ranks, lost {line['lost_steps']}, "
        f"loss {line['loss_difference']:.0e}, parameters {line['parameter_difference']:.0e}; {seconds}"
    )


if __name__ == "__main__":
    main()
