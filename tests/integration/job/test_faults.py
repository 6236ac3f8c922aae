"""One rank of a job dies, hangs, fails or goes its own way: the others end, name it, and the checkpoint is whole.

`benchmarks.faults` tries all pairs and measures how soon ranks end; here is one per phase and per fault.

Budget: 55 s without the slow ones.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest

from benchmarks.faults.jobs import FOREIGN, Job, all_jobs, quick_jobs
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


# Of all jobs, what NCCL would not tell of: who is gone, and calls that return although they never meet.
_STRICT = (
    "kill -9 in forward",
    "exception in step",
    "barrier and broadcast in between steps",
    "kill -9 in save, rank 0 of 2, ZeRO-0, Trainer, store on rank 0",
)


@pytest.mark.parametrize("begins", [_STRICT[0], *(pytest.param(name, marks=pytest.mark.slow) for name in _STRICT[1:])])
def test_the_others_end_where_calls_return_and_nothing_tells_of_a_peer_that_is_gone(begins: str) -> None:
    job = next(job for job in all_jobs() if job.name.startswith(begins) and not job.is_restarted)
    with tempfile.TemporaryDirectory(prefix="faults_") as folder:
        verdict = run_job(job, Path(folder), strict=True)
    assert verdict.is_good, "\n".join([*verdict.problems, *map(str, enumerate(verdict.last_words))])
