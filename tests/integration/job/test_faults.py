"""One rank of a job dies, hangs, fails or goes its own way: the others end, name it, and the checkpoint is whole.

`benchmarks.faults` tries all pairs and measures how soon ranks end; here is one per phase and per fault.

Budget: 40 s without the slow ones.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest

from benchmarks.faults.jobs import FOREIGN, Job, quick_jobs
from benchmarks.faults.run import run_job

pytestmark = pytest.mark.alone  # it waits in real time for what other work on the cores would delay

# What a quick run tries: a phase each, and what only one rank decides or has otherwise.
_QUICK = ("data set", "forward", "backward", "save", "plan")
_QUICK_FAULTS = ("continue", "another schedule")
_ELSEWHERE = FOREIGN[:3]  # in test_failures.py


def _is_quick(job: Job) -> bool:
    if job.pipelines:
        return job.phase == "forward"
    return job.fault in _QUICK_FAULTS or (job.phase in _QUICK and job.fault != "read-only")


@pytest.mark.sweep(keep=8)
@pytest.mark.parametrize(
    "job",
    [
        pytest.param(job, id=job.name, marks=() if _is_quick(job) else pytest.mark.slow)
        for job in quick_jobs()
        if job.fault not in _ELSEWHERE
    ],
)
def test_all_ranks_end_and_name_the_rank_and_the_last_checkpoint_loads(job: Job) -> None:
    with tempfile.TemporaryDirectory(prefix="faults_") as folder:
        verdict = run_job(job, Path(folder))
    assert verdict.is_good, "\n".join([*verdict.problems, *map(str, enumerate(verdict.last_words))])
