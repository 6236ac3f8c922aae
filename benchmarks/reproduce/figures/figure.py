"""A table or figure of a paper, rebuilt, and its place on the page docs/papers.md."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Figure:
    """One table or figure.

    Args:
        name: in the paper, such as ``"Table 3"``.
        shows: what the paper shows there.
        columns: headings of the table.
        rows: cells of the table.
        decides: the assumption on which agreement or difference depends most.
        why_not: why it is not reproduced; the table is then empty.
        lines: for a picture, by label the points ``(x, y)``; none where the paper has a table.
        axes: of the picture: x, y, and ``"log"`` where x is logarithmic.
        cases: names of the values 0, 1, ... of x, whose y are drawn as bars beside each other.
        command: that rebuilds it; left out, the one of the whole page.
    """

    name: str
    shows: str
    columns: tuple[str, ...] = ()
    rows: Sequence[Sequence[str]] = ()
    decides: str = ""
    why_not: str = ""
    lines: Mapping[str, Sequence[tuple[float, float]]] = field(default_factory=dict)
    axes: tuple[str, str, str] = ("", "", "")
    cases: Sequence[str] = ()
    command: str = ""

    def to_dict(self) -> dict[str, Any]:
        """Plain data for the result file."""
        return asdict(self)


Maker = Callable[[bool], Figure]
"""Makes a figure; the argument says whether a small part of it will do."""


@dataclass(frozen=True, kw_only=True)
class Paper:
    """A paper with its tables and figures in the order of the paper.

    Args:
        key: short name.
        title: with its source.
        makers: of the figures that are rebuilt, by their names.
        left_out: name and reason of the others.
    """

    key: str
    title: str
    makers: Mapping[str, Maker]
    left_out: Mapping[str, str] = field(default_factory=dict)


def section(key: str, figure: Mapping[str, Any], picture: str | None) -> list[str]:
    """Lines of the page for one figure.

    Args:
        key: of the paper.
        figure: of `Figure.to_dict`.
        picture: path from the page; None where there is none.
    """
    lines = [f"### {figure['name']}", "", figure["shows"], ""]
    if figure["why_not"]:
        return [*lines, f"Not reproduced: {figure['why_not']}", ""]
    if picture is not None:
        lines += [f"![{figure['name']}]({picture})", ""]
    if figure["columns"]:
        lines.append(f"| {' | '.join(figure['columns'])} |")
        lines.append(f"|{'---|' * len(figure['columns'])}")
        lines += [f"| {' | '.join(row)} |" for row in figure["rows"]]
        lines.append("")
    command = figure["command"] or f"python -m benchmarks.reproduce all --only {key}"
    return [*lines, f"Decided by: {figure['decides']} Command: `{command}`.", ""]


def draw(figure: Mapping[str, Any], path: Path) -> None:
    """Draw the lines of a figure, or bars where x has names.

    Args:
        figure: of `Figure.to_dict`.
        path: of the picture.
    """
    from matplotlib.figure import Figure as Canvas

    canvas = Canvas(figsize=(4.8, 3.2), layout="constrained")  # of a phone's width too
    axis = canvas.subplots()
    cases, (x, y, scale) = figure.get("cases", ()), figure["axes"]
    width = 0.8 / len(figure["lines"])  # of a bar
    for i, (label, points) in enumerate(figure["lines"].items()):
        if cases:
            left = [case + width * (i - (len(figure["lines"]) - 1) / 2) for case, _ in points]
            axis.bar(left, [value for _, value in points], width, label=label)
        else:
            axis.plot(*zip(*points, strict=True), marker="o", markersize=3, label=label)
    if cases:
        axis.set_xticks(range(len(cases)), [case.replace(", ", "\n") for case in cases])
        axis.set_ylim(top=1.3 * axis.get_ylim()[1])  # room for the legend
    axis.set_xlabel(x)
    axis.set_ylabel(y)
    if "log" in scale:
        values = sorted({value for points in figure["lines"].values() for value, _ in points})
        axis.set_xscale("log", base=2)
        axis.set_xticks(values[:: -(-len(values) // 6)], labels=map(_in_k, values[:: -(-len(values) // 6)]))
    if "both" in scale:
        axis.set_yscale("log")
    axis.grid(alpha=0.3)
    axis.legend(fontsize=7, ncols=2 if cases else 1)
    path.parent.mkdir(parents=True, exist_ok=True)
    canvas.savefig(path, dpi=140)


def _in_k(value: float) -> str:
    """``64K`` for 65,536; a number that is no multiple of 1,024 as it is."""
    return f"{value:g}" if value % 1024 else f"{value / 1024:g}K"
