"""Run one job from its start to the verdict on its last checkpoint."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from benchmarks.faults.jobs import START, Job
from benchmarks.faults.training import last_checkpoint
from benchmarks.faults.verdict import Verdict, judge, judge_checkpoint, judge_restarts
from benchmarks.faults.world import run_world

LIMIT_S = 45.0


def run_job(job: Job, folder: Path, limit_s: float = LIMIT_S, strict: bool = False) -> Verdict:
    """Run one job, and continue from its last checkpoint, unless torchrun does so.

    Args:
        job: to run.
        folder: empty; for its output and checkpoints.
        limit_s: seconds after which it counts as a hang.
        strict: see `run_world`.
    """
    folder.chmod(0o755)  # for a rank that gives its rights up
    if job.is_restarted:
        undisturbed = folder / "undisturbed"
        undisturbed.mkdir()
        run_world(replace(job, store="launcher", strikes=0), undisturbed, limit_s, strict=strict)
        return judge_restarts(job, folder, run_world(job, folder, limit_s, strict=strict), undisturbed)
    verdict = judge(job, folder, run_world(job, folder, limit_s, strict=strict))
    if job.phase not in START and not verdict.hung:
        last = last_checkpoint(job, folder)
        resumed = None if last is None else run_world(job, folder, limit_s, resume=True, strict=strict)
        judge_checkpoint(verdict, folder, resumed)
    return verdict
