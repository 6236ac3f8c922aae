"""Picture of a schedule.

Ranks are columns: their tokens, the heads they compute and their memory against its capacity, coloured by group. Below
stands the timeline of one block: what a rank of every kind computes and what it transfers meanwhile.
"""

from __future__ import annotations

import textwrap
from itertools import groupby
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from ds_hetero.cli.printing import terms_text
from ds_hetero.cli.scenario import Scenario
from ds_hetero.cli.showing.picture_colours import COLOURS
from ds_hetero.common.text import time_text
from ds_hetero.common.units import GIB
from ds_hetero.cost.model import CostModel, Prediction, Span
from ds_hetero.planner.results.sentences import describe
from ds_hetero.reporting.timelines import block_spans
from ds_hetero.values.schedule import Schedule

MAX_TIMELINE_RANKS = 16  # drawn; where there are more kinds of work, the first ones
MAX_LABELLED_RANKS = 24  # with more, numbers on the bars would overlap
KINDS = {"non_attention": "#8da0cb", "attention": "#66c2a5", "all_to_all": "#e78ac3", "ring": "#fc8d62"}
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
