"""Times of the job for people: events for the monitors of the training, and a table."""

from __future__ import annotations

from collections.abc import Sequence

from ds_hetero.common.tables import framed_table
from ds_hetero.common.text import time_text
from ds_hetero.job.job_times import JobTimes, planned_step_s
from ds_hetero.values.plans import Plan

_HEADINGS = {"all_to_all": "all-to-all", "ring_wait": "ring wait"}  # of a table, where they are not the share's name


def events(
    seen: JobTimes, plan: Plan, utilization: Sequence[float | None], changes: int, samples: int
) -> list[tuple[str, float, int]]:
    """Return events for DeepSpeed's monitor, per rank, per pipeline and of the job: (name, value, samples).

    Args:
        samples: samples trained so far, the unit of the x axis of DeepSpeed's events.
    """
    values: list[tuple[str, float]] = []
    for number, (rank, mfu) in enumerate(zip(seen.ranks, utilization, strict=True)):
        values += [(f"rank{number}/{name}_share", share) for name, share in rank.shares(seen.parts_of_step).items()]
        values.append((f"rank{number}/tokens_per_s", rank.tokens_per_s))
        if mfu is not None:
            values.append((f"rank{number}/mfu", mfu))
    for number, pipeline in enumerate(seen.pipelines):
        values.append((f"pipeline{number}/passes_s", pipeline.passes_s))
        values.append((f"pipeline{number}/predicted_s", pipeline.predicted_s))
    values.append(("step_s", seen.step_s))
    values.append(("tokens_per_s", seen.tokens_per_s(plan)))
    values.append(("imbalance", seen.imbalance))
    values.append(("schedule_changes", float(changes)))
    return [(f"Heterogeneity/{name}", value, samples) for name, value in values]


def times_table(seen: JobTimes, plan: Plan, utilization: Sequence[float | None], changes: int) -> str:
    """Return the table of the ranks' times; below it, of pipelines, predicted and measured times.

    Args:
        seen: the ranks' times over all steps, the pipelines' times of the latest observation.
    """
    steps, names = seen.ranks[0].steps, seen.parts_of_step
    title = (
        f"Where the time of {steps:.0f} steps went, {time_text(seen.step_s)} each: imbalance {seen.imbalance:.2f}, "
        f"{changes} changes of {'layers' if seen.pipelines else 'schedule'}"
    )
    rows: list[tuple[str, ...]] = []
    places = ("pipeline", "stage", "layers") if seen.pipelines else ()
    rates = () if seen.pipelines else ("tokens/s", "MFU")
    columns = ("rank", *places, *(_HEADINGS.get(name, name) for name in names), "rest", *rates)
    for number, (rank, mfu) in enumerate(zip(seen.ranks, utilization, strict=True)):
        cells = [f"{share:.1%}" for share in rank.shares(names).values()]
        if seen.pipelines:
            cells = [*_place_of(plan, number), *cells]
        else:
            cells += [f"{rank.tokens_per_s:,.0f}", "" if mfu is None else f"{mfu:.1%}"]
        rows.append((str(number), *cells))
    return "\n".join([framed_table(columns, rows, title, numbers=True, width=100), *_prediction_lines(seen, plan)])


def _prediction_lines(seen: JobTimes, plan: Plan) -> list[str]:
    """Predicted and measured times of pipelines; `ds_hetero.job.prediction_check` reports those of replicas."""
    lines = []
    for number, pipeline in enumerate(seen.pipelines):
        error = pipeline.predicted_s / pipeline.passes_s - 1
        lines.append(
            f"passes of pipeline {number}: predicted {time_text(pipeline.predicted_s)} from the measured speeds of its "
            f"stages, measured {time_text(pipeline.passes_s)} (prediction {error:+.1%})"
        )
    if seen.pipelines and (planned_s := planned_step_s(plan)) is not None:
        lines.append(
            f"step: the plan says {time_text(planned_s)}, measured {time_text(seen.step_s)} "
            f"(prediction {planned_s / seen.step_s - 1:+.1%})"
        )
    return lines


def _place_of(plan: Plan, rank: int) -> tuple[str, str, str]:
    """Cells of a rank: pipeline, stage, and first and last layer, such as ``0-15``; empty for an idle rank."""
    place, stage = plan.place_of(rank), plan.stage_of(rank)
    if place is None or stage is None or stage.layers is None:
        return "", "", ""
    pipeline_index, stage_index = place
    first, stop = stage.layers
    return str(pipeline_index), str(stage_index), f"{first}-{stop - 1}"
