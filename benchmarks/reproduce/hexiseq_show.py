"""Print the tables of `benchmarks.reproduce.hexiseq`: published figures beside ours."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import product
from statistics import mean
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.reproduce import hexiseq_paper as paper


def summary(cells: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Return mean, best and least gain, and closeness to the bound."""
    gains = [cell["gain"] for cell in cells]
    return {
        "mean": mean(gains),
        "best": max(gains),
        "least": min(gains),
        "most_possible": max(cell["possible_gain"] for cell in cells),
        "of_bound_least": min(cell["of_bound"] for cell in cells),
        "of_bound_mean": mean(cell["of_bound"] for cell in cells),
    }


def show(outcome: dict[str, Any], console: Console) -> None:
    """Print the tables."""
    for section, print_it in _TABLES.items():
        if section in outcome:
            for table in print_it(outcome[section]):
                console.print(table)
    if "assumptions" in outcome:
        open_table = Table("the paper leaves open", "taken here unless said otherwise")
        for question in paper.OPEN_QUESTIONS:
            open_table.add_row(*question)
        console.print(open_table)
    for failure in outcome["failures"]:
        console.print(f"[red]NOT MET[/]: {failure}")
    if not outcome["failures"]:
        console.print("[green]All targets met.[/]")


def _simulation_tables(cells: Sequence[dict[str, Any]]) -> Iterator[Table]:
    """Yield the tables of simulations."""
    contexts = sorted({cell["context"] for cell in cells})
    table = Table(
        title="Simulations 1-3, datasheet peaks, 200 GB/s per pair: gain over the strongest baseline (of the bound)"
    )
    table.add_column("panel")
    for context in contexts:
        table.add_column(f"{context // 1024}K", justify="right")
    for simulation, model in product(paper.SIMULATIONS, paper.MODELS):
        row = [cell for cell in cells if (cell["simulation"], cell["model"]) == (simulation, model)]
        texts = [f"{cell['gain']:.3f} ({cell['of_bound']:.1%}) {cell['strongest']}" for cell in row]
        table.add_row(f"{simulation} {model}", *texts)
    yield table
    total = summary(cells)
    result = Table("", "published", "ours", title="Gain over the strongest baseline, six panels")
    result.add_row("mean", f"{paper.GAIN_MEAN:.2f}", f"{total['mean']:.3f}")
    result.add_row("best", f"{paper.GAIN_BEST:.2f}", f"{total['best']:.3f} (possible: {total['most_possible']:.3f})")
    result.add_row("least", "> 1", f"{total['least']:.3f}")
    result.add_row("of the bound, least", "", f"{total['of_bound_least']:.1%}")
    yield result


def _assumption_tables(rows: Sequence[dict[str, Any]]) -> Iterator[Table]:
    """Yield the table of assumptions."""
    headings = ("assumption", "mean", "best", "least", "possible", "of the bound")
    table = Table(*headings, title="How much the assumptions matter")
    table.add_row("[bold]published[/]", f"{paper.GAIN_MEAN:.2f}", f"{paper.GAIN_BEST:.2f}")
    for row in rows:
        gains = [f"{row[key]:.3f}" for key in ("mean", "best", "least", "most_possible")]
        bound = f"{row['of_bound_least']:.1%} - {row['of_bound_mean']:.1%}"
        table.add_row(row["assumptions"]["name"], *gains, bound)
    yield table


def _equal_flops_tables(rows: Sequence[dict[str, Any]]) -> Iterator[Table]:
    table = Table(
        title="Equal FLOPs: our plan on the mixed cluster against the homogeneous one (published: within about 0.5 %)"
    )
    for heading in (
        "pair",
        "assumption",
        "FLOPs",
        "best legal baseline",
        "ours against it",
        "against Ulysses, fractional",
    ):
        table.add_column(heading)
    for row in rows:
        ratio = row["throughput_ratio"] - 1
        fractional = row["fractional_ulysses_s"] / row["ours_s"] - 1
        cells = f"{row['flops_ratio']:.3f}", row["strongest"], f"{ratio:+.2%}", f"{fractional:+.2%}"
        table.add_row(row["pair"], row["assumptions"], *cells)
    yield table


def _table_3_tables(results: Sequence[dict[str, Any]]) -> Iterator[Table]:
    """Yield the tables of table 3."""
    table = Table(title="Table 3, thousands of tokens per second: ours with datasheet numbers, and fitted")
    for heading in ("method", "model", "setting", "context", "measured", "simulated"):
        table.add_column(heading)
    for result in results:
        fit = f"{result['share']:.0%} of peak, {result['gb_per_s']:g} GB/s, off by {result['rms_log_error']:.0%}"
        table.add_column(f"{result['assumptions']}; {fit}")
    for rows in zip(*(result["rows"] for result in results), strict=True):
        row = rows[0]
        names = row["method"], row["model"], str(row["setting"]), f"{row['context'] // 1024}K"
        ours = [f"{cell['datasheet']:.1f}, {cell['fitted']:.1f}" for cell in rows]
        table.add_row(*names, f"{row['measured']:.1f}", f"{row['simulated']:.1f}", *ours)
    yield table


_TABLES: dict[str, Callable[[Any], Iterator[Table]]] = {
    "simulations": _simulation_tables,
    "assumptions": _assumption_tables,
    "equal_flops": _equal_flops_tables,
    "table_3": _table_3_tables,
}
