"""Measure the cost of being elastic while nothing fails: steps of one job with saves and without, on an idle machine.

    python -m benchmarks.elastic.cost --time-s 130 --json              # k chosen by the job; the target is 2 % at most
    python -m benchmarks.elastic.cost --lora --every 1 --time-s 130    # LoRA adapters alone; the target is 1 %

Two ranks, one per node, train over loopback, with the agents and servers of an elastic job; the CPU time of
these is printed, too. The first steps, in which the job chooses k, do not count. Besides seconds, CPU seconds of all
threads of rank 0's process are compared, which do not drift with the machine. Every pair of turns is printed when it
ends, and the command ends after ``--time-s``, starts included.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from benchmarks.elastic.nodes import Cluster, children_of, warm_server

_WARM_UP_STEPS, _WARM_UP_STEPS_OF_GIVEN = 40, 4  # in which k is found; where it is given
_MIN_STEPS = 10  # of a turn; where k is given, fewer, as the machine's speed drifts
_MIN_STEPS_OF_GIVEN_K = 4
_RANKS = 2
_END_S = 5.0  # that ending the job takes


class Turns:
    """Alternating turns of a job with saves and without, each of a multiple of k steps.

    A turn with saves begins one step before a save is due, and ends when its last save is written and copied, so that
    it contains the whole delay by its saves. In a turn without saves a step only checks a condition.

    Args:
        snapshots: of the engine, a `Snapshots`.
        is_given: whether k is given and need not be found.
    """

    def __init__(self, snapshots: Any, log: Callable[..., None], *, is_given: bool) -> None:
        self._snapshots, self._log = snapshots, log
        self._is_timed = False
        self._least = _MIN_STEPS_OF_GIVEN_K if is_given else _MIN_STEPS
        self._begin, self._end, self._every = 0, _WARM_UP_STEPS_OF_GIVEN if is_given else _WARM_UP_STEPS, 1
        self._begin_s = self._begin_cpu_s = 0.0

    def after_step(self, step: int) -> None:
        """Record a step; at the end of a turn, begin the next one."""
        if step < self._end:
            return
        had_saves = self._is_timed and not self._snapshots.is_paused
        if self._is_timed:
            if had_saves:
                self._snapshots.wait()
            numbers = {
                "seconds": time.perf_counter() - self._begin_s,
                "cpu_s": time.process_time() - self._begin_cpu_s,
                "saves": (step // self._every - self._begin // self._every) * had_saves,
            }
            self._log("turn", steps=step - self._begin, every_steps=self._every, **numbers)
        if not had_saves:
            self._every = self._snapshots.every_steps or 1
        self._snapshots.is_paused = had_saves
        self._is_timed = had_saves or (step + 1) % self._every == 0
        self._begin, self._begin_s, self._begin_cpu_s = step, time.perf_counter(), time.process_time()
        self._end = step + (self._every * math.ceil(self._least / self._every) if self._is_timed else 1)


def _pairs(cluster: Cluster, end_s: float) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    """Yield pairs of turns with saves and without, as rank 0 logs them, until ``end_s``."""
    num_events = 0
    while time.monotonic() < end_s:
        turns = [event for event in cluster.events() if event["event"] == "turn"]
        if len(turns) < 2 * num_events + 2:
            time.sleep(0.1)
            continue
        yield turns[2 * num_events], turns[2 * num_events + 1]
        num_events += 1


def _helpers_s(cluster: Cluster) -> float:
    """Return the CPU seconds so far of all processes of the job except its workers."""
    pids = {pid for pid, line in children_of(os.getpid()).items() if "elastic.node.fork_server" in line}
    for node in cluster.nodes:
        pids |= set(node.all_pids()) - set(node.worker_pids())
    return sum(_cpu_s(pid) for pid in pids)


def _cpu_s(pid: int) -> float:
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _cost(pairs: list[tuple[dict[str, Any], dict[str, Any]]], kind: str = "seconds") -> float:
    """Return how much longer a step takes with saves, as a share."""
    with_s, without_s = (sum(pair[i][kind] for pair in pairs) for i in (0, 1))
    with_steps, without_steps = (sum(pair[i]["steps"] for pair in pairs) for i in (0, 1))
    return float(with_s / with_steps / (without_s / without_steps)) - 1


def _interval(pairs: list[tuple[dict[str, Any], dict[str, Any]]], kind: str = "seconds") -> list[float]:
    """Return the 95 % interval of `_cost` by resampling the pairs."""
    draw = random.Random(0)
    costs = sorted(_cost(draw.choices(pairs, k=len(pairs)), kind) for _ in range(1000))
    return [round(costs[25], 4), round(costs[974], 4)]


def measure(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Yield a line for each pair of turns, and one for all.

    Raises:
        RuntimeError: the time was too short for a pair.
    """
    end_s = time.monotonic() + options.time_s - _END_S
    arguments = ["--stage", str(options.stage), "--every", str(options.every), "--turns"]
    arguments += ["--width", str(options.width), "--length", str(options.length)]
    arguments += ["--lora"] if options.lora else []
    pairs = []
    with tempfile.TemporaryDirectory() as root, warm_server(Path(root), limit_s=options.time_s) as socket:
        cluster = Cluster(Path(root), [1] * _RANKS, arguments, socket)
        try:
            cluster.start()
            begin_s, busy_s = 0.0, 0.0
            for pair in _pairs(cluster, end_s):
                if not pairs:
                    begin_s, busy_s = time.monotonic(), _helpers_s(cluster)
                pairs.append(pair)
                saving, plain = pair
                yield {
                    "step_s": round(plain["seconds"] / plain["steps"], 5),
                    "cost": round(_cost([pair]), 4),
                    **{name: saving[name] for name in ("steps", "every_steps", "saves")},
                }
            if not pairs:
                raise RuntimeError(
                    f"the job came to no pair of turns in {options.time_s:.0f} s: {_latest_log(cluster)}"
                )
            helpers = (_helpers_s(cluster) - busy_s) / (time.monotonic() - begin_s)
        finally:
            cluster.end()
    step_s = sum(plain["seconds"] for _, plain in pairs) / sum(plain["steps"] for _, plain in pairs)
    saves, steps = (sum(saving[name] for saving, _ in pairs) for name in ("saves", "steps"))
    yield {
        "pairs": len(pairs),
        "step_s": round(step_s, 5),
        "steps_per_save": round(steps / saves, 2),
        "save_delays_s": round(_cost(pairs) * step_s * steps / saves, 5),
        "cost": round(_cost(pairs), 4),
        "cost_95": _interval(pairs),
        "cpu_cost": round(_cost(pairs, "cpu_s"), 4),
        "cpu_cost_95": _interval(pairs, "cpu_s"),
        "processors_of_helpers": round(helpers, 4),
    }


def _latest_log(cluster: Cluster) -> str:
    return " | ".join(path.read_text()[-500:] for path in sorted(cluster.folder.glob("*.log")))


def main() -> None:
    """Parse the options, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stage", type=int, default=1)
    parser.add_argument("--every", type=int, default=0, help="steps between two saves; 0 lets the job choose")
    parser.add_argument("--lora", action="store_true")
    parser.add_argument("--width", type=int, default=384, help="of the model")
    parser.add_argument("--length", type=int, default=512, help="tokens of the longest sequence")
    parser.add_argument("--time-s", type=float, default=130.0, help="after which all has ended")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    try:
        for line in measure(options):
            print(json.dumps(line) if options.json else ", ".join(f"{k} {v}" for k, v in line.items()), flush=True)
    except RuntimeError as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main()
