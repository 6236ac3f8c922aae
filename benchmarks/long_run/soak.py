"""Does anything grow over thousands of steps? Three ranks of an elastic job train a tiny model.

    python -m benchmarks.long_run.soak [--steps 20000] [--json]     # half an hour on two cores
    python -m benchmarks.long_run.soak --quick                      # 600 steps: two minutes, mostly a warm-up
    python -m benchmarks.long_run.soak --no-thread-caches           # what is in use, and not what glibc keeps

The job saves to memory, evaluates, writes checkpoints over each other, re-plans its schedule for a rank that is slow in
turn, and keeps ``run.json`` and DeepSpeed's monitor. Every 100 steps (20 of a quick soak) are read:

    of every rank             resident memory without shared pages, shared memory, threads, open files, Python objects;
                              bytes that glibc has given out, blocks that Python uses
    of every other process    the same: launchers, agents and servers of the nodes
    of folders                bytes and files: /dev/shm, logs, run.json, checkpoints; the monitor's, which grow
    of steps                  seconds

Before a rank's reading, Python collects garbage and glibc returns its free pages. But glibc keeps small blocks that a
thread has freed, for that thread alone, and counts them as given out: seven of each of 64 sizes, up to 0.2 MB a thread.
``--no-thread-caches`` turns that off in all processes of the job.

Each quantity gets the slope of a line through it, with a confidence interval that is wide enough for all of them
together; see `benchmarks.long_run.slopes`. The exit code is 1 if one of them grows beyond noise. The result is written
every 1,000 steps, and when the command is stopped by SIGTERM or Ctrl-C; ``--of-readings`` judges the readings in the
folder again. ``--warm-up`` gives the steps that do not count; without it, these are the first quarter.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.elastic.nodes import Cluster, Node, children_of, exit_at_sigterm, warm_server
from benchmarks.long_run.readings import read_folder, read_process
from benchmarks.long_run.records import Record, Records
from benchmarks.long_run.slopes import BLOCKS, FEWEST_READINGS, slope_of
from benchmarks.long_run.soak_ranks import NODES
from benchmarks.long_run.start import SILENCE_S
from benchmarks.measure.results import FOLDER, header, write

STEPS, QUICK_STEPS = 20_000, 600
_READ_EVERY, _QUICK_READ_EVERY, _WRITE_EVERY = 100, 20, 1000  # steps
_CACHE = FOLDER.parents[1] / ".cache" / "long_run" / "soak"
_SCRIPT = Path(__file__).with_name("soak_ranks.py")
_EVENTS, _OUTSIDE = "events.jsonl", "outside.jsonl"
_QUIET_S = 1800.0  # without a reading
_NO_THREAD_CACHES = "glibc.malloc.tcache_count=0"
_GROWS_BY_DESIGN = ("monitor bytes",)  # a line per report


def main() -> int:
    """Run the command; return 1 if a quantity grows, or the job ends before its last step."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int)
    parser.add_argument("--quick", action="store_true", help=f"{QUICK_STEPS:,} steps")
    parser.add_argument("--warm-up", type=int, metavar="STEPS", help="steps that do not count in the slopes")
    parser.add_argument("--no-thread-caches", action="store_true", help="without glibc's caches of freed blocks")
    parser.add_argument("--json", action="store_true", help="print the result as JSON instead of a table")
    parser.add_argument("--of-readings", action="store_true", help="start nothing; judge the readings of the folder")
    parser.add_argument("--folder", type=Path, default=_CACHE)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    exit_at_sigterm()
    steps = options.steps or (QUICK_STEPS if options.quick else STEPS)
    suffix = "_no_caches" * options.no_thread_caches + "_quick" * options.quick
    output = options.output or FOLDER / f"long_run_soak{suffix}.json"
    head = header(" ".join(["python -m benchmarks.long_run.soak", *sys.argv[1:]]))
    if options.no_thread_caches:
        os.environ["GLIBC_TUNABLES"] = _NO_THREAD_CACHES  # glibc reads it when a process starts
    if not options.of_readings:
        shutil.rmtree(options.folder, ignore_errors=True)
        options.folder.mkdir(parents=True)
        try:
            run(options.folder, steps, _QUICK_READ_EVERY if options.quick else _READ_EVERY, output, head)
        except (KeyboardInterrupt, SystemExit):
            judge(options.folder, output, head, options.warm_up)
            raise
    result = judge(options.folder, output, head, options.warm_up)
    if result is None:
        parser.error(f"{options.folder} has fewer than {FEWEST_READINGS} readings of each quantity; give more --steps")
    if options.json:
        print(json.dumps(result))
    else:
        _show(result)
    return 0 if result["steps"] >= steps and not result["growing"] else 1


def judge(folder: Path, output: Path, head: dict[str, Any], warm_up: int | None = None) -> dict[str, Any] | None:
    """Write the result of the readings so far, and return it; None if they are too few.

    Args:
        folder: of the job.
        head: begin of the result.
        warm_up: see `slope_of`.
    """
    records = [record for name in (_EVENTS, _OUTSIDE) for record in Records(folder / name).read()]
    counted = [[step for step, _ in readings if step > (warm_up or 0)] for readings in series_of(records).values()]
    if min(map(len, counted), default=0) < (FEWEST_READINGS if warm_up is None else BLOCKS):
        return None
    result = {**head, **summarize(records, warm_up)}
    write(result, output)
    return result


def run(folder: Path, steps: int, read_every: int, output: Path, head: dict[str, Any]) -> None:
    """Run the job to its end, and read what is outside of the ranks whenever they have read themselves.

    Args:
        folder: of the job.
        output, head: see `judge`.
    """
    outside = Records(folder / _OUTSIDE)
    arguments = ["--folder", str(folder), "--steps", str(steps), "--read-every", str(read_every)]
    with warm_server(folder) as socket:
        cluster = Cluster(folder, [1] * len(NODES), arguments, socket, script=_SCRIPT, silence_s=SILENCE_S)
        try:
            cluster.start()
            latest, latest_s = 0, time.monotonic()
            while latest < steps and any(node.is_up for node in cluster.nodes):
                time.sleep(0.5)
                read = [event["step"] for event in cluster.events() if event["event"] == "reading"]
                if read and read[-1] > latest:
                    latest, latest_s = read[-1], time.monotonic()
                    print(f"step {latest:,} of {steps:,}", end="\r", file=sys.stderr, flush=True)
                    for name, reading in _read_outside(cluster, folder):
                        outside.add("outside", step=latest, of=name, **reading)
                    if latest % _WRITE_EVERY == 0:
                        judge(folder, output, head)
                if time.monotonic() - latest_s > _QUIET_S:
                    raise RuntimeError(f"no reading after step {latest} within {_QUIET_S:.0f} s; logs: {folder}/n*.log")
        finally:
            cluster.end()


def _read_outside(cluster: Cluster, folder: Path) -> Iterator[tuple[str, dict[str, int]]]:
    """Yield readings of processes other than ranks, and of folders, with their names."""
    for node in cluster.nodes:
        yield from _read_node(node)
    yield "/dev/shm", read_folder(cluster.nodes[0].place.folder.parent)
    yield "report", read_folder(folder / "report")
    yield "checkpoint", read_folder(folder / "checkpoint")
    yield "monitor", read_folder(folder / "monitor")
    logs = [path.stat().st_size for path in folder.glob("*.log")]
    yield "logs", {"bytes": sum(logs), "files": len(logs)}


def _read_node(node: Node) -> Iterator[tuple[str, dict[str, int]]]:
    """Yield the readings of a node's launcher, and of the processes that it started."""
    if node.process is None:
        return
    yield f"launcher {node.name}", read_process(node.process.pid)
    for pid, line in children_of(node.process.pid).items():
        for module in ("agent", "node_server"):
            if f"elastic.node.{module}" in line:
                yield f"{module} {node.name}", read_process(pid)


def series_of(records: list[Record]) -> dict[str, list[tuple[int, float]]]:
    """Return the readings of every quantity by name, each as (step, value)."""
    series: dict[str, list[tuple[int, float]]] = {}
    for record in records:
        if record["event"] == "reading":
            where, left_out = f"rank {record['rank']}", {"rank", "node", "seconds", "changes"}
            if record["rank"] == 0:
                series.setdefault("seconds a step", []).append((record["step"], record["seconds"]))
        elif record["event"] == "outside":
            where, left_out = record["of"], {"of"}
        else:
            continue
        for name, value in record.items():
            if name not in {"event", "time", "step", *left_out}:
                series.setdefault(f"{where} {name}", []).append((record["step"], value))
    return series


def summarize(records: list[Record], warm_up: int | None = None) -> dict[str, Any]:
    """Return the slope of every quantity, and which of them grow; ``warm_up``: see `slope_of`."""
    series = series_of(records)
    rows, growing = [], []
    for name, readings in series.items():
        steps, values = [step for step, _ in readings], [value for _, value in readings]
        slope = slope_of(steps, values, len(series), warm_up)
        is_meant = name in _GROWS_BY_DESIGN
        if slope.grows and not is_meant:
            growing.append(name)
        numbers = {"mean": slope.mean, "per_1000_steps": slope.per_1000_steps, "low": slope.low, "high": slope.high}
        rows.append({"of": name, **numbers, "grows": slope.grows, "by_design": is_meant})
    readings = [record for record in records if record["event"] == "reading"]
    begins = [record for record in records if record["event"] == "ready" and record["rank"] == 0]
    return {
        "steps": max(record["step"] for record in readings),
        "ranks": len(NODES),
        "read_every": readings[0]["step"],
        "starts": len(begins),
        "schedule_changes": readings[-1]["changes"],
        "rows": rows,
        "growing": growing,
        "series": {name: [round(value, 5) for _, value in readings] for name, readings in series.items()},
    }


def _show(result: dict[str, Any]) -> None:
    """Print the table."""
    title = f"{result['steps']:,} steps, {result['schedule_changes']} changes of the schedule; growth per 1,000 steps"
    table = Table("", "mean", "slope", "interval", "grows", title=title)
    for row in result["rows"]:
        interval = f"{row['low']:,.4g} to {row['high']:,.4g}"
        grows = ("by design" if row["by_design"] else "YES") if row["grows"] else "no"
        table.add_row(row["of"], f"{row['mean']:,.5g}", f"{row['per_1000_steps']:,.4g}", interval, grows)
    Console(width=None if sys.stdout.isatty() else 110).print(table)
    print(f"growing beyond noise: {', '.join(result['growing']) or 'nothing'}")


if __name__ == "__main__":
    sys.exit(main())
