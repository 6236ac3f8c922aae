"""Picture of a plan of pipelines.

The upper part has one row per makeup of pipeline, with a box per stage that is as wide as its forward and backward of a
micro-batch. The lower part shows the pipeline that ends last: what every stage computes when.
"""

from __future__ import annotations

from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.collections import PatchCollection
from matplotlib.figure import Figure
from matplotlib.patches import Patch, Rectangle

from ds_hetero.cli.showing.picture_colours import COLOURS
from ds_hetero.common.text import time_text
from ds_hetero.cost.stages.pipeline_time import run_pipeline
from ds_hetero.cost.stages.stage import StageCosts
from ds_hetero.planner.pipeline_search.finish import Finished
from ds_hetero.planner.pipelines.explain import reasons_of

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
