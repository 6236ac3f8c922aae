"""Section of the page with the measurements of a run."""

from __future__ import annotations

from datetime import datetime, timezone

from ds_hetero.common.reading import JsonObject
from ds_hetero.common.text import time_text
from ds_hetero.reporting.html import Markup, Page, definitions, html_table
from ds_hetero.reporting.run_file import RunFile
from ds_hetero.reporting.sections.rank_rows import MAX_ROWS


def add_run(page: Page, run: RunFile) -> None:
    """Add the section."""
    cards = {"Steps measured": f"{run.steps:,}", "Job ended": run.ended, "Written": _moment_text(run.written)}
    rows = [
        (
            number,
            rank.device,
            *(time_text(getattr(rank, f"{name}_s")) for name in ("step", "own_min", "own_median", "own_max")),
            f"{min(_typical(run) / rank.own_median_s, 1.0):.2f}" if rank.own_median_s else "-",
        )
        for number, rank in enumerate(run.ranks[:MAX_ROWS])
    ]
    steps = [one["step"] for one in run.observations]
    parts: list[Markup] = [
        definitions(cards),
        html_table(
            ("rank", "device", "a step", "computes, least", "median", "most", "score"),
            rows,
            "Computing time of the latest steps; a score below 0.90 is a straggler's",
        ),
    ]
    if len(steps) > 1:
        values = {"tokens/s": [one["tokens_per_s"] for one in run.observations]}
        series = [{"name": name, "values": of_name} for name, of_name in values.items()]
        parts.append(
            page.chart("lines", "Tokens per second while the job ran", {"x": steps, "xName": "step", "series": series})
        )
    if run.changes:
        changes = [(one["step"], _change_text(one), f"{one['gain']:.1%}") for one in run.changes]
        parts.append(html_table(("step", "what changed", "predicted gain"), changes, "Changes by re-planning"))
    versions = ", ".join(f"{name} {text}" for name, text in run.versions.items())
    page.section("The run", *parts, f"Versions: {versions}.")


def measured_text(predicted_s: float, run: RunFile) -> str:
    """A measured step, and how far the prediction is from it."""
    return f"{time_text(run.step_s)} (prediction {predicted_s / run.step_s - 1:+.1%})"


def _change_text(change: JsonObject) -> str:
    if "layers" in change:
        return "layers " + " | ".join("+".join(map(str, own)) for own in change["layers"])
    return f"replica {change['replica']}"


def _moment_text(written: str) -> str:
    """A moment to the minute, as people write it; what is no moment stays as it is."""
    try:
        return f"{datetime.fromisoformat(written).astimezone(timezone.utc):%Y-%m-%d %H:%M} UTC"
    except ValueError:
        return written


def _typical(run: RunFile) -> float:
    working = sorted(rank.own_median_s for rank in run.ranks if rank.own_median_s > 0)
    return working[(len(working) - 1) // 2]
