"""A rebuilt table or figure of a paper, and its section of a page in docs/evidence."""

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
        title: its subject in a few words, for the heading.
        shows: what the paper shows there, in whole sentences.
        columns: headings of the table.
        rows: cells of the table.
        decides: the assumption on which agreement or difference depends most, in whole sentences.
        why_not: why it is not reproduced; the table is then empty.
        lines: of a picture, by label, the points ``(x, y)``; empty if the paper has a table.
        axes: of the picture: x, y, and ``"log"`` if x is logarithmic.
        cases: names of the values 0, 1, ... of x, whose y are drawn as bars beside each other.
        command: that rebuilds it; left out, the command of the whole page.
    """

    name: str
    title: str = ""
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
        """Return plain data for the result file."""
        return asdict(self)


Maker = Callable[[bool], Figure]
"""Makes a figure; the argument says whether a small part of it will do."""


@dataclass(frozen=True, kw_only=True)
class Paper:
    """A paper with its tables and figures in order.

    Args:
        key: short name.
        name: as people say it.
        title: with its source.
        result: the comparison in short; a test holds its numbers to those of the figures.
        setup: the assumptions of all figures.
        makers: functions that rebuild figures, by name.
        left_out: name and reason of the other figures.
    """

    key: str
    name: str
    title: str
    result: str = ""
    setup: str = ""
    makers: Mapping[str, Maker]
    left_out: Mapping[str, str] = field(default_factory=dict)


MAX_CELL = 60  # characters of a table's cell that still fit a screen
MAX_ROWS = 12  # of a table below a picture; a longer one opens by a click


def section(figure: Mapping[str, Any], picture: str | None) -> list[str]:
    """Return the lines of the page for one figure.

    Args:
        figure: of `Figure.to_dict`.
        picture: path from the page; None if there is none.
    """
    lines = [f"## {figure['name']}: {figure['title']}", "", figure["shows"], ""]
    if figure["why_not"]:
        return [*lines, f"Not reproduced: {figure['why_not']}", ""]
    if picture is not None:
        lines += [f"![{figure['name']}: {figure['title']}]({picture})", ""]
    if figure["columns"]:
        table = [*_rows(figure["columns"], figure["rows"]), ""]
        is_long = picture is not None and len(figure["rows"]) > MAX_ROWS
        lines += (
            ['<details markdown="1"><summary>All numbers</summary>', "", *table, "</details>", ""] if is_long else table
        )
    lines += [f"**Assumptions.** {figure['decides']}", ""]
    if figure["command"]:
        lines += [f"Command: `{figure['command']}`", ""]
    return lines


def _rows(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Return a table; a list if a cell is too long for one."""
    if any(len(cell) > MAX_CELL for row in rows for cell in row):
        others = columns[1:]
        cells = [
            "; ".join(f"{column} {cell}" for column, cell in zip(others, row[1:], strict=True) if cell) for row in rows
        ]
        return [f"* **{row[0]}**: {text}" for row, text in zip(rows, cells, strict=True)]
    lines = [f"| {' | '.join(columns)} |", f"|{'---|' * len(columns)}"]
    return lines + [f"| {' | '.join(row)} |" for row in rows]


def draw(figure: Mapping[str, Any], path: Path) -> None:
    """Draw the lines of a figure, or bars if x has names.

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
            left_edges = [case + width * (i - (len(figure["lines"]) - 1) / 2) for case, _ in points]
            axis.bar(left_edges, [value for _, value in points], width, label=label)
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
    """Return ``64K`` for 65,536; a number that is no multiple of 1,024 unchanged."""
    return f"{value:g}" if value % 1024 else f"{value / 1024:g}K"
