"""Picture of a plan of pipelines.

The upper part has one row for each set of equal pipelines, with a box for each stage, as wide as the stage's forward
and backward of a micro-batch. The lower part shows the passes of every stage over time, of the pipeline that ends last.
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
from ds_hetero.values.plans.stages import inner_text

MAX_MAKEUPS = 16  # rows that are drawn; chosen, never measured
MAX_MICRO_BATCHES = 24  # micro-batches that the timeline shows; chosen, never measured
FORWARD, BACKWARD = "#8da0cb", "#fc8d62"


def draw_pipelines(costs: StageCosts, finished: Finished) -> Figure:
    """Draw a plan of pipelines with its prediction."""
    rows = finished.makeups[:MAX_MAKEUPS]
    slowest = finished.pipeline_s.index(finished.slowest_pipeline_s)  # index of the pipeline that ends last
    num_stages = len(finished.candidate.cuts[slowest].layers)
    heights = [0.6 + 0.55 * len(rows), 0.8 + 0.3 * num_stages]
    figure = Figure(figsize=(13, 1.2 + sum(heights)), layout="constrained")
    axes = figure.subplots(2, 1, height_ratios=heights)
    _draw_pipelines(axes[0], costs, finished, rows)
    _draw_step(axes[1], finished, slowest)
    for any_axes in axes:
        any_axes.spines[["top", "right", "left"]].set_visible(False)
    title = f"{time_text(finished.step_s)} per step: {reasons_of(costs, finished)[0]}"
    figure.suptitle(title, fontsize=10, x=0.01, ha="left")
    return figure


def _draw_pipelines(axes: Axes, costs: StageCosts, finished: Finished, rows: Sequence[Sequence[int]]) -> None:
    """Draw the boxes of the stages, coloured by device, with gaps for the sends between them."""
    placed, cuts = finished.candidate.placed, finished.candidate.cuts
    kinds = costs.pools.kinds
    used_kinds: set[int] = set()
    for pipeline in placed:
        used_kinds.update(block.kind for block in pipeline.blocks)
    # One device in two different machines is two kinds, and has one name and one colour.
    names = dict.fromkeys(kinds[kind].device.name for kind in sorted(used_kinds))
    colour_of = {name: COLOURS[i % len(COLOURS)] for i, name in enumerate(names)}
    labels = []
    for row, equal_pipelines in enumerate(rows):
        pipeline, cut = placed[equal_pipelines[0]], cuts[equal_pipelines[0]]
        labels.append(f"{len(equal_pipelines)} x {pipeline.micro_batches} micro-batches of {pipeline.micro_batch_size}")
        begin_s = 0.0
        for j, block in enumerate(pipeline.blocks):
            stage_s = cut.forward_s[j] + cut.backward_s[j]
            colour = colour_of[kinds[block.kind].device.name]
            axes.barh(row, stage_s, left=begin_s, height=0.8, color=colour, edgecolor="white")
            inner = "" if block.inner == "one" else f", {inner_text(block.inner, block.tensor_size)}"
            text = f"{cut.layers[j]} layers\n{block.size} card{'s' if block.size > 1 else ''}{inner}"
            axes.text(begin_s + stage_s / 2, row, text, ha="center", va="center", fontsize=7, color="white")
            begin_s += stage_s + (cut.hop_s[j] if j < len(cut.hop_s) else 0.0)
    axes.set_yticks(range(len(rows)), labels, fontsize=8)
    axes.invert_yaxis()
    axes.set_xlabel("seconds of one micro-batch through all stages: layers, cards, and what cards of a stage share")
    handles = [Patch(color=colour, label=name) for name, colour in colour_of.items()]
    axes.legend(handles=handles, fontsize=7, loc="lower right", ncols=4, bbox_to_anchor=(1, 1), frameon=False)


def _draw_step(axes: Axes, finished: Finished, pipeline: int) -> None:
    """Draw the passes of the first micro-batches: a row for each stage, time to the right."""
    cut, num_batches = finished.candidate.cuts[pipeline], finished.candidate.micro_batches[pipeline]
    num_drawn = min(num_batches, MAX_MICRO_BATCHES)
    # While the last drawn micro-batch ends, later ones have begun: their passes belong into the picture, too.
    num_begun = min(num_batches, num_drawn + max(finished.in_flight[pipeline]))
    timeline = run_pipeline(cut.forward_s, cut.backward_s, cut.hop_s, num_begun, finished.in_flight[pipeline])
    passes = (
        (cut.forward_s, timeline.forward_end_s, FORWARD),
        (cut.backward_s, timeline.backward_end_s, BACKWARD),
    )
    for pass_s, ends_s, colour in passes:
        boxes = []
        for j, stage_ends_s in enumerate(ends_s):
            boxes += [Rectangle((end_s - pass_s[j], j - 0.4), pass_s[j], 0.8) for end_s in stage_ends_s]
        axes.add_collection(PatchCollection(boxes, facecolor=colour, edgecolor="white", linewidth=0.3))
    axes.set_xlim(0, timeline.backward_end_s[0][num_drawn - 1])
    axes.set_ylim(len(cut.layers) - 0.5, -0.5)
    axes.set_yticks(range(len(cut.layers)), [f"stage {j}" for j in range(len(cut.layers))], fontsize=8)
    part = f"the first {num_drawn} of {num_batches}" if num_drawn < num_batches else f"all {num_batches}"
    axes.set_xlabel(f"seconds, pipeline {pipeline}, {part} micro-batches")
    handles = [Patch(color=FORWARD, label="forward"), Patch(color=BACKWARD, label="backward")]
    axes.legend(handles=handles, fontsize=7, loc="lower right", ncols=2, bbox_to_anchor=(1, 1), frameon=False)
