"""The command ``python -m benchmarks.lab kept``: its options, its measurements, and its table."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from dataclasses import asdict
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.emulation.emulator import emulate
from benchmarks.lab.kept import CLUSTER, KeptPlan, measure, summarize
from benchmarks.measure.ranks import Report


class KeptTable:
    """Four ranks of speeds 4:3:2:1."""

    help = "four ranks 4:3:2:1: steps with attention kept over recomputation, against steps that compute it again"

    def add_options(self, parser: ArgumentParser) -> None:
        """Add the number of layers."""
        parser.add_argument("--layers", type=int, default=2, help="of the model")

    def run(self, options: Namespace, report: Report) -> dict[str, Any]:
        """See `benchmarks.lab.kept`."""
        plan = KeptPlan(
            num_heads=options.heads or 2,
            num_layers=options.layers,
            tokens=tuple(options.tokens or (8192,)),
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
        """Print the steps of both, and the time that is saved."""
        plan = result["plan"]
        console.print(
            f"EMULATED: four ranks of {result['machine']['cpu']}, speeds 4:3:2:1; Llama of {plan['num_layers']} layers "
            f"with {plan['num_heads']} heads of 64, checkpointed, float32; {result['seconds']:.0f} s in all"
        )
        table = Table("schedule", "tokens", "computed again", "kept", "less time", "pairs", "cores of others")
        for row in result["rows"]:
            table.add_row(
                row["schedule"],
                f"{row['tokens']:,}",
                f"{row['recomputed_s']:.2f} s",
                f"{row['kept_s']:.2f} s",
                f"{row['less_time']:.1%}",
                str(row["pairs"]),
                f"{row['foreign_cores']:.1f}",
            )
        console.print(table)
