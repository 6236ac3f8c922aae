"""``ds-hetero show``: a schedule as a picture.

Ranks are columns: their tokens, the heads they compute and their memory against its capacity, coloured by group. Below,
the timeline of one block: what some ranks compute and what they transfer meanwhile.
"""

from __future__ import annotations

import html
import io
import textwrap
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from ds_hetero.cli.common import Job, check_out, print_json, read_schedule, terms_text
from ds_hetero.cost.workload import CostModel, Prediction, Span
from ds_hetero.errors import PlanError
from ds_hetero.planner.planning import describe
from ds_hetero.schedule import Schedule
from ds_hetero.text import GIB, time_text

__all__ = ["run"]

FORMATS = (".svg", ".png", ".html")
MAX_TIMELINE_RANKS = 16  # drawn; one of each kind of work first
MAX_SPANS = 200_000  # computed; larger timelines take longer than anybody waits
KINDS = {"non_attention": "#8da0cb", "attention": "#66c2a5", "all_to_all": "#e78ac3", "ring": "#fc8d62"}


def run(job: Job, source: str, out: Path, as_json: bool) -> None:
    """Draw and write the picture."""
    if out.suffix not in FORMATS:
        raise PlanError(f"--out must end in one of {', '.join(FORMATS)}, got {str(out)!r}.")
    check_out(out)
    cost = job.cost
    schedule = read_schedule(source, cost)
    prediction = cost.predict(schedule)
    figure = _draw(job, cost, schedule, prediction)
    if out.suffix == ".html":
        out.write_text(_page(job, schedule, prediction, figure), encoding="utf-8")
    else:
        figure.savefig(out, dpi=120)
    if as_json:
        print_json({"out": str(out), "schedule": schedule.to_dict(), "predicted": prediction.to_dict()})
    else:
        print(f"written to {out}")


def _draw(job: Job, cost: CostModel, schedule: Schedule, prediction: Prediction) -> Figure:
    spans = _spans(cost, schedule)
    ranks = _drawn_ranks(job, schedule) if spans else []
    heights = [2.0, 2.0, 2.0] + ([0.8 + 0.34 * len(ranks)] if ranks else [])
    width = min(6.0 + 0.22 * schedule.sp_size, 24.0)
    figure = Figure(figsize=(width, 1.0 + sum(heights)), layout="constrained")
    axes = figure.subplots(len(heights), 1, height_ratios=heights, squeeze=False)[:, 0]
    palette = matplotlib.colormaps["tab20"]
    colour_of = {
        rank: palette(position % 20) for position, group in enumerate(schedule.ring_groups) for rank in group.ranks
    }
    _draw_tokens(axes[0], job, schedule, colour_of)
    _draw_heads(axes[1], schedule, colour_of)
    _draw_memory(axes[2], cost, schedule, prediction, colour_of)
    if ranks:
        _draw_timeline(axes[3], job, [span for span in spans if span.rank in ranks], ranks)
    for each in axes[:3]:
        each.set_xlim(-0.6, schedule.sp_size - 0.4)
    text = [describe(schedule, job.cluster), *_summary(job, prediction).split("; ")]
    lines = [line for part in text for line in textwrap.wrap(part, int(width * 12))]
    figure.suptitle("\n".join(lines), fontsize=9)
    return figure


def _draw_tokens(axes: Axes, job: Job, schedule: Schedule, colour_of: dict[int, Any]) -> None:
    tokens = schedule.tokens(job.workload.seq_len)
    axes.bar(list(tokens), list(tokens.values()), color=[colour_of[rank] for rank in tokens])
    axes.set_ylabel("tokens")
    axes.set_xticks([])


def _draw_heads(axes: Axes, schedule: Schedule, colour_of: dict[int, Any]) -> None:
    """Every rank's range of heads; ranges of one group stack up to all heads."""
    for group in schedule.ring_groups:
        for rank in group.ranks:
            start, stop = group.head_range(rank)
            axes.bar(rank, stop - start, bottom=start, color=colour_of[rank])
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
    axes.set_ylabel("memory GiB\n(grey: capacity)")
    axes.set_xlabel("rank")


def _draw_timeline(axes: Axes, job: Job, spans: list[Span], ranks: list[int]) -> None:
    """Two rows per rank: the upper one computes, the lower one transfers."""
    for span in spans:
        row = ranks.index(span.rank) + (0.0 if span.stream == "compute" else 0.42)
        bar = (span.start_s * 1e3, (span.stop_s - span.start_s) * 1e3)
        axes.broken_barh([bar], (row, 0.38), facecolors=KINDS[span.kind], edgecolor="white", linewidth=0.3)
    axes.set_ylim(len(ranks), 0)
    axes.set_yticks([i + 0.4 for i in range(len(ranks))])
    axes.set_yticklabels([f"{rank} {job.cluster.devices[rank].name}" for rank in ranks], fontsize=7)
    axes.set_xlabel("one block, ms")
    labels = [Patch(color=colour, label=kind.replace("_", "-")) for kind, colour in KINDS.items()]
    axes.legend(handles=labels, ncols=4, fontsize=7, loc="lower right")


def _spans(cost: CostModel, schedule: Schedule) -> tuple[Span, ...]:
    return cost.timeline(schedule) if schedule.sp_size * schedule.ring_size * 6 <= MAX_SPANS else ()


def _drawn_ranks(job: Job, schedule: Schedule) -> list[int]:
    """The first rank of every kind of work, then others, at most `MAX_TIMELINE_RANKS`, ascending."""
    tokens = schedule.tokens(job.workload.seq_len)
    first: dict[tuple[object, ...], int] = {}
    for group in schedule.ring_groups:
        for rank, heads in zip(group.ranks, group.heads, strict=True):
            first.setdefault((job.cluster.devices[rank].name, tokens[rank], heads), rank)
    ranks = list(dict.fromkeys([*first.values(), *schedule.ranks]))
    return sorted(ranks[:MAX_TIMELINE_RANKS])


def _summary(job: Job, prediction: Prediction) -> str:
    return (
        f"{job.model.name}, {job.workload.seq_len} tokens: {time_text(prediction.block_s)} per block, "
        f"{prediction.tokens_per_s:,.0f} tokens/s ({terms_text(prediction)}); {prediction.bottleneck.text}"
    )


def _page(job: Job, schedule: Schedule, prediction: Prediction, figure: Figure) -> str:
    """One file: the picture as SVG, the prediction in words, the schedule as JSON to copy."""
    svg = io.StringIO()
    figure.savefig(svg, format="svg")
    picture = svg.getvalue()
    title = html.escape(describe(schedule, job.cluster))
    memory = html.escape(prediction.reason or "every rank fits into its memory")
    return f"""<!doctype html>
<html lang="en"><meta charset="utf-8"><title>{title}</title>
<style>body {{ font-family: sans-serif; margin: 2em; max-width: 100em }} svg {{ max-width: 100%; height: auto }}
pre {{ background: #f4f4f4; padding: 1em; overflow: auto }}</style>
<h1>{title}</h1>
<p>{html.escape(_summary(job, prediction))}; {memory}.</p>
{picture[picture.index("<svg") :]}
<h2>Schedule file</h2>
<pre>{html.escape(schedule.to_json())}</pre>
</html>
"""
