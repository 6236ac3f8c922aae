"""The README's picture: tokens/s of one training step on four unlike ranks, by way of sharing the sequence.

    python -m benchmarks.readme_picture

Reads `benchmarks/results/lab_mesh.json`, which ``python -m benchmarks.lab mesh`` measures, and writes
`docs/images/unlike-ranks-light.svg` and `docs/images/unlike-ranks-dark.svg`: one bar per contender, and a line at the
speed of perfect balance.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from benchmarks.measure.results import FOLDER

RESULT = FOLDER / "lab_mesh.json"
PICTURES = FOLDER.parents[1] / "docs" / "images"
THEMES = {
    "light": {"text": "#24292f", "equal": "#6e7781", "ours": "#3f51b5", "number": "#ffffff"},
    "dark": {"text": "#e6edf3", "equal": "#8b949e", "ours": "#8c9eff", "number": "#0d1117"},
}
CONTENDERS = {
    "stock": "DeepSpeed Ulysses\nequal shares",
    "torch-ring": "torch ring attention\nequal shares",
    "usp 2x2": "USP 2x2\nequal shares",
    "plan": "ds_hetero\nplanned shares",
}
SCOPE, SPEEDS = "training step", [4.0, 3.0, 2.0, 1.0]
SIZE = (6.4, 2.9)  # inches; text stays readable at the width of a phone


def path_of(theme: str, folder: Path = PICTURES) -> Path:
    """File of the picture in a theme, "light" or "dark"."""
    return folder / f"unlike-ranks-{theme}.svg"


def rows_of(result: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Rows of the training step on ranks of speeds 4:3:2:1, by contender, in the order of `CONTENDERS`."""
    rows = {row["contender"]: row for row in result["rows"] if row["scope"] == SCOPE and list(row["speeds"]) == SPEEDS}
    return {contender: rows[contender] for contender in CONTENDERS}


def draw(result: dict[str, Any], theme: str, folder: Path = PICTURES) -> None:
    """Write the picture of one theme into a folder."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    colours = THEMES[theme]
    rows = rows_of(result)
    # Text stays text, and ids do not depend on chance, so that the file changes only where the figures do.
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": "ds_hetero", "font.size": 10}):
        figure = Figure(figsize=SIZE, layout="constrained")
        axes = figure.subplots()
        for place, (contender, row) in enumerate(rows.items()):
            colour = colours["ours" if contender == "plan" else "equal"]
            axes.barh(place, row["tokens_per_s"], 0.62, color=colour)
            inside = {"ha": "right", "va": "center", "color": colours["number"]}
            axes.text(row["tokens_per_s"] - 40, place, f"{row['tokens_per_s']:,.0f}", **inside)
        tokens, bound_s = rows["plan"]["tokens"], rows["plan"]["bound_s"]
        axes.axvline(tokens / bound_s, color=colours["text"], linestyle=":", linewidth=1)
        axes.text(tokens / bound_s, -0.62, "perfect balance", ha="right", va="bottom", color=colours["text"])
        axes.set_yticks(range(len(rows)), list(CONTENDERS.values()))
        axes.invert_yaxis()
        axes.set_xlim(0, 1.02 * tokens / bound_s)
        axes.set_xlabel(f"tokens/s; {tokens:,} tokens a step", color=colours["text"])
        axes.tick_params(colors=colours["text"], length=0)
        axes.spines[:].set_visible(False)
        axes.set_xticks([])
        figure.savefig(path_of(theme, folder), transparent=True, metadata={"Date": None})


def main() -> None:
    """The command."""
    result = json.loads(RESULT.read_text())
    for theme in THEMES:
        draw(result, theme)
        print(f"written to {path_of(theme)}")


if __name__ == "__main__":
    main()
