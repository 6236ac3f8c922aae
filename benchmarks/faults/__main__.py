"""Plant faults in training jobs: do all ranks end, soon, and name the rank at fault, and does the last checkpoint load?

    python -m benchmarks.faults                          # every job, some 30 minutes
    python -m benchmarks.faults --quick                  # one per phase and fault
    python -m benchmarks.faults --only "kill.*backward"  # those whose name matches
    python -m benchmarks.faults --only torchrun          # those that torchrun restarts
    python -m benchmarks.faults --only " and |of one rank"  # collectives that never match
    python -m benchmarks.faults --strict --jobs 100      # 100 of them, evenly spaced, on ranks that wait as on NCCL

Tiny Llamas train on uneven schedules, ZeRO 0 to 3, on 2 and 4 ranks, in a custom loop and under the HF Trainer. One
fault strikes one rank of each job: in start, data, forward, backward, step, save or look; or the rank's configuration
differs, or it decides something alone; or half of the ranks call one collective and half another. Nothing outside ends
the survivors: there is no launcher, and no time limit of the process group except for ranks that stop for good. Then
new ranks continue from the last checkpoint, and their losses are compared with those before the fault. Some jobs run
under torchrun's agent, which restarts them, up to twice: their losses are compared with the same job without a fault.

With --strict calls return at once, hosts connect and wait like those of NCCL, and the backend does not report a peer
that is gone (`tests.strict_group`, `tests.strict_device`): ranks find it by the calls that were posted.

The exit code is 1 if a job hung, a message named a wrong rank or none, a rank's output ended with the raw text of a
backend, a checkpoint did not load, or a restarted job did not resume.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks.faults.jobs import Job, all_jobs, quick_jobs
from benchmarks.faults.run import LIMIT_S, run_job
from benchmarks.faults.table import show
from benchmarks.faults.verdict import Verdict
from benchmarks.measure.results import FOLDER, header, progress, write

RESULT = FOLDER / "faults.json"
_FOLDERS = re.compile(r"(?<![\w.:/])/(?:[^\s/:'\"]+/)+")  # of an absolute path


def main() -> int:
    """Run the jobs and print the table; return 1 if a job ended badly."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one job per phase and per fault")
    parser.add_argument("--only", metavar="PATTERN", help="jobs whose name this regular expression is found in")
    parser.add_argument("--jobs", type=int, metavar="N", help="so many of these, evenly spaced")
    parser.add_argument("--strict", action="store_true", help="ranks wait where those on NCCL would")
    parser.add_argument("--list", action="store_true", help="print the jobs' names and run none")
    parser.add_argument("--limit-s", type=float, default=LIMIT_S, help="seconds after which a job counts as a hang")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the result here too")
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help="keep the ranks' output here")
    options = parser.parse_args()
    jobs = [job for job in (quick_jobs() if options.quick else all_jobs()) if re.search(options.only or "", job.name)]
    if options.jobs is not None:
        jobs = [jobs[i * len(jobs) // options.jobs] for i in range(min(options.jobs, len(jobs)))]
    if options.list:
        print("\n".join(job.name for job in jobs))
        return 0
    result = header(" ".join(["python -m benchmarks.faults", *sys.argv[1:]]))
    is_whole = len(jobs) == len(all_jobs()) and not options.strict
    paths = [RESULT] * is_whole + [options.json] * (options.json is not None)
    verdicts: list[Verdict] = []
    begin = time.monotonic()
    for verdict in _run_all(jobs, options.limit_s, options.keep, options.strict):
        verdicts.append(verdict)
        result["seconds"] = round(time.monotonic() - begin, 1)
        for path in paths:  # after every job: a run that is cut short leaves what it came to
            write({**result, "jobs": [_as_json(verdict) for verdict in verdicts]}, path)
    show(verdicts, result.get("seconds", 0.0), Console(width=max(Console().width, 160)))
    return 0 if all(verdict.is_good for verdict in verdicts) else 1


def _run_all(jobs: Sequence[Job], limit_s: float, keep: Path | None, strict: bool) -> Iterator[Verdict]:
    os.environ |= {"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}  # before the server imports DeepSpeed
    with progress(Console(stderr=True)) as report:
        for number, job in enumerate(jobs):
            report(number / len(jobs), job.name[:48])
            with tempfile.TemporaryDirectory(prefix="ds_hetero_faults_") as scratch:
                folder = Path(scratch) if keep is None else keep / f"{all_jobs().index(job):03}"
                folder.mkdir(parents=True, exist_ok=keep is None)
                yield run_job(job, folder, limit_s, strict)


def _as_json(verdict: Verdict) -> dict[str, Any]:
    """Return plain data, without folders of this machine."""
    seconds = None if verdict.seconds is None else round(verdict.seconds, 2)
    last_words = [] if verdict.is_good else [_FOLDERS.sub("", word) for word in verdict.last_words]
    problems = [_FOLDERS.sub("", problem) for problem in verdict.problems]
    return {
        "name": verdict.job.name,
        **asdict(verdict),
        "seconds": seconds,
        "problems": problems,
        "last_words": last_words,
    }


if __name__ == "__main__":
    sys.exit(main())
