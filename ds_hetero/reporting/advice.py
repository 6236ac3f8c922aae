"""Advice of the page: devices that were left out, idle ranks and what they hold, and jobs that are faster."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ds_hetero.common.text import bytes_text, rank_ranges, time_text
from ds_hetero.errors import HeteroError
from ds_hetero.planner.fewer_ranks import MIN_ADVICE_GAIN
from ds_hetero.planner.jobs.job import FoundJobs, Job, JobTask
from ds_hetero.planner.jobs.kinds import KINDS, Freedom
from ds_hetero.planner.jobs.search import search_jobs
from ds_hetero.planner.jobs.titles import job_title
from ds_hetero.reporting.described_plan import DescribedPlan
from ds_hetero.reporting.html import Page, html_table
from ds_hetero.reporting.scenario import PlanScenario


def find_faster_jobs(described: DescribedPlan) -> FoundJobs | None:
    """Search for the best job of every kind on the devices of a plan, for as many sequences of a step as the plan has.

    Settings that change what is trained stay as they are; ZeRO, recomputation, tiles, offloads and micro-batches are
    searched. None if the plan has several clusters or another cost model than the calibrated one, or if nothing fits.
    """
    scenario = described.scenario
    if scenario.cost_model != "calibrated" or len(scenario.clusters) != 1:
        return None
    batch = _sequences(described)
    work = replace(scenario.workload, micro_batch=1, micro_batches=batch, data_parallel=1, zero_cluster=None)
    (cluster,) = scenario.clusters
    try:
        return search_jobs(
            JobTask(cluster=cluster, model=scenario.model, workload=work, batch=batch, freedom=Freedom())
        )
    except HeteroError:
        return None


def _sequences(described: DescribedPlan) -> int:
    """Return the sequences of an optimizer step of all replicas or pipelines."""
    work = described.scenario.workload
    total = 0
    for pipeline in described.plan.pipelines:
        size = work.micro_batch if pipeline.micro_batch_size is None else pipeline.micro_batch_size
        count = work.micro_batches if pipeline.micro_batches is None else pipeline.micro_batches
        total += size * count
    return total


def advice_lines(found: FoundJobs | None, now_s: float, scenario: PlanScenario) -> list[str]:
    """Return sentences on devices that were left out, and on a job that is faster than the plan.

    Args:
        found: the best jobs on the plan's devices; None if they were not searched.
        now_s: predicted seconds of a step of the plan.
        scenario: scenario of the plan.
    """
    lines = []
    if scenario.left_out:
        listed = ", ".join(f"{rank_ranges(ranks)} ({len(ranks)} {name})" for name, ranks in scenario.left_out)
        lines.append(f"Left out: ranks {listed} of the whole rig. The search found no faster job with them.")
    if found is None:
        return lines
    best = found.best
    if best.step_s >= (1 - MIN_ADVICE_GAIN) * now_s:
        lines.append("Advice: keep this plan. No other kind of job, setting or set of GPUs is 5 % faster.")
        return lines
    lines.append(
        f"Advice: {job_title(best)}, with {', '.join(best.settings)}: {time_text(best.step_s)} a step, "
        f"{1 - best.step_s / now_s:.0%} less. ds-hetero plan with the same GPUs, model and length writes its plan."
    )
    return lines


def idle_line(idle_ranks: Sequence[int], memory_bytes: Sequence[int], device_names: Sequence[str]) -> str:
    """Say which ranks compute nothing, and what they hold; the sequences are by rank."""
    names = [device_names[rank] for rank in idle_ranks]
    devices = ", ".join(f"{names.count(name)} {name}" for name in dict.fromkeys(names))
    most_bytes = max(memory_bytes[rank] for rank in idle_ranks)
    held = f"each holds up to {bytes_text(most_bytes)} GiB of model states" if most_bytes else "they hold nothing"
    return f"Idle: ranks {rank_ranges(idle_ranks)} ({devices}) compute nothing in this plan; {held}."


def add_jobs(page: Page, found: FoundJobs | None, now_s: float) -> None:
    """Add the section with the best job of every kind, beside the plan; add none if the jobs were not searched."""
    if found is None:
        return
    rows = [("this plan", time_text(now_s), "1.00 x", "", "")]
    rows += (_job_row(job, now_s) for job in found.jobs)
    rows += ((KINDS[refused.kind], "-", "-", "", refused.reason) for refused in found.refused)
    headings = ("job", "a step", "this plan is faster by", "settings", "what limits it")
    page.section(
        "Other kinds of jobs",
        "The best job of every kind on these GPUs, with every setting that does not change what is trained.",
        html_table(headings, rows, "Best job of every kind"),
    )


def _job_row(job: Job, now_s: float) -> tuple[str, str, str, str, str]:
    """Return the row of a job: title, time, ratio to the plan, settings, and what limits it."""
    return (
        job_title(job),
        time_text(job.step_s),
        f"{job.step_s / now_s:.2f} x",
        ", ".join(job.settings),
        job.limit,
    )
