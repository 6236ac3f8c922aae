"""The command ``python -m benchmarks.lab ring``: its measurements, and its tables with the published figures."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from dataclasses import asdict
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.emulation.cluster import pair
from benchmarks.emulation.emulator import emulate
from benchmarks.lab.ring import PREFILL, PUBLISHED, STEP, STRATEGIES, RingCase, RingPlan, measure, summarize
from benchmarks.measure.contenders import Shape
from benchmarks.measure.ranks import Report
from benchmarks.measure.statistics import within_bound
from ds_hetero.planner.published.hetero_ring import fit_formula
from ds_hetero.planner.published.profile_table import ProfileTable


class RingTable:
    """Two ranks, the second of which is slowed down."""

    help = "two ranks, the second slowed down: even, proportional, look-up table, formula and planned splits"

    def add_options(self, parser: ArgumentParser) -> None:
        """Add the options for fractions and scopes."""
        parser.add_argument("--fractions", type=float, nargs="+", help="of the second rank; 1 is always measured")
        parser.add_argument("--scopes", choices=(PREFILL, STEP), nargs="+", default=[PREFILL, STEP])

    def run(self, options: Namespace, report: Report) -> dict[str, Any]:
        """See `benchmarks.lab.ring`."""
        plan = _plan(options)
        with emulate(pair(1.0)) as emulated:
            measured = emulated.run(measure, plan, on_report=report)[0]
        return {
            "shape": asdict(plan.shape),
            "published": PUBLISHED,
            "rows": summarize(measured["cases"]),
            "emulation": measured["speeds"],
            "profile_table": measured["table"],
            "formula_r_squared": fit_formula(ProfileTable(**measured["table"])).r_squared,
            "cases": measured["cases"],
        }

    def show(self, result: dict[str, Any], console: Console) -> None:
        """Print one table per scope and length."""
        shape = result["shape"]
        console.print(
            f"EMULATED: two ranks of {result['machine']['cpu']}, one kernel thread each; attention of "
            f"{shape['num_heads']} heads of {shape['head_dim']}, causal, float32; {result['seconds']:.0f} s in all"
        )
        for speeds in result["emulation"]:
            console.print(speeds["text"].splitlines()[0])
        cases = list(dict.fromkeys((row["scope"], row["tokens"]) for row in result["rows"]))
        for scope, tokens in cases:
            rows = [row for row in result["rows"] if (row["scope"], row["tokens"]) == (scope, tokens)]
            console.print(_table(scope, tokens, rows))
        console.print(f"Polynomial of the measured table: R^2 {result['formula_r_squared']:.3f} (published 0.922).")
        console.print(
            "Published (two GPUs, MPS, prefill): at 10 % the even split is slower by 5-8x and the proportional one by "
            "about 2x; best speed-up over even 4.4x (64K tokens, 10 %); efficiency 40-50 %."
        )


def _plan(options: Namespace) -> RingPlan:
    """Return the plan of the options."""
    scopes = tuple(options.scopes)
    heads = options.heads or 1
    shape = Shape(num_heads=heads, num_kv_heads=heads, hidden_size=64 * heads, num_layers=1)
    rounds = options.rounds or 3
    if options.tokens or options.fractions:
        fractions = tuple(sorted({1.0, *(options.fractions or (0.1, 0.5))}))
        cases = [RingCase(fractions, tuple(options.tokens or (16384,)), scopes, rounds)]
    elif options.quick:
        cases = [RingCase((0.1, 0.5, 1.0), (16384,), scopes, rounds)]
    else:
        cases = [
            RingCase((0.1, 0.25, 0.5, 0.75, 1.0), (4096, 16384), scopes, rounds),
            RingCase((0.1, 1.0), (65536,), (PREFILL,), 1),  # takes minutes
        ]
    return RingPlan(tuple(cases), shape, 75.0 if options.quick else 600.0)


def _table(scope: str, tokens: int, rows: list[dict[str, Any]]) -> Table:
    """Return the table of one scope and length."""
    what = "prefill (forward)" if scope == PREFILL else "training step (forward and backward)"
    table = Table(title=f"{tokens} tokens, {what}: speed-up over even / of the bound (slowdown against equal ranks)")
    table.add_column("second rank at")
    for name in STRATEGIES:
        table.add_column(name, justify="right")
    table.add_column("bound", justify="right")
    for fraction in sorted({row["slow_fraction"] for row in rows}):
        by_name = {row["strategy"]: row for row in rows if row["slow_fraction"] == fraction}
        cells = [
            within_bound(
                f"{row['speedup']:.2f}x / {row['efficiency_against_bound']:.1%}"
                + (f" ({row['slowdown']:.2f}x)" if row["slowdown"] else ""),
                row["efficiency_against_bound"],
            )
            for row in (by_name[name] for name in STRATEGIES)
        ]
        table.add_row(f"{fraction:.0%}", *cells, f"{by_name['even']['bound_speedup']:.2f}x")
    return table
