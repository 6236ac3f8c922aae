"""The command ``python -m benchmarks.lab replan``: its measurement and its tables."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from dataclasses import asdict
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.emulation.cluster import pair
from benchmarks.emulation.emulator import emulate
from benchmarks.lab.replan import RECOVERED, SLOWED_TO, ReplanPlan, measure, summarize
from benchmarks.measure.contenders import Shape
from benchmarks.measure.ranks import Report


class ReplanTable:
    """Two ranks, one of which becomes slow."""

    help = "a rank slows down in the middle of a run: recovery in steps, and the cost of watching"

    def add_options(self, parser: ArgumentParser) -> None:
        """Add the options for keys of the section."""
        parser.add_argument("--interval-steps", type=int, default=5)
        parser.add_argument("--min-gain", type=float, default=0.05)

    def run(self, options: Namespace, report: Report) -> dict[str, Any]:
        """See `benchmarks.lab.replan`."""
        heads = options.heads or 8
        plan = ReplanPlan(
            tokens=(options.tokens or [4096])[0],
            shape=Shape(num_heads=heads, num_kv_heads=heads // 2, num_layers=1),
            calm_steps=options.rounds or (30 if options.quick else 100),
            before=10,
            after=35,
            interval_steps=options.interval_steps,
            min_gain=options.min_gain,
        )
        with emulate(pair(1.0)) as emulated:
            measured = emulated.run(measure, plan, on_report=report)[0]
        rows, summary = summarize(measured, plan.tokens)
        return {"plan": asdict(plan), "rows": rows, "summary": summary, "found": measured}

    def show(self, result: dict[str, Any], console: Console) -> None:
        """Print the steps, then the results."""
        console.print(f"EMULATED: {result['found']['text']}")
        table = Table(title=f"the second rank runs at {SLOWED_TO:.0%} from step 0 on")
        for column in ("steps", "tokens/s", "of the optimum"):
            table.add_column(column, justify="right")
        for first in range(0, len(result["rows"]), 5):
            rows = result["rows"][first : first + 5]
            rate = sum(row["tokens_per_s"] for row in rows) / len(rows)
            shares = [row["of_optimum"] for row in rows if row["of_optimum"] is not None]
            share = f"{sum(shares) / len(shares):.0%}" if shares else ""
            table.add_row(f"{rows[0]['step']} to {rows[-1]['step']}", f"{rate:,.0f}", share)
        console.print(table)
        summary = result["summary"]
        console.print(
            f"switched at steps {summary['switched_at']}; at {RECOVERED:.0%} of the optimum after "
            f"{summary['recovered_after_steps']} steps, at the end at {summary['of_optimum_at_end']:.1%}, "
            f"{summary['gain_over_fixed']:.2f}x over no change\n"
            f"undisturbed, {summary['undisturbed_steps']} steps: {summary['undisturbed_switches']} switches, "
            f"cost {summary['undisturbed_cost']:+.2%} of a step"
        )
