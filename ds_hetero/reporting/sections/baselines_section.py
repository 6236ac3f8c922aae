"""Uniform schedules on the same cards, and why they lose, on the page."""

from __future__ import annotations

from ds_hetero.common.text import time_text
from ds_hetero.cost import CostModel, Prediction
from ds_hetero.planner.explain import compared
from ds_hetero.planner.planned import Baselines
from ds_hetero.reporting.html import Markup, Page, html_table
from ds_hetero.values.schedule import Schedule


def baselines(page: Page, cost: CostModel, schedule: Schedule, prediction: Prediction) -> list[Markup]:
    """Return a chart and a table."""
    others = Baselines.under(cost)
    rows = [("this plan", time_text(prediction.block_s), f"{prediction.tokens_per_s:,.0f}", "1.00 x", "")]
    rates = [("this plan", prediction.tokens_per_s)]
    for candidate in others.candidates:
        if candidate.schedule == schedule:
            continue
        other = candidate.prediction
        reason = compared(candidate.name, other, prediction).reason
        faster = f"{prediction.tokens_per_s / other.tokens_per_s:.2f} x"
        rows.append((candidate.name, time_text(other.block_s), f"{other.tokens_per_s:,.0f}", faster, reason))
        if other.feasible:
            rates.append((candidate.name, other.tokens_per_s))
    rows += [(name, "-", "-", "-", reason) for name, reason in others.missing.items()]
    chart = page.chart(
        "bars",
        "Tokens per second of this plan and of those that fit",
        {
            "rows": [name for name, _ in rates],
            "unit": "",
            "series": [{"name": "tokens/s", "values": [rate for _, rate in rates], "colour": "model"}],
        },
        90 + 34 * len(rates),
    )
    headings = ("schedule", "a block", "tokens/s", "this plan is faster by", "why it loses")
    return [chart, html_table(headings, rows, "Uniform schedules on the same cards")]
