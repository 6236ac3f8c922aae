"""Tables of the results of `benchmarks.documents.run`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.documents.contenders import ALONE, AT_ONCE, DOCUMENTS, STREAM
from benchmarks.documents.wire import LINK_KINDS
from benchmarks.measure.statistics import within_bound

REPLAN = "replan"  # the scope in which a rank loses speed
SLOWED_RANK, SLOWED_TO, STEPS_BEFORE = 1, 0.6, 5


def summarize(results: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return one row per contender and case."""
    rows = []
    for case in results:
        if case["scope"] == REPLAN:
            continue
        cores, medians = case["measured_speeds"], {name: median(s) for name, s in case["seconds"].items()}
        bound_s = medians[ALONE] * cores[0] / sum(cores) if ALONE in medians else None
        at_once = case["seconds"].get(AT_ONCE)
        for name, seconds in case["seconds"].items():
            if name in (ALONE, AT_ONCE):
                continue
            paired = [a / b for a, b in zip(case["seconds"][STREAM], seconds, strict=True)]
            rows.append(
                {
                    **{key: case[key] for key in ("scope", "speeds", "distribution")},
                    "contender": name,
                    "seconds": medians[name],
                    "of_bound": bound_s and bound_s / medians[name],
                    "of_bound_at_once": at_once and median(a / b for a, b in zip(at_once, seconds, strict=True)),
                    "over_stream": median(paired),
                    "predicted": case["predicted_over_stream"] if name == DOCUMENTS else None,
                    "stays_stream": name == DOCUMENTS and case["stays_stream"],
                    "rounds": len(paired),
                    "foreign_cores": case["foreign_cores"],
                }
            )
    return rows


def show(result: Mapping[str, Any], console: Console) -> None:
    """Print the tables."""
    console.print(
        f"EMULATED: two nodes of two ranks; {result['tokens']} tokens, lengths divided by {result['shrink']}, fp32, "
        f"causal, {result['seconds']:.0f} s in all"
    )
    table = Table(title="packed batches")
    for column in (
        "scope",
        "speeds",
        "lengths",
        "contender",
        "s",
        "of the bound",
        "at once",
        "over stream",
        "predicted",
        "rounds",
        "foreign",
    ):
        table.add_column(column, justify="left" if column in ("scope", "speeds", "lengths", "contender") else "right")
    for row in result["rows"]:
        table.add_row(
            *(row[key] for key in ("scope", "speeds", "distribution", "contender")),
            f"{row['seconds']:.3f}",
            within_bound(f"{row['of_bound']:.1%}", row["of_bound"]) if row["of_bound"] else "",
            f"{row['of_bound_at_once']:.1%}" if row["of_bound_at_once"] else "",
            f"{row['over_stream']:.2f}x",
            f"{row['predicted']:.2f}x{', stays a stream' if row['stays_stream'] else ''}" if row["predicted"] else "",
            str(row["rounds"]),
            f"{row['foreign_cores']:.2f}",
        )
    console.print(table)
    for case in result["cases"]:
        if case["scope"] == REPLAN:
            shares = " ".join(f"{share:.0%}" for share in case["of_bound"])
            console.print(
                f"rank {SLOWED_RANK} at {SLOWED_TO:.0%} of its speed after {STEPS_BEFORE} steps; of the bound: {shares}"
            )
    if not any(case.get("bytes") for case in result["cases"]):
        return
    wire = Table(title="bytes sent, forward and backward of one layer: counted / planned")
    for column in ("speeds", "lengths", "contender", "inside nodes", "between nodes"):
        wire.add_column(column)
    for case in result["cases"]:
        for name, both in case.get("bytes", {}).items():
            cells = [f"{both['counted'][kind]:,} / {both['planned'][kind]:,.0f}" for kind in LINK_KINDS]
            wire.add_row(case["speeds"], case["distribution"], name, *cells)
    console.print(wire)
