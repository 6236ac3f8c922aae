"""Plant faults in training jobs: is each one detected at the step at which it begins, and named, on all ranks?

    python -m benchmarks.planted                       # all, some ten minutes
    python -m benchmarks.planted --only "A1|buffer"    # those whose name matches
    python -m benchmarks.planted --list

Tiny models train six steps on 2 to 4 gloo ranks with "checks" at their default; the step at which a fault begins is
known. The same job trains with "checks" off, and on one process without the fault: if these two are equal, the change
is no fault. Controls look wrong and are right: none may be refused.

The exit code is 1 if a control was refused, or a fault ended badly: a hang, a bare error, ranks that continue.
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from rich.console import Console
from rich.table import Table

from benchmarks.measure.results import FOLDER, header, progress, write
from benchmarks.planted.controls import CONTROLS
from benchmarks.planted.job import STEPS_TAKEN, Job, Trace, run_alone, run_on_ranks
from benchmarks.planted.reported import REPORTED
from benchmarks.planted.trainers import TRAINERS
from benchmarks.planted.unforeseen import UNFORESEEN
from benchmarks.planted.verdict import BAD_END, FALSE_ALARM, WRONG, Verdict, distance, judge
from tests.support import run_deepspeed, start_server

RESULT = FOLDER / "planted.json"
JOBS: list[type[Job]] = [*REPORTED, *TRAINERS, *UNFORESEEN, *CONTROLS]
_LIMIT_S = 150.0
_TOGETHER = 8  # jobs of one start of ranks


def main() -> int:
    """Run the jobs, print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", metavar="PATTERN", help="jobs whose name this regular expression is found in")
    parser.add_argument("--list", action="store_true", help="print the jobs' names and run none")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the result here too")
    options = parser.parse_args()
    jobs = [job for job in JOBS if re.search(options.only or "", job.name)]
    if options.list:
        print("\n".join(f"{job.name}: {job.what}" for job in jobs))
        return 0
    os.environ |= {"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}  # before the server imports DeepSpeed
    start_server(["benchmarks.planted.job", "tests.integration.tiny"], deepspeed=True)
    begin, verdicts = time.monotonic(), list[Verdict]()
    only = f" --only {shlex.quote(options.only)}" if options.only else ""
    result = header(f"python -m benchmarks.planted{only}")  # where else the result goes says nothing of it
    with progress(Console(stderr=True)) as report:
        for number, together in enumerate(chunks := _together(jobs)):
            report(number / len(chunks), together[0].name[:48])
            verdicts += run_jobs(together)
    result["seconds"] = round(time.monotonic() - begin, 1)
    result["counts"] = dict(Counter(verdict.verdict for verdict in verdicts))
    result["jobs"] = [asdict(verdict) for verdict in verdicts]
    for path in [RESULT] * (len(jobs) == len(JOBS)) + [options.json] * (options.json is not None):
        write(result, path)
    _show(verdicts)
    return int(any(verdict.verdict in (BAD_END, FALSE_ALARM, WRONG) for verdict in verdicts))


def run_jobs(jobs: Sequence[type[Job]]) -> list[Verdict]:
    """Train jobs with checks, without checks, and on one process.

    Many jobs share one start of ranks, unless one ends badly.
    """
    world = jobs[0].world
    alone = _run(run_alone, 1, jobs)
    without = _run(run_on_ranks, world, jobs, False)
    with_checks = _run(run_on_ranks, world, jobs, True)
    verdicts = []
    for job, alone_traces, off_traces, on_traces in zip(jobs, alone, without, with_checks, strict=True):
        without_checks = distance(off_traces[0], alone_traces[0]) if alone_traces and off_traces else None
        verdicts.append(
            judge(
                job,
                on_traces,
                without_checks,
                distance(on_traces[0], alone_traces[0]) if alone_traces and on_traces else None,
            )
        )
    return verdicts


def _together(jobs: Sequence[type[Job]]) -> list[list[type[Job]]]:
    """Return the groups of jobs that share one start of ranks."""
    by_world: dict[int, list[type[Job]]] = {}
    for job in jobs:
        if not job.is_apart:
            by_world.setdefault(job.world, []).append(job)
    apart = [[job] for job in jobs if job.is_apart]
    return apart + [of[i : i + _TOGETHER] for of in by_world.values() for i in range(0, len(of), _TOGETHER)]


def _run(run: object, world: int, jobs: Sequence[type[Job]], *options: object) -> list[list[Trace]]:
    """Return traces by job and rank; none for a job whose ranks hung or died."""
    traces = _attempt(run, world, list(jobs), *options)
    if len(jobs) > 1 and any(
        len(of_rank) < len(jobs) for of_rank in traces or [[]]
    ):  # one of them ended badly: each has ranks of its own
        return [trace for job in jobs for trace in _run(run, world, [job], *options)]
    return [[of_rank[number] for of_rank in traces] for number in range(len(jobs))]


def _attempt(run: object, world: int, *arguments: object) -> list[list[Trace]]:
    """Return the traces of every rank; none if ranks hung or died."""
    try:
        # accelerate takes ranks on CPUs for its own kind of job otherwise.
        env = {"ACCELERATE_USE_CPU": "true" if run is run_alone else "false"}
        traces: list[list[Trace]] = run_deepspeed(run, world, *arguments, timeout_s=_LIMIT_S, env=env)  # type: ignore[arg-type]
    except AssertionError as error:
        print(str(error)[-3000:], file=sys.stderr)
        return _of_ended(str(error), world)
    return traces


def _of_ended(report: str, world: int) -> list[list[Trace]]:
    """Return the traces of ranks that ds_hetero ended while they waited for others; none if a rank ended otherwise."""
    traces = []
    for part in report.split("\n--- rank ")[1:]:
        steps = re.findall(rf"{STEPS_TAKEN} (\d+)", part)
        message = re.findall(r"ds_hetero\.errors\.(\w+): (.*)", part)
        if "end of its output" in part.partition("\n")[0] and message:
            error, text = message[-1]
            traces.append([Trace(steps=int(steps[-1]) if steps else 0, error=error, message=text)])
    return traces if len(traces) == world else []


def _show(verdicts: Sequence[Verdict]) -> None:
    """Print the table of verdicts."""
    table = Table(
        "fault", "what it is", "begins", "found", "by which message", "ranks ended", "without checks", "verdict"
    )
    for row in verdicts:
        step = "-" if row.begins is None else str(row.begins)
        detected_step = "-" if row.found is None else str(row.found)
        harm = "not trained" if row.harm is None else f"{row.harm:.1e}"
        table.add_row(
            row.name,
            row.what,
            step,
            detected_step,
            row.message,
            f"{row.ended}/{row.ranks}",
            harm,
            row.verdict,
            end_section=True,
        )
    console = Console(width=max(Console().width, 180))
    console.print(table)
    for verdict, count in Counter(row.verdict for row in verdicts).most_common():
        console.print(f"{count:3} {verdict}")


if __name__ == "__main__":
    sys.exit(main())
