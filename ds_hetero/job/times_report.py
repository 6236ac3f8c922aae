"""Report the times of a job: events for the monitors of the training, and a table for people."""

from __future__ import annotations

from collections.abc import Sequence

from ds_hetero.common.tables import framed_table
from ds_hetero.common.text import time_text
from ds_hetero.job.job_times import JobTimes, planned_step_s
from ds_hetero.values.plans import Plan

_HEADINGS = {"all_to_all": "all-to-all", "ring_wait": "ring wait"}  # of columns; other parts have their own name


def events(
    job_times: JobTimes, plan: Plan, utilization: Sequence[float | None], changes: int, samples: int
) -> list[tuple[str, float, int]]:
    """Return events for DeepSpeed's monitor, per rank, per pipeline and of the job: (name, value, samples).

    Args:
        samples: samples trained so far, the unit of the x axis of DeepSpeed's events.
    """
    values: list[tuple[str, float]] = []
    for number, (rank, mfu) in enumerate(zip(job_times.ranks, utilization, strict=True)):
        values += [
            (f"rank{number}/{name}_share", share) for name, share in rank.shares(job_times.parts_of_step).items()
        ]
        values.append((f"rank{number}/tokens_per_s", rank.tokens_per_s))
        if mfu is not None:
            values.append((f"rank{number}/mfu", mfu))
    for number, pipeline in enumerate(job_times.pipelines):
        values.append((f"pipeline{number}/passes_s", pipeline.passes_s))
        values.append((f"pipeline{number}/predicted_s", pipeline.predicted_s))
    values.append(("step_s", job_times.step_s))
    values.append(("tokens_per_s", job_times.tokens_per_s(plan)))
    values.append(("imbalance", job_times.imbalance))
    values.append(("schedule_changes", float(changes)))
    return [(f"Heterogeneity/{name}", value, samples) for name, value in values]


def times_table(job_times: JobTimes, plan: Plan, utilization: Sequence[float | None], changes: int) -> str:
    """Return the table of the ranks' times, and below it, for a job of pipelines, predicted and measured times.

    Args:
        job_times: the ranks' times over all steps, the pipelines' times of the latest observation.
    """
    steps, names = job_times.ranks[0].steps, job_times.parts_of_step
    title = (
        f"Where the time of {steps:.0f} steps went, {time_text(job_times.step_s)} each: "
        f"imbalance {job_times.imbalance:.2f}, {changes} changes of {'layers' if job_times.pipelines else 'schedule'}"
    )
    rows: list[tuple[str, ...]] = []
    places = ("stage", "layers") if job_times.pipelines else ()
    rates = () if job_times.pipelines else ("tokens/s", "MFU")
    columns = ("rank", *places, *(_HEADINGS.get(name, name) for name in names), "rest", *rates)
    for number, (rank, mfu) in enumerate(zip(job_times.ranks, utilization, strict=True)):
        cells = [f"{share:.1%}" for share in rank.shares(names).values()]
        if job_times.pipelines:
            cells = [*_place_of(plan, number), *cells]
        else:
            cells += [f"{rank.tokens_per_s:,.0f}", "" if mfu is None else f"{mfu:.1%}"]
        rows.append((str(number), *cells))
    table = framed_table(columns, rows, title, numbers=True, width=80)
    legend = ["stage 1.2 is stage 2 of pipeline 1"] if len(job_times.pipelines) > 1 else []
    return "\n".join([table, *legend, *_prediction_lines(job_times, plan)])


def _prediction_lines(job_times: JobTimes, plan: Plan) -> list[str]:
    """Return lines with predicted and measured times of pipelines; replicas have `ds_hetero.job.prediction_check`."""
    lines = []
    for number, pipeline in enumerate(job_times.pipelines):
        error = pipeline.predicted_s / pipeline.passes_s - 1
        lines.append(
            f"passes of pipeline {number}: predicted {time_text(pipeline.predicted_s)} from the measured speeds of its "
            f"stages, measured {time_text(pipeline.passes_s)} (prediction {error:+.1%})"
        )
    if job_times.pipelines and (planned_s := planned_step_s(plan)) is not None:
        lines.append(
            f"step: the plan says {time_text(planned_s)}, measured {time_text(job_times.step_s)} "
            f"(prediction {planned_s / job_times.step_s - 1:+.1%})"
        )
    return lines


def _place_of(plan: Plan, rank: int) -> tuple[str, str]:
    """Return the cells of a rank; empty texts for an idle rank.

    They are its stage, ``2``, or ``1.2`` for stage 2 of pipeline 1 among several, and first and last layer, ``0-15``.
    """
    place, stage = plan.place_of(rank), plan.stage_of(rank)
    if place is None or stage is None or stage.layers is None:
        return "", ""
    pipeline_index, stage_index = place
    first, stop = stage.layers
    stage_text = str(stage_index) if len(plan.pipelines) == 1 else f"{pipeline_index}.{stage_index}"
    return stage_text, str(first) if stop - first == 1 else f"{first}-{stop - 1}"
