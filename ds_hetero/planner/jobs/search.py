"""The best job: the fastest of every kind of parallelism, with all settings that the user left open.

Each kind is searched without the results of the other kinds, so that its job is the same if it is the only kind that is
asked for.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

from ds_hetero.errors import PlanError
from ds_hetero.planner.jobs.batch import best_batch
from ds_hetero.planner.jobs.job import FoundJobs, Job, JobTask, Refused
from ds_hetero.planner.jobs.kinds import BATCH, ONE, PIPELINES, SEQUENCE, SIMPLEST_FIRST
from ds_hetero.planner.jobs.rank_sets import job_rank_sets, single_ranks
from ds_hetero.planner.jobs.sequence import MIN_GAIN, best_replica, expect_fit


def search_jobs(task: JobTask) -> FoundJobs:
    """Return the best job of every kind that the task allows, best first, see `best_first`.

    Raises:
        MemoryPlanError: no job fits into memory; the message says what is missing, and what would help.
        PlanError: no kind that is allowed can run.
    """
    started = time.perf_counter()
    results = [_best_of_kind(task, kind) for kind in task.freedom.kinds]
    jobs = best_first([found for found in results if isinstance(found, Job)])
    refused = tuple(found for found in results if isinstance(found, Refused))
    if not jobs:
        if SEQUENCE in task.freedom.kinds:
            expect_fit(task)
        reasons = "; ".join(f"{one.kind}: {one.reason}" for one in refused)
        raise PlanError(f"no such job can run: {reasons}. Leave --parallel out to plan every kind.")
    return FoundJobs(jobs=tuple(jobs), refused=refused, search_s=time.perf_counter() - started)


def best_first(jobs: Sequence[Job]) -> list[Job]:
    """Return jobs sorted by time; of those as fast as the fastest, up to `MIN_GAIN`, the simplest kind comes first."""
    limit_s = min((job.step_s for job in jobs), default=0.0) * (1 + MIN_GAIN)
    as_fast = sorted((job for job in jobs if job.step_s <= limit_s), key=lambda job: SIMPLEST_FIRST.index(job.kind))
    slower = sorted((job for job in jobs if job.step_s > limit_s), key=lambda job: job.step_s)
    return [*as_fast, *slower]


def _best_of_kind(task: JobTask, kind: str) -> Job | Refused:
    """Return the best job of one kind, or why there is none."""
    if kind == SEQUENCE:
        return best_replica(task, SEQUENCE, job_rank_sets(task.cluster))
    if kind == ONE:
        return best_replica(task, ONE, single_ranks(task.cluster))
    if kind == BATCH:
        return best_batch(task, job_rank_sets(task.cluster))
    assert kind == PIPELINES
    # Imported where they are searched: half of what a small plan takes is starting.
    from ds_hetero.planner.jobs.pipelines import best_pipelines

    return best_pipelines(task)
