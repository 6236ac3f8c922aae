"""The command ``python -m benchmarks.lab growth``: its measurements and its table."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from dataclasses import asdict
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.emulation.emulator import emulate
from benchmarks.lab.growth import GrowthPlan, grown, measure, summarize
from benchmarks.measure.contenders import Shape
from benchmarks.measure.ranks import Report


class GrowthTable:
    """Two nodes of one to three ranks."""

    help = "step time and bytes on the wire against ranks and tokens, uniform and planned"

    def add_options(self, parser: ArgumentParser) -> None:
        """Add the option for numbers of ranks."""
        parser.add_argument("--ranks", type=int, nargs="+", help="default: 2 4 6; with --quick 2 4")

    def run(self, options: Namespace, report: Report) -> dict[str, Any]:
        """See `benchmarks.lab.growth`."""
        counts = options.ranks or ([2, 4] if options.quick else [2, 4, 6])
        tokens = options.tokens or ([2048, 4096] if options.quick else [2048, 4096, 8192])
        heads = options.heads or 8
        shape = Shape(num_heads=heads, num_kv_heads=heads // 2, num_layers=1)
        plan = GrowthPlan(tuple(sorted(tokens)), shape, options.rounds or 3, 30.0 if options.quick else 90.0)
        rows: list[dict[str, Any]] = []
        emulation: list[dict[str, Any]] = []
        for done, count in enumerate(counts):
            with emulate(grown(count)) as emulated:
                views = emulated.run(
                    measure, plan, on_report=lambda share, now, done=done: report((done + share) / len(counts), now)
                )
            rows += summarize(views)
            emulation.append({key: value for key, value in views[0].items() if key != "cases"})
        return {"shape": asdict(shape), "rows": rows, "emulation": emulation}

    def show(self, result: dict[str, Any], console: Console) -> None:
        """Print one table."""
        for emulation in result["emulation"]:
            console.print(f"EMULATED, {len(emulation['speeds'])} ranks: {emulation['text']}")
        table = Table(title="one attention layer, forward and backward; two nodes, speeds n : n - 1 : ... : 1")
        table.add_column("contender")
        for column in (
            "ranks",
            "tokens",
            "s",
            "tokens/s",
            "sent, bytes per token",
            "between nodes",
            "rounds",
            "spread",
        ):
            table.add_column(column, justify="right")
        for row in sorted(result["rows"], key=lambda row: (row["ranks"], row["tokens"])):
            table.add_row(
                *(row["contender"], str(row["ranks"]), str(row["tokens"])),
                *(f"{row['seconds']:.2f}", f"{row['tokens_per_s']:,.0f}"),
                *(f"{row['payload_bytes_per_token']:,.0f}", f"{row['between_nodes_bytes_per_token']:,.0f}"),
                *(str(row["rounds"]), f"{row['spread']:.0%}"),
            )
        console.print(table)
