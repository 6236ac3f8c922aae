"""The documents of one row on the page: which lane each lies in, and what every unit does."""

from __future__ import annotations

from collections.abc import Sequence

from ds_hetero.common.text import time_text
from ds_hetero.cost import CalibratedCostModel, CostModel
from ds_hetero.planner.documents.summary import DocumentsReport, report_documents
from ds_hetero.reporting.html import Page, html_table
from ds_hetero.values.schedule import Schedule

MAX_LANES = 64
_HEADINGS = ("zone", "ranks", "documents", "tokens")


def add_documents(page: Page, cost: CostModel, schedule: Schedule, lengths: Sequence[int], of: str) -> None:
    """Add the section; nothing under a cost model that does not place documents.

    Args:
        page: that is being made.
        cost: of the replica.
        schedule: of the replica.
        lengths: tokens of the documents of one row.
        of: what the section's title ends with.
    """
    if not isinstance(cost, CalibratedCostModel):
        return
    report = report_documents(cost, schedule, lengths)
    loads, groups = report.loads, schedule.ring_groups
    units = [_ranks(group.ranks) for group in groups]
    zones = {zone: [0] * len(groups) for zone in ("local", "node", "cluster")}
    for lane in report.placement.lanes:
        for tokens in lane.tokens:
            for unit, count in zip(lane.members, tokens, strict=True):
                zones[lane.zone(report.costs.node)][unit] += count
    chart = page.chart(
        "bars",
        "Tokens of every unit: in documents that are whole on it, cut inside its machine, cut between machines",
        {
            "rows": units,
            "unit": "",
            "series": [
                {"name": zone, "values": values, "stack": "tokens"} for zone, values in zones.items() if any(values)
            ],
        },
        90 + 34 * len(units),
    )
    others = ", ".join(f"{name} {time_text(s) if s else 'not possible'}" for name, s in report.others_s.items())
    page.section(
        f"Documents and their lanes{of}",
        f"One row of {len(report.documents)} documents, {report.placement.length:,} tokens: a block is predicted to "
        f"take {time_text(loads.predicted_s)}, at perfect balance {time_text(report.ideal_s)}. "
        f"Other placements: {others}.",
        chart,
        html_table(_HEADINGS, _lanes(report, units), "Lanes, in the order of the forward"),
    )


def _lanes(report: DocumentsReport, units: Sequence[str]) -> list[tuple[str, str, str, str]]:
    """Row of the table for every lane."""
    index = {document: j for j, document in enumerate(report.documents)}
    return [
        (
            lane.zone(report.costs.node),
            ", ".join(units[unit] for unit in lane.members),
            ", ".join(str(index.get(span, "padding")) for span in lane.spans[:12])
            + (f" and {len(lane.spans) - 12} more" if len(lane.spans) > 12 else ""),
            f"{sum(stop - start for start, stop in lane.spans):,}",
        )
        for lane in report.placement.lanes[:MAX_LANES]
    ]


def _ranks(ranks: Sequence[int]) -> str:
    return f"ranks {ranks[0]}-{ranks[-1]}" if len(ranks) > 1 else f"rank {ranks[0]}"
