"""What being elastic costs while nothing fails: steps of the same job with and without, in turn, on an idle machine.

    python -m benchmarks.elastic.cost --json              # k chosen by the job; at most 2 % is the goal
    python -m benchmarks.elastic.cost --frozen --every 1  # most parameters frozen, as with LoRA; at most 1 %

Two ranks, one a node, over loopback. The first steps of each run, in which k is found, do not count.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.elastic.nodes import Cluster, warm_server
from ds_hetero.elastic.segments import SUFFIX, read_header

_WARM_UP, _RANKS = 60, 2
_START_LIMIT_S = 90.0


def _elastic(folder: Path, arguments: list[str], num_steps: int, socket: Path) -> tuple[float, int | None]:
    """Seconds of a step of an elastic job, and the steps between its latest two saves."""
    cluster = Cluster(folder, [1] * _RANKS, arguments, socket)
    try:
        cluster.start()
        seconds = _step_s(cluster, num_steps)
        paths = cluster.nodes[0].place.folder.glob(f"own-*{SUFFIX}")
        steps = sorted(header.save.step for path in paths if (header := read_header(path)) is not None)
        return seconds, steps[-1] - steps[-2] if len(steps) > 1 else None
    finally:
        cluster.end()


def _plain(folder: Path, arguments: list[str], num_steps: int) -> float:
    """Seconds of a step of the same job by torchrun."""
    cluster = Cluster(folder, [1] * _RANKS, arguments, None)
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(_RANKS), "--master-port", "0"]
    command += ["-m", "ds_hetero.run", str(cluster.script), "--events", str(cluster.log), *arguments, "--plain"]
    with (folder / "plain.log").open("wb") as log:
        job = subprocess.Popen(command, env=cluster.environment, cwd=Path(__file__).parents[2], stdout=log, stderr=log)
    try:
        return _step_s(cluster, num_steps)
    finally:
        job.send_signal(signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            job.wait(30)
        job.kill()


def _step_s(cluster: Cluster, num_steps: int) -> float:
    last = _WARM_UP + num_steps
    limit_s = _START_LIMIT_S + 2.0 * last
    if not cluster.wait_for(lambda events: any(e["event"] == "step" and e["step"] >= last for e in events), limit_s):
        raise RuntimeError(f"the job came to no step {last}; its logs are in {cluster.folder}")
    times = {event["step"]: event["time"] for event in cluster.events() if event["event"] == "step"}
    return float(times[last] - times[_WARM_UP]) / num_steps


def main() -> None:
    """Parse, run, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stage", type=int, default=1)
    parser.add_argument("--every", type=int, default=0, help="steps between two saves; 0 lets the job choose")
    parser.add_argument("--frozen", action="store_true")
    parser.add_argument("--width", type=int, default=384, help="of the model")
    parser.add_argument("--steps", type=int, default=200, help="that are measured in each run")
    parser.add_argument("--time-s", type=float, default=300.0, help="after which no further pair of runs begins")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    arguments = ["--stage", str(options.stage), "--every", str(options.every), "--width", str(options.width), "--bare"]
    arguments += ["--frozen"] if options.frozen else []
    begin_s, pair_s, plain, elastic, every = time.monotonic(), 0.0, [], [], []
    with tempfile.TemporaryDirectory() as root, warm_server(Path(root)) as socket:
        while not plain or time.monotonic() - begin_s + pair_s < options.time_s:
            pair_began_s = time.monotonic()
            folder = Path(root, str(len(plain)))
            os.makedirs(folder / "elastic"), os.makedirs(folder / "plain")
            plain.append(_plain(folder / "plain", arguments, options.steps))
            seconds, steps = _elastic(folder / "elastic", arguments, options.steps, socket)
            elastic.append(seconds), every.append(steps)
            pair_s = time.monotonic() - pair_began_s
    cost = statistics.median(elastic) / statistics.median(plain) - 1
    line = {"plain_step_s": plain, "elastic_step_s": elastic, "every_steps": every, "cost": cost}
    print(json.dumps(line) if options.json else "\n".join(f"{name}: {value}" for name, value in line.items()))


if __name__ == "__main__":
    main()
