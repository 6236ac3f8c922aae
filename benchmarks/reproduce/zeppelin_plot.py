"""Draw the picture of `benchmarks.reproduce.zeppelin`: gains over TE by cell, and the ablation with the published one.

python -m benchmarks.reproduce.zeppelin_plot benchmarks/results/zeppelin.json    draws a stored result again
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from benchmarks.reproduce import zeppelin_paper as paper

BARS = {"llama": "#b8b8b8", "hybrid": "#8da0cb", "with remap": "#f2a33a", "ours": "#4c78a8"}
LABELS = {"llama": "Llama CP", "hybrid": "hybrid DP", "with remap": "Zeppelin", "ours": "ds_hetero"}


def draw(outcome: dict[str, Any], path: Path) -> None:
    """Draw bars of the 36 cells with fitted constants; below, the ablation."""
    figure = Figure(figsize=(13, 8), layout="constrained")
    top, bottom = figure.subplots(2, 1, height_ratios=(2, 1))
    cells = [cell for cell in outcome["cells"] if cell["rates"] == "fitted"]
    width = 0.8 / len(BARS)
    for place, (method, colour) in enumerate(BARS.items()):
        at = [i + (place - len(BARS) / 2 + 0.5) * width for i in range(len(cells))]
        top.bar(at, [cell["gain"][method] for cell in cells], width, color=colour, label=LABELS[method])
    top.axhline(1.0, color="black", linewidth=0.8)
    top.axhline(paper.GAIN_MEAN, color="#f2a33a", linestyle=":", label=f"Zeppelin's published mean, {paper.GAIN_MEAN}")
    top.set_xticks(range(len(cells)))
    labels = [f"{cell['model']} {cell['data']}\n{cell['context'] // 1024}K" for cell in cells]
    top.set_xticklabels(labels, fontsize=6, rotation=60)
    top.set_ylabel("speed-up over TE's context parallelism")
    top.legend(ncols=len(BARS) + 1, fontsize=8, frameon=False)
    steps = list(paper.ABLATION)
    simulated = outcome["ablation"][0]["gain"]
    bottom.bar([i - 0.2 for i in range(len(steps))], [paper.ABLATION[s] for s in steps], 0.4, label="published")
    bottom.bar([i + 0.2 for i in range(len(steps))], [simulated[s] for s in steps], 0.4, label="simulated, fitted")
    bottom.set_xticks(range(len(steps)), steps)
    bottom.set_ylabel("3B, 32 GPUs, ArXiv")
    bottom.legend(fontsize=8, frameon=False)
    figure.suptitle(
        "Zeppelin's evaluation in a simulator whose constants come from its traces (predicted, not measured)"
    )
    figure.savefig(path, dpi=120)


if __name__ == "__main__":
    source = Path(sys.argv[1])
    draw(json.loads(source.read_text()), source.with_suffix(".png"))
