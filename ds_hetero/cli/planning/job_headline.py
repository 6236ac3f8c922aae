"""Headline of the best job: its title, settings and speed, beside a plan of other settings or above the details."""

from __future__ import annotations

from ds_hetero.cli.printing import wrapped
from ds_hetero.common.text import time_text
from ds_hetero.planner.jobs.job import Job
from ds_hetero.planner.jobs.titles import job_title


def headline(job: Job, now_s: float | None = None) -> list[str]:
    """Return lines on the best job: title, settings and speed. They may stand beside a plan of other settings.

    Args:
        now_s: time of a step of that plan, for a comparison; None if there is no such plan, or it does not fit.
    """
    faster = "" if now_s is None else f"; {now_s / job.step_s:.2f} x as fast"
    return [
        *wrapped("best job:", job_title(job)),
        *wrapped("settings:", ", ".join(job.settings)),
        *wrapped("speed:", f"{speed_text(job)}{faster}"),
    ]


def speed_text(job: Job) -> str:
    """Say how fast a job is, and between which times a step is in 8 of 10 cases."""
    error = max(device.error for device in job.cluster.devices)
    shortest, longest = time_text(job.step_s / (1 + error)), time_text(job.step_s * (1 + error))
    return (
        f"{job.planned.tokens_per_s:,.0f} tokens/s; {time_text(job.step_s)} a step, {shortest} to {longest} in 8 of 10 "
        "cases"
    )
