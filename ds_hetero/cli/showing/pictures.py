"""Schedules, documents and pipelines as pictures.

Of a schedule, ranks are columns: their tokens, the heads they compute and their memory against its capacity, coloured
by group. Below, the timeline of one block: what a rank of every kind computes and what it transfers meanwhile.

Of documents, what every unit computes, and which documents it holds.

Of pipelines, above, one row per makeup of pipeline: a box per stage, as wide as its forward and backward of a
micro-batch. Below, the pipeline that ends last: what every stage computes when.
"""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from itertools import groupby
from typing import Any

from matplotlib.axes import Axes
from matplotlib.collections import PatchCollection
from matplotlib.figure import Figure
from matplotlib.patches import Patch, Rectangle

from ds_hetero.cli.printing import rank_ranges, terms_text
from ds_hetero.cli.scenario import Scenario
from ds_hetero.common.text import time_text
from ds_hetero.common.units import GIB
from ds_hetero.cost.model import CostModel, Prediction, Span
from ds_hetero.cost.stages.pipeline_time import run_pipeline
from ds_hetero.cost.stages.stage import StageCosts
from ds_hetero.planner.documents.summary import DocumentsReport
from ds_hetero.planner.pipeline_search.finish import Finished
from ds_hetero.planner.pipelines.explain import reasons_of
from ds_hetero.planner.results.sentences import describe
from ds_hetero.reporting.timelines import block_spans
from ds_hetero.values.schedule import Schedule

MAX_TIMELINE_RANKS = 16  # drawn; where there are more kinds of work, the first ones
MAX_LABELLED_RANKS = 24  # with more, numbers on the bars would overlap
KINDS = {"non_attention": "#8da0cb", "attention": "#66c2a5", "all_to_all": "#e78ac3", "ring": "#fc8d62"}
COLOURS = ("#4c78a8", "#f2a33a", "#54a24b", "#b279a2", "#e45756", "#72b7b2", "#9d755d", "#eeca3b")
GREY = "#666666"


def draw_schedule(scenario: Scenario, cost: CostModel, schedule: Schedule, prediction: Prediction) -> Figure:
    """Return the picture of a schedule."""
    spans = block_spans(cost, schedule)
    ranks = _drawn_ranks(scenario, schedule) if spans else []
    heights = [1.6, 1.6, 1.6] + ([0.9 + 0.4 * len(ranks)] if ranks else [])
    width = min(max(9.0, 4.0 + 0.5 * schedule.sp_size), 24.0)
    figure = Figure(figsize=(width, 1.5 + sum(heights)), layout="constrained")
    axes = figure.subplots(len(heights), 1, height_ratios=heights, squeeze=False)[:, 0]
    colour_of = {
        rank: COLOURS[position % len(COLOURS)]
        for position, group in enumerate(schedule.ring_groups)
        for rank in group.ranks
    }
    _draw_tokens(axes[0], scenario, schedule, colour_of)
    _draw_heads(axes[1], schedule, colour_of)
    _draw_memory(axes[2], cost, schedule, prediction, colour_of)
    _label_devices(axes[2], scenario, schedule)
    if ranks:
        _draw_timeline(axes[3], scenario, [span for span in spans if span.rank in ranks], ranks)
    for rank_axes in axes[:3]:
        rank_axes.set_xlim(-0.6, schedule.sp_size - 0.4)
    for any_axes in axes:
        any_axes.spines[["top", "right"]].set_visible(False)
    text = [describe(schedule, scenario.cluster), *_summary(scenario, prediction).split("; ")]
    joined = [part.replace(" %", "\N{NO-BREAK SPACE}%") for part in text]  # a "%" belongs to its number's line
    lines = [line for part in joined for line in textwrap.wrap(part, int(width * 12))]
    figure.suptitle("\n".join(lines), fontsize=10, x=0.01, ha="left", linespacing=1.5)
    return figure


def _draw_tokens(axes: Axes, scenario: Scenario, schedule: Schedule, colour_of: dict[int, Any]) -> None:
    tokens = schedule.tokens(scenario.workload.seq_len)
    bars = axes.bar(list(tokens), list(tokens.values()), color=[colour_of[rank] for rank in tokens])
    if schedule.sp_size <= MAX_LABELLED_RANKS:
        axes.bar_label(bars, labels=[f"{count:,}" for count in tokens.values()], fontsize=8, color=GREY)
    axes.margins(y=0.15)
    axes.set_yticks([])
    axes.set_ylabel("tokens")
    axes.set_xticks([])


def _draw_heads(axes: Axes, schedule: Schedule, colour_of: dict[int, Any]) -> None:
    """Every rank's range of heads; ranges of one group stack up to all heads."""
    for group in schedule.ring_groups:
        for rank in group.ranks:
            start, stop = group.head_range(rank)
            bars = axes.bar(rank, stop - start, bottom=start, color=colour_of[rank])
            if stop > start and schedule.sp_size <= MAX_LABELLED_RANKS:
                axes.bar_label(bars, labels=[str(stop - start)], label_type="center", fontsize=8, color="white")
    axes.set_ylim(schedule.num_heads, 0)
    axes.set_ylabel("query heads")
    axes.set_xticks([])


def _draw_memory(
    axes: Axes, cost: CostModel, schedule: Schedule, prediction: Prediction, colour_of: dict[int, Any]
) -> None:
    need = [prediction.memory_bytes[rank] / GIB for rank in schedule.ranks]
    capacity = [cost.capacity_bytes_D[rank] / GIB for rank in schedule.ranks]
    axes.bar(schedule.ranks, capacity, color="#eeeeee", edgecolor="#999999", linewidth=0.5)
    full = [used > has for used, has in zip(need, capacity, strict=True)]
    edges = ["red" if over else "none" for over in full]
    axes.bar(schedule.ranks, need, color=[colour_of[rank] for rank in schedule.ranks], edgecolor=edges, width=0.6)
    axes.set_ylabel("memory, GiB\n(grey: capacity)")


def _label_devices(axes: Axes, scenario: Scenario, schedule: Schedule) -> None:
    """Rank numbers as ticks; below them, once for neighbours of one kind, the name of the device."""
    if schedule.sp_size > MAX_LABELLED_RANKS:
        axes.set_xlabel("rank")
        return
    names = [scenario.cluster.devices[rank].name for rank in range(schedule.sp_size)]
    axes.set_xticks(range(schedule.sp_size))
    first = 0
    for name, run in groupby(names):
        count = len(list(run))
        middle, below = first + (count - 1) / 2, axes.get_xaxis_transform()
        text = f"{count} x {name}" if count > 1 else name
        axes.text(middle, -0.24, text, transform=below, ha="center", va="top", fontsize=9, color=GREY)
        first += count
    axes.set_xlabel("rank", x=0, ha="right", labelpad=-9)


def _draw_timeline(axes: Axes, scenario: Scenario, spans: list[Span], ranks: list[int]) -> None:
    """Two rows per rank: the upper one computes, the lower one transfers."""
    for span in spans:
        row = ranks.index(span.rank) + (0.0 if span.stream == "compute" else 0.42)
        bar = (span.start_s * 1e3, (span.stop_s - span.start_s) * 1e3)
        axes.broken_barh([bar], (row, 0.38), facecolors=KINDS[span.kind], edgecolor="white", linewidth=0.3)
    axes.set_ylim(len(ranks), -0.15)
    axes.set_yticks([i + 0.4 for i in range(len(ranks))])
    axes.set_yticklabels([f"rank {rank}\n{scenario.cluster.devices[rank].name}" for rank in ranks], fontsize=8)
    axes.tick_params(axis="y", length=0)
    axes.set_xlabel("one block, ms: upper row computes, lower row transfers")
    labels = [Patch(color=colour, label=kind.replace("_", "-")) for kind, colour in KINDS.items()]
    axes.legend(handles=labels, ncols=4, fontsize=8, loc="lower left", bbox_to_anchor=(0, 1), frameon=False)


def _drawn_ranks(scenario: Scenario, schedule: Schedule) -> list[int]:
    """The first rank of every kind of work, at most `MAX_TIMELINE_RANKS`, ascending."""
    tokens = schedule.tokens(scenario.workload.seq_len)
    first: dict[tuple[object, ...], int] = {}
    for position, group in enumerate(schedule.ring_groups):
        for rank, heads in zip(group.ranks, group.heads, strict=True):
            first.setdefault((position, scenario.cluster.devices[rank].name, tokens[rank] // 16, heads), rank)
    return sorted(first.values())[:MAX_TIMELINE_RANKS]


def _summary(scenario: Scenario, prediction: Prediction) -> str:
    return (
        f"{scenario.model.name}, {scenario.workload.seq_len:,} tokens: {time_text(prediction.block_s)} per block, "
        f"{prediction.tokens_per_s:,.0f} tokens/s; of a block: {terms_text(prediction)}; "
        f"bottleneck: {prediction.bottleneck.text}"
    )


ZONES = {"cluster": "#e45756", "node": "#f2a33a", "local": "#4c78a8"}
MAX_LABELLED_UNITS = 32


def draw_documents(scenario: Scenario, report: DocumentsReport) -> Figure:
    """Above, time of every unit against the ideal; below, its documents, coloured by zone."""
    loads, units = report.loads, len(report.costs.token_s)
    figure = Figure(figsize=(min(max(8.0, 4.0 + 0.45 * units), 24.0), 7.5), layout="constrained")
    top, bottom = figure.subplots(2, 1, sharex=True)
    linear_ms = [1e3 * seconds for seconds in loads.linear_s]
    top.bar(range(units), linear_ms, color="#8da0cb", label="outside attention")
    top.bar(range(units), [1e3 * s for s in loads.attention_s], bottom=linear_ms, color="#66c2a5", label="attention")
    received_ms = [1e3 * seconds for seconds in loads.received_s]
    top.bar(range(units), received_ms, 0.25, bottom=linear_ms, color="#fc8d62", label="receives meanwhile")
    top.axhline(1e3 * report.ideal_s, color="black", linestyle=":", label="ideal")
    top.set_ylabel("one block, ms")
    top.legend(ncols=4, fontsize=8, loc="lower left", bbox_to_anchor=(0, 1), frameon=False)
    height = [0] * units
    for lane in report.placement.lanes:
        colour = ZONES[lane.zone(report.costs.node)]
        for tokens in lane.tokens:
            for unit, count in zip(lane.members, tokens, strict=True):
                bottom.bar(unit, count, bottom=height[unit], color=colour, edgecolor="white", linewidth=0.4)
                height[unit] += count
    bottom.set_ylabel("tokens, by document")
    labels = [Patch(color=colour, label=zone) for zone, colour in ZONES.items()]
    bottom.legend(handles=labels, ncols=3, fontsize=8, loc="lower left", bbox_to_anchor=(0, 1), frameon=False)
    if units <= MAX_LABELLED_UNITS:
        bottom.set_xticks(range(units), [rank_ranges(group.ranks) for group in report.placement.schedule.ring_groups])
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


MAX_MAKEUPS = 16  # makeups that are drawn
MAX_MICRO_BATCHES = 24  # drawn in the timeline
FORWARD, BACKWARD = "#8da0cb", "#fc8d62"


def draw_pipelines(costs: StageCosts, finished: Finished) -> Figure:
    """Return the picture of a plan that was judged."""
    rows = finished.makeups[:MAX_MAKEUPS]
    slowest = finished.pipeline_s.index(finished.pipelines_s)
    stages = len(finished.candidate.cuts[slowest].layers)
    heights = [0.6 + 0.55 * len(rows), 0.8 + 0.3 * stages]
    figure = Figure(figsize=(13, 1.2 + sum(heights)), layout="constrained")
    axes = figure.subplots(2, 1, height_ratios=heights)
    _draw_pipelines(axes[0], costs, finished, rows)
    _draw_step(axes[1], finished, slowest)
    for each in axes:
        each.spines[["top", "right", "left"]].set_visible(False)
    title = f"{time_text(finished.step_s)} per step: {reasons_of(costs, finished)[0]}"
    figure.suptitle(title, fontsize=10, x=0.01, ha="left")
    return figure


def _draw_pipelines(axes: Axes, costs: StageCosts, finished: Finished, rows: Sequence[Sequence[int]]) -> None:
    placed, cuts = finished.candidate.placed, finished.candidate.cuts
    kinds, labels = costs.pools.kinds, []
    used = sorted({block.kind for pipeline in placed for block in pipeline.blocks})
    names = dict.fromkeys(kinds[kind].device.name for kind in used)  # of unlike machines, one name is of two kinds
    colour_of = {name: COLOURS[i % len(COLOURS)] for i, name in enumerate(names)}
    for row, members in enumerate(rows):
        pipeline, cut = placed[members[0]], cuts[members[0]]
        labels.append(f"{len(members)} x {pipeline.micro_batches} micro-batches of {pipeline.micro_batch_size}")
        left = 0.0
        for j, block in enumerate(pipeline.blocks):
            width = cut.forward_s[j] + cut.backward_s[j]
            colour = colour_of[kinds[block.kind].device.name]
            axes.barh(row, width, left=left, height=0.8, color=colour, edgecolor="white")
            shared = "" if block.inner == "one" else f", {block.inner}"
            text = f"{cut.layers[j]} layers\n{block.size} card{'s' if block.size > 1 else ''}{shared}"
            axes.text(left + width / 2, row, text, ha="center", va="center", fontsize=7, color="white")
            left += width + (cut.hop_s[j] if j < len(cut.hop_s) else 0.0)
    axes.set_yticks(range(len(rows)), labels, fontsize=8)
    axes.invert_yaxis()
    axes.set_xlabel("seconds of one micro-batch through all stages: layers, cards, and what cards of a stage share")
    handles = [Patch(color=colour, label=name) for name, colour in colour_of.items()]
    axes.legend(handles=handles, fontsize=7, loc="lower right", ncols=4, bbox_to_anchor=(1, 1), frameon=False)


def _draw_step(axes: Axes, finished: Finished, pipeline: int) -> None:
    cut, number = finished.candidate.cuts[pipeline], finished.candidate.micro_batches[pipeline]
    drawn = min(number, MAX_MICRO_BATCHES)
    begun = min(number, drawn + max(finished.in_flight[pipeline]))
    timeline = run_pipeline(cut.forward_s, cut.backward_s, cut.hop_s, begun, finished.in_flight[pipeline])
    for passes, ends, colour in (
        (cut.forward_s, timeline.forward_end_s, FORWARD),
        (cut.backward_s, timeline.backward_end_s, BACKWARD),
    ):
        boxes = [
            Rectangle((end - passes[j], j - 0.4), passes[j], 0.8) for j, of_stage in enumerate(ends) for end in of_stage
        ]
        axes.add_collection(PatchCollection(boxes, facecolor=colour, edgecolor="white", linewidth=0.3))
    axes.set_xlim(0, timeline.backward_end_s[0][drawn - 1])
    axes.set_ylim(len(cut.layers) - 0.5, -0.5)
    axes.set_yticks(range(len(cut.layers)), [f"stage {j}" for j in range(len(cut.layers))], fontsize=8)
    part = f"the first {drawn} of {number}" if drawn < number else f"all {number}"
    axes.set_xlabel(f"seconds, pipeline {pipeline}, {part} micro-batches")
    handles = [Patch(color=FORWARD, label="forward"), Patch(color=BACKWARD, label="backward")]
    axes.legend(handles=handles, fontsize=7, loc="lower right", ncols=2, bbox_to_anchor=(1, 1), frameon=False)
