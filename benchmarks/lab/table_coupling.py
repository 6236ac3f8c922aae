"""The command ``python -m benchmarks.lab coupling``: its options, its measurements, and its table."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.emulation.emulator import emulate
from benchmarks.lab.coupling import CouplingPlan, measure, new_folder, summarize
from benchmarks.measure.ranks import Report

RINGS = ((4, 4, 1, 1), (8, 4, 2, 1))


class CouplingTable:
    """Rings of four ranks whose tokens are 4:4:1:1 and 8:4:2:1, as their speeds are."""

    help = "rings of 4:4:1:1 and 8:4:2:1 under NCCL's rules: one communicator against one by colour, and the recurrence"

    def add_options(self, parser: ArgumentParser) -> None:
        """Add nothing."""

    def run(self, options: Namespace, report: Report) -> dict[str, Any]:
        """See `benchmarks.lab.coupling`."""
        cases = []
        for number, shares in enumerate(RINGS):
            plan = CouplingPlan(
                shares=shares,
                num_heads=options.heads or (1 if options.quick else 2),
                tokens=options.tokens[0] if options.tokens else 16384,
                rounds=options.rounds or (3 if options.quick else 5),
                budget_s=60 if options.quick else 240,
            )

            def of_ring(done: float, now: str, number: int = number, shares: tuple[int, ...] = shares) -> None:
                report((number + done) / len(RINGS), f"{':'.join(map(str, shares))}: {now}")

            with emulate(plan.cluster) as emulated, new_folder() as folder:
                cases.append(emulated.run(measure, plan, folder, on_report=of_ring)[0])
        return {"heads": plan.num_heads, "rows": summarize(cases), "cases": cases}

    def show(self, result: dict[str, Any], console: Console) -> None:
        """Print measured times beside the recurrence."""
        console.print(
            f"EMULATED: four ranks of {result['machine']['cpu']} under NCCL's rules; attention of {result['heads']} "
            f"head(s) of 64, full, float32; {result['seconds']:.0f} s in all"
        )
        table = Table(
            "ring", "pass", "alone", "coupled", "recurrence", "coloured", "recurrence", "loss gone", "best order"
        )
        for row in result["rows"]:
            table.add_row(
                ":".join(map(str, row["shares"])),
                row["pass"],
                f"{row['alone_s']:.2f} s",
                *(
                    text
                    for way in ("coupled", "coloured")
                    for text in (
                        f"{row[f'{way}_s']:.2f} s",
                        f"{row[f'{way}_recurrence_s']:.2f} s ({row[f'{way}_recurrence_s'] / row[f'{way}_s'] - 1:+.1%})",
                    )
                ),
                f"{row['loss_gone']:.0%}",
                f"{':'.join(map(str, row['best_order']))}, {row['best_order_recurrence_s']:.2f} s",
            )
        console.print(table)
        console.print("Best order: of one communicator, by the recurrence.")
