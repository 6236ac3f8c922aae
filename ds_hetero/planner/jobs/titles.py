"""Title of a job: its kind, how many of the GPUs take part, and which do not."""

from __future__ import annotations

from collections import Counter

from ds_hetero.common.text import rank_ranges
from ds_hetero.planner.jobs.batch import PlannedBatch
from ds_hetero.planner.jobs.job import Job
from ds_hetero.planner.jobs.kinds import ONE, PIPELINES, SEQUENCE
from ds_hetero.planner.results.pipelines import PlannedPipelines


def job_title(job: Job) -> str:
    """Name a job: its kind, how many of the GPUs take part, and which do not."""
    return f"{_kind_text(job)}{_left_out_text(job)}"


def _kind_text(job: Job) -> str:
    """Name the kind of a job, and how many of the GPUs take part."""
    num_all, num_ranks = job.whole_cluster.num_ranks, job.cluster.num_ranks
    gpus = f"{num_ranks} GPUs" if num_ranks == num_all else f"{num_ranks} of {num_all} GPUs"
    if job.kind == ONE:
        rank = next(rank for rank in range(num_all) if rank not in job.left_out)
        return f"one GPU alone, rank {rank} ({job.cluster.devices[0].name})"
    if job.kind == SEQUENCE:
        return f"sequence parallelism over {gpus}"
    if job.kind == PIPELINES:
        assert isinstance(job.planned, PlannedPipelines) and job.planned.finished is not None
        from ds_hetero.planner.pipelines.explain import shape_text

        return f"{shape_text(job.planned.finished.candidate)} over {gpus}"
    assert isinstance(job.planned, PlannedBatch)
    num_replicas = len(job.planned.ranks_of_replica)
    if num_replicas == num_ranks:
        return f"a batch for each of {gpus}"
    return f"a batch for each of {num_replicas} nodes, {gpus}"


def _left_out_text(job: Job) -> str:
    """Say which GPUs do not take part; empty if all do, or if only one does."""
    if not job.left_out or job.kind == ONE:
        return ""
    names = Counter(job.whole_cluster.devices[rank].name for rank in job.left_out)
    listed = ", ".join(f"{count} {name}" for name, count in names.items())
    return f", without {'rank' if len(job.left_out) == 1 else 'ranks'} {rank_ranges(job.left_out)} ({listed})"
