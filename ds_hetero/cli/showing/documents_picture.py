"""Picture of one batch of documents on a schedule: computing time of every unit, and below it the unit's documents."""

from __future__ import annotations

from matplotlib.figure import Figure
from matplotlib.patches import Patch

from ds_hetero.cli.printing import rank_ranges
from ds_hetero.cli.scenario import Scenario
from ds_hetero.common.text import time_text
from ds_hetero.planner.documents.summary import DocumentsReport

ZONE_COLOURS = {"cluster": "#e45756", "node": "#f2a33a", "local": "#4c78a8"}
MAX_LABELLED_UNITS = 32  # with more, the labels of the units would overlap


def draw_documents(scenario: Scenario, report: DocumentsReport) -> Figure:
    """Draw every unit's time of a block beside the ideal time, and below it the unit's documents, coloured by zone."""
    loads, num_units = report.loads, len(report.costs.token_s)
    figure = Figure(figsize=(min(max(8.0, 4.0 + 0.45 * num_units), 24.0), 7.5), layout="constrained")
    top, bottom = figure.subplots(2, 1, sharex=True)
    linear_ms = [1e3 * seconds for seconds in loads.linear_s]
    top.bar(range(num_units), linear_ms, color="#8da0cb", label="outside attention")
    top.bar(
        range(num_units),
        [1e3 * seconds for seconds in loads.attention_s],
        bottom=linear_ms,
        color="#66c2a5",
        label="attention",
    )
    received_ms = [1e3 * seconds for seconds in loads.received_s]
    top.bar(range(num_units), received_ms, 0.25, bottom=linear_ms, color="#fc8d62", label="receives meanwhile")
    top.axhline(1e3 * report.ideal_s, color="black", linestyle=":", label="ideal")
    top.set_ylabel("one block, ms")
    top.legend(ncols=4, fontsize=8, loc="lower left", bbox_to_anchor=(0, 1), frameon=False)
    height_of_unit = [0] * num_units
    for lane in report.placement.lanes:
        colour = ZONE_COLOURS[lane.zone(report.costs.node)]
        for tokens in lane.tokens:
            for unit, count in zip(lane.members, tokens, strict=True):
                bottom.bar(unit, count, bottom=height_of_unit[unit], color=colour, edgecolor="white", linewidth=0.4)
                height_of_unit[unit] += count
    bottom.set_ylabel("tokens, by document")
    labels = [Patch(color=colour, label=zone) for zone, colour in ZONE_COLOURS.items()]
    bottom.legend(handles=labels, ncols=3, fontsize=8, loc="lower left", bbox_to_anchor=(0, 1), frameon=False)
    if num_units <= MAX_LABELLED_UNITS:
        bottom.set_xticks(
            range(num_units), [rank_ranges(group.ranks) for group in report.placement.schedule.ring_groups]
        )
    bottom.set_xlabel("ranks of the unit")
    for axes in (top, bottom):
        axes.spines[["top", "right"]].set_visible(False)
    figure.suptitle(
        f"{scenario.model.name}: {len(report.documents)} documents, {report.placement.length:,} tokens; "
        f"{time_text(report.loads.predicted_s)} per block, ideal {time_text(report.ideal_s)}",
        fontsize=10,
        x=0.01,
        ha="left",
    )
    return figure
