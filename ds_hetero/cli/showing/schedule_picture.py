"""Picture of a schedule: bars of tokens, heads and memory for every rank, and a timeline of one block.

Bars have the colour of the rank's group. Equal ranks do the same in the timeline, so it shows one of them.
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

MAX_TIMELINE_RANKS = 16  # ranks in the timeline; if more ranks differ, the first ones; chosen, never measured
MAX_LABELLED_RANKS = 24  # with more, numbers on the bars would overlap
KIND_COLOURS = {"non_attention": "#8da0cb", "attention": "#66c2a5", "all_to_all": "#e78ac3", "ring": "#fc8d62"}
GREY = "#666666"


def draw_schedule(scenario: Scenario, cost: CostModel, schedule: Schedule, prediction: Prediction) -> Figure:
    """Draw a schedule with its prediction."""
    spans = block_spans(cost, schedule)
    ranks = _drawn_ranks(scenario, schedule) if spans else []
    heights = [1.6, 1.6, 1.6] + ([0.9 + 0.4 * len(ranks)] if ranks else [])
    width = min(max(9.0, 4.0 + 0.5 * schedule.sp_size), 24.0)
    figure = Figure(figsize=(width, 1.5 + sum(heights)), layout="constrained")
    axes = figure.subplots(len(heights), 1, height_ratios=heights, squeeze=False)[:, 0]
    colour_of: dict[int, str] = {}  # by rank
    for position, group in enumerate(schedule.ring_groups):
        colour_of.update(dict.fromkeys(group.ranks, COLOURS[position % len(COLOURS)]))
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
    title_lines: list[str] = []
    for part in (describe(schedule, scenario.cluster), *_summary(scenario, prediction).split("; ")):
        unbroken = part.replace(" %", "\N{NO-BREAK SPACE}%")  # keeps a "%" on the line of its number
        title_lines += textwrap.wrap(unbroken, int(width * 12))
    figure.suptitle("\n".join(title_lines), fontsize=10, x=0.01, ha="left", linespacing=1.5)
    return figure


def _draw_tokens(axes: Axes, scenario: Scenario, schedule: Schedule, colour_of: dict[int, Any]) -> None:
    """Draw a bar with the tokens of every rank."""
    tokens = schedule.tokens(scenario.workload.seq_len)
    bars = axes.bar(list(tokens), list(tokens.values()), color=[colour_of[rank] for rank in tokens])
    if schedule.sp_size <= MAX_LABELLED_RANKS:
        axes.bar_label(bars, labels=[f"{count:,}" for count in tokens.values()], fontsize=8, color=GREY)
    axes.margins(y=0.15)
    axes.set_yticks([])
    axes.set_ylabel("tokens")
    axes.set_xticks([])


def _draw_heads(axes: Axes, schedule: Schedule, colour_of: dict[int, Any]) -> None:
    """Draw every rank's range of heads; the ranges of one group add up to all heads."""
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
    """Draw a bar with the needed memory of every rank in front of its capacity, with a red edge if it is more."""
    needed_gib = [prediction.memory_bytes[rank] / GIB for rank in schedule.ranks]
    capacity_gib = [cost.capacity_bytes_D[rank] / GIB for rank in schedule.ranks]
    axes.bar(schedule.ranks, capacity_gib, color="#eeeeee", edgecolor="#999999", linewidth=0.5)
    is_over = [needed > capacity for needed, capacity in zip(needed_gib, capacity_gib, strict=True)]
    edges = ["red" if over else "none" for over in is_over]
    axes.bar(schedule.ranks, needed_gib, color=[colour_of[rank] for rank in schedule.ranks], edgecolor=edges, width=0.6)
    axes.set_ylabel("memory, GiB\n(grey: capacity)")


def _label_devices(axes: Axes, scenario: Scenario, schedule: Schedule) -> None:
    """Label each rank with its number, and each run of ranks with equal devices with the device's name."""
    if schedule.sp_size > MAX_LABELLED_RANKS:
        axes.set_xlabel("rank")
        return
    names = [scenario.cluster.devices[rank].name for rank in range(schedule.sp_size)]
    axes.set_xticks(range(schedule.sp_size))
    below_axis = axes.get_xaxis_transform()
    first_rank = 0
    for name, run in groupby(names):
        count = len(list(run))
        middle = first_rank + (count - 1) / 2
        text = f"{count} x {name}" if count > 1 else name
        axes.text(middle, -0.24, text, transform=below_axis, ha="center", va="top", fontsize=9, color=GREY)
        first_rank += count
    axes.set_xlabel("rank", x=0, ha="right", labelpad=-9)


def _draw_timeline(axes: Axes, scenario: Scenario, spans: list[Span], ranks: list[int]) -> None:
    """Draw two rows per rank: computing above, transfers below."""
    for span in spans:
        row = ranks.index(span.rank) + (0.0 if span.stream == "compute" else 0.42)
        bar = (span.start_s * 1e3, (span.stop_s - span.start_s) * 1e3)
        axes.broken_barh([bar], (row, 0.38), facecolors=KIND_COLOURS[span.kind], edgecolor="white", linewidth=0.3)
    axes.set_ylim(len(ranks), -0.15)
    axes.set_yticks([i + 0.4 for i in range(len(ranks))])
    axes.set_yticklabels([f"rank {rank}\n{scenario.cluster.devices[rank].name}" for rank in ranks], fontsize=8)
    axes.tick_params(axis="y", length=0)
    axes.set_xlabel("one block, ms: upper row computes, lower row transfers")
    labels = [Patch(color=colour, label=kind.replace("_", "-")) for kind, colour in KIND_COLOURS.items()]
    axes.legend(handles=labels, ncols=4, fontsize=8, loc="lower left", bbox_to_anchor=(0, 1), frameon=False)


def _drawn_ranks(scenario: Scenario, schedule: Schedule) -> list[int]:
    """Return ranks for the timeline, ascending, at most `MAX_TIMELINE_RANKS`: of ranks with equal work, the first."""
    tokens = schedule.tokens(scenario.workload.seq_len)
    first_rank: dict[tuple[object, ...], int] = {}  # by kind of work
    for position, group in enumerate(schedule.ring_groups):
        for rank, heads in zip(group.ranks, group.heads, strict=True):
            # In units of 16 tokens, so that ranks which differ by a rounding are one kind.
            kind = position, scenario.cluster.devices[rank].name, tokens[rank] // 16, heads
            first_rank.setdefault(kind, rank)
    return sorted(first_rank.values())[:MAX_TIMELINE_RANKS]


def _summary(scenario: Scenario, prediction: Prediction) -> str:
    """Return the title's text on model, time, shares of the time and bottleneck, with parts separated by "; "."""
    return (
        f"{scenario.model.name}, {scenario.workload.seq_len:,} tokens: {time_text(prediction.block_s)} per block, "
        f"{prediction.tokens_per_s:,.0f} tokens/s; of a block: {terms_text(prediction)}; "
        f"bottleneck: {prediction.bottleneck.text}"
    )
