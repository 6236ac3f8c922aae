"""The command ``python -m benchmarks.lab experts``: its options, its measurements, and its table."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from dataclasses import asdict
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.emulation.emulator import emulate
from benchmarks.lab.experts import CLUSTER, ExpertsPlan, measure, summarize
from benchmarks.measure.ranks import Report


class ExpertsTable:
    """Two ranks of speeds 3:1."""

    help = "two ranks 3:1: steps of a mixture with experts by speed, against experts in equal numbers"

    def add_options(self, parser: ArgumentParser) -> None:
        """Add the number of layers."""
        parser.add_argument("--layers", type=int, default=2, help="of the model")

    def run(self, options: Namespace, report: Report) -> dict[str, Any]:
        """See `benchmarks.lab.experts`."""
        plan = ExpertsPlan(
            num_heads=options.heads or 8,
            num_layers=options.layers,
            tokens=tuple(options.tokens or (1024,)),
            rounds=options.rounds or (3 if options.quick else 9),
            budget_s=120 if options.quick else 600,
        )
        with emulate(CLUSTER) as emulated:
            measured = emulated.run(measure, plan, on_report=report)[0]
        return {
            "plan": asdict(plan),
            "rows": summarize(measured["cases"]),
            "emulation": measured["speeds"],
            "cases": measured["cases"],
        }

    def show(self, result: dict[str, Any], console: Console) -> None:
        """Print the steps of both with their predictions, and the speedup."""
        plan = result["plan"]
        console.print(
            f"EMULATED: two ranks of {result['machine']['cpu']}, speeds 3:1; Mixtral of {plan['num_layers']} layers "
            f"with 8 experts, hidden size {64 * plan['num_heads']}, float32; {result['seconds']:.0f} s in all"
        )
        table = Table(
            "tokens", "equal experts", "predicted", "by speed", "predicted", "speedup", "pairs", "others' cores"
        )
        for row in result["rows"]:
            table.add_row(
                f"{row['tokens']:,}",
                f"{row['equal_s']:.2f} s",
                f"{row['predicted_equal_s']:.2f} s ({100 * row['error_equal']:+.0f} %)",
                f"{row['by_speed_s']:.2f} s",
                f"{row['predicted_by_speed_s']:.2f} s ({100 * row['error_by_speed']:+.0f} %)",
                f"{row['speedup']:.2f}",
                str(row["pairs"]),
                f"{row['foreign_cores']:.1f}",
            )
        console.print(table)
