"""Faults in training jobs: do all ranks end, soon, naming the rank that caused it, and does the last checkpoint load?

    python -m benchmarks.faults                          # every job, some 20 minutes
    python -m benchmarks.faults --quick                  # one per phase and fault
    python -m benchmarks.faults --only "kill.*backward"  # those whose name matches

Tiny Llamas train on uneven schedules, ZeRO 0 to 3, on 2 and 4 ranks, in a loop of one's own and under the HF Trainer.
One fault strikes one rank of each job: in start, data, forward, backward, step, save, look; or the rank differs from
the others in its configuration, or decides something alone. Nobody ends the survivors: no launcher, no time limit of
the process group but where a rank stops for good. Then fresh ranks go on from the last checkpoint, and their losses
are compared with those before the fault.

The exit code is 1 if a job hung, a message named a wrong rank or none, a rank's output ended with the raw text of a
backend, or a checkpoint did not load.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks.faults.jobs import START, Job, all_jobs, quick_jobs
from benchmarks.faults.table import show
from benchmarks.faults.training import last_checkpoint
from benchmarks.faults.verdict import Verdict, judge, judge_checkpoint
from benchmarks.faults.world import run_world
from benchmarks.measure.results import FOLDER, header, progress, write

RESULT = FOLDER / "faults.json"
LIMIT_S = 45.0


def main() -> int:
    """Run the jobs, print the table; 1 if anything was wrong."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one job per phase and per fault")
    parser.add_argument("--only", metavar="PATTERN", help="jobs whose name this regular expression is found in")
    parser.add_argument("--list", action="store_true", help="print the jobs' names and run none")
    parser.add_argument("--limit-s", type=float, default=LIMIT_S, help="seconds after which a job counts as a hang")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the result here too")
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help="keep the ranks' output here")
    options = parser.parse_args()
    jobs = [job for job in (quick_jobs() if options.quick else all_jobs()) if re.search(options.only or "", job.name)]
    if options.list:
        print("\n".join(job.name for job in jobs))
        return 0
    result = header(" ".join(["python -m benchmarks.faults", *sys.argv[1:]]))
    begin = time.monotonic()
    verdicts = _run_all(jobs, options.limit_s, options.keep)
    result |= {"seconds": round(time.monotonic() - begin, 1), "jobs": [_as_json(verdict) for verdict in verdicts]}
    if len(jobs) == len(all_jobs()):
        write(result, RESULT)
    if options.json is not None:
        write(result, options.json)
    show(verdicts, result["seconds"], Console(width=max(Console().width, 160)))
    return 0 if all(verdict.is_good for verdict in verdicts) else 1


def _run_all(jobs: Sequence[Job], limit_s: float, keep: Path | None) -> list[Verdict]:
    os.environ |= {
        "DS_ACCELERATOR": "cpu",
        "OMP_NUM_THREADS": "1",
        "TRANSFORMERS_VERBOSITY": "error",
        "ACCELERATE_USE_CPU": "false",
    }
    verdicts = []
    with progress(Console(stderr=True)) as report:
        for number, job in enumerate(jobs):
            report(number / len(jobs), job.name[:48])
            with tempfile.TemporaryDirectory(prefix="ds_hetero_faults_") as scratch:
                folder = Path(scratch) if keep is None else keep / f"{all_jobs().index(job):03}"
                folder.mkdir(parents=True, exist_ok=keep is None)
                verdicts.append(run_job(job, folder, limit_s))
    return verdicts


def run_job(job: Job, folder: Path, limit_s: float = LIMIT_S) -> Verdict:
    """Run one job and go on from its last checkpoint.

    Args:
        job: what to run.
        folder: empty, for its output and checkpoints.
        limit_s: seconds after which it counts as a hang.
    """
    folder.chmod(0o755)  # for a rank that gives its rights up
    verdict = judge(job, folder, run_world(job, folder, limit_s))
    if job.phase not in START and not verdict.hung:
        last = last_checkpoint(job, folder)
        judge_checkpoint(verdict, folder, None if last is None else run_world(job, folder, limit_s, resume=True))
    return verdict


def _as_json(verdict: Verdict) -> dict[str, Any]:
    seconds = None if verdict.seconds is None else round(verdict.seconds, 2)
    return {"name": verdict.job.name, **asdict(verdict), "seconds": seconds}


if __name__ == "__main__":
    sys.exit(main())
