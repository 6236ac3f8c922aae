"""Draw the picture of `benchmarks.reproduce.hexiseq`: figure 5 of the paper with our schedules and its baselines.

python -m benchmarks.reproduce.hexiseq_plot benchmarks/results/hexiseq.json    draws a stored result again
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

from benchmarks.reproduce import hexiseq_paper as paper
from ds_hetero.models import load_model

# A baseline is drawn wider than the next one, so that lines on top of each other are all seen.
BASELINES = {
    "ring": {"label": "Ring", "color": "#4c78a8", "marker": "o", "linewidth": 6, "markersize": 10},
    "ulysses": {"label": "Ulysses", "color": "#54a24b", "marker": "o", "linewidth": 3.5, "markersize": 7},
    "usp": {"label": "USP, best mesh", "color": "#f2a33a", "marker": "o", "linewidth": 1.5, "markersize": 4},
}
OURS = {"label": "ds_hetero", "color": "black", "marker": "s", "linewidth": 1.5, "markersize": 5}
BOUND = {"label": "bound: total work / sum of speeds", "color": "gray", "linestyle": ":", "linewidth": 1.5}
TICKS = [mantissa * 10**exponent for exponent in range(-1, 4) for mantissa in (1, 2, 5)]


def draw(cells: Sequence[dict[str, Any]], path: Path) -> None:
    """Draw throughput over context, one panel per cluster and model."""
    figure = Figure(figsize=(13, 7.5), layout="constrained")
    axes = figure.subplots(len(paper.MODELS), len(paper.SIMULATIONS), sharex=True, squeeze=False)
    for (row, model), (column, simulation) in product(enumerate(paper.MODELS), enumerate(paper.SIMULATIONS)):
        panel = [cell for cell in cells if (cell["simulation"], cell["model"]) == (simulation, model)]
        _draw_panel(axes[row][column], panel, load_model(model).num_layers)
        axes[row][column].set_title(f"{simulation}, {model}")
    for axis in axes[:, 0]:
        axis.set_ylabel("thousand tokens per second")
    for axis in axes[-1]:
        axis.set_xlabel("context, tokens")
    handles = [Line2D([], [], **style) for style in (*BASELINES.values(), OURS, BOUND)]
    figure.legend(handles=handles, loc="outside lower center", ncols=len(handles), frameon=False)
    figure.suptitle("HexiSeq's simulations 1-3 under its published equations (predicted, not measured)")
    figure.savefig(path, dpi=120)


def _draw_panel(axis: Axes, panel: Sequence[dict[str, Any]], num_layers: int) -> None:
    """Draw one panel."""
    contexts = [cell["context"] for cell in panel]

    def rates(block_s: Sequence[float]) -> list[float]:
        return [context / (num_layers * s) / 1e3 for context, s in zip(contexts, block_s, strict=True)]

    x = [context // 1024 for context in contexts]
    for kind, style in BASELINES.items():
        best = [
            min((s for name, s in cell["baselines_s"].items() if name.startswith(kind)), default=None) for cell in panel
        ]
        if None not in best:  # Ulysses needs as many heads as ranks
            axis.plot(x, rates(best), **style)
    axis.plot(x, rates([cell["bound_s"] for cell in panel]), **BOUND)
    axis.plot(x, rates([cell["ours_s"] for cell in panel]), **OURS)
    axis.set_xscale("log", base=2)
    axis.set_xticks(x, [f"{value}K" for value in x])
    axis.set_yscale("log")
    axis.yaxis.set_major_locator(FixedLocator(TICKS))
    axis.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axis.yaxis.set_minor_locator(NullLocator())
    axis.grid(alpha=0.3)


if __name__ == "__main__":
    stored = Path(sys.argv[1])
    draw(json.loads(stored.read_text())["simulations"], stored.with_suffix(".png"))
