"""The command ``python -m benchmarks.lab mesh``: its measurements and its tables."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from dataclasses import asdict, replace
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.emulation.cluster import EmulatedCluster, EmulatedNode
from benchmarks.emulation.emulator import emulate
from benchmarks.emulation.throttle import METHODS
from benchmarks.lab.mesh import CONTENDERS, LAYER, STEP, MeshCase, MeshPlan, measure, summarize
from benchmarks.measure.models import FAMILIES, shape_of
from benchmarks.measure.ranks import Report
from benchmarks.measure.statistics import within_bound

LINK_BIT_PER_S, LINK_DELAY_S = 1e9, 50e-6
HYBRID = ("ring", "proportional", "plan")  # stock and torch's ring do not know layers that carry a state
QUICK = ("stock", "ring", "usp 2x2", "proportional", "plan")
UNEQUAL, EQUAL = (4.0, 3.0, 2.0, 1.0), (1.0, 1.0, 1.0, 1.0)
MESH = EmulatedCluster(
    nodes=tuple(
        EmulatedNode(speeds=speeds, link_bit_per_s=LINK_BIT_PER_S, link_delay_s=LINK_DELAY_S)
        for speeds in (UNEQUAL[:2], UNEQUAL[2:])
    )
)


class MeshTable:
    """Two nodes of two ranks."""

    help = "four ranks in two unequal nodes with a slow link: stock, torch's ring, uniform and uneven schedules"

    def add_options(self, parser: ArgumentParser) -> None:
        """Add the options for contenders, scopes and speeds."""
        parser.add_argument("--contenders", choices=CONTENDERS, nargs="+", help=f"with --quick {' '.join(QUICK)}")
        parser.add_argument("--scopes", choices=(LAYER, STEP), nargs="+", default=[LAYER, STEP])
        parser.add_argument("--speeds", choices=("unequal", "equal"), nargs="+", help="with --quick unequal")
        parser.add_argument("--methods", nargs="+", choices=METHODS, default=METHODS, help="of slowing down, in order")
        parser.add_argument("--layers", type=int, help="of the model whose steps are measured; 1, of hybrids 4")
        parser.add_argument("--family", choices=FAMILIES, default="llama", help="of the model; hybrids have steps only")

    def run(self, options: Namespace, report: Report) -> dict[str, Any]:
        """See `benchmarks.lab.mesh`."""
        plan = _plan(options)
        with emulate(MESH, speed_methods=options.methods) as emulated:
            measured = emulated.run(measure, plan, on_report=report)[0]
            carried = emulated.network.carried()
        return {
            "shape": asdict(plan.shape),
            "rows": summarize(measured["cases"]),
            "emulation": measured["emulation"],
            "relay": carried,
            "cases": measured["cases"],
        }

    def show(self, result: dict[str, Any], console: Console) -> None:
        """Print one table per scope and speeds."""
        shape = result["shape"]
        console.print(
            f"EMULATED: two nodes of two ranks of {result['machine']['cpu']}, one kernel thread each; "
            f"{shape['num_heads']} heads of {shape['head_dim']}, {shape['num_kv_heads']} KV heads, causal, float32; "
            f"steps: {shape['family']}, {shape['num_layers']} layer(s), hidden size {shape['hidden_size']}, ZeRO 1; "
            f"{result['seconds']:.0f} s in all"
        )
        for emulation in result["emulation"]:
            console.print(emulation["text"])
        for scope, speeds in dict.fromkeys((row["scope"], tuple(row["speeds"])) for row in result["rows"]):
            rows = [row for row in result["rows"] if (row["scope"], tuple(row["speeds"])) == (scope, speeds)]
            console.print(_table(scope, speeds, rows))


def _plan(options: Namespace) -> MeshPlan:
    """Return the plan of the options."""
    tokens = options.tokens or ([8192] if options.quick else [8192, 16384])
    heads = options.heads or 8
    is_hybrid = options.family != "llama"
    layers = options.layers or (4 if is_hybrid else 1)
    shape = replace(shape_of(options.family), num_heads=heads, num_kv_heads=heads // 2, num_layers=layers)
    chosen = {"unequal": UNEQUAL, "equal": EQUAL}
    contenders = tuple(options.contenders or (HYBRID if is_hybrid else QUICK if options.quick else CONTENDERS))
    cases = [
        MeshCase(chosen[speeds], scope, length, contenders)
        for scope in ([STEP] if is_hybrid else options.scopes)
        for speeds in options.speeds or (["unequal"] if options.quick else list(chosen))
        for length in (tokens if speeds == "unequal" else tokens[:1])
    ]
    return MeshPlan(
        tuple(cases), shape, options.rounds or (3 if options.quick else 5), 90.0 if options.quick else 200.0
    )


def _table(scope: str, speeds: tuple[float, ...], rows: list[dict[str, Any]]) -> Table:
    """Return the table of one scope and speeds."""
    bound = sum(speeds) / (len(speeds) * min(speeds))
    text = ":".join(f"{speed:g}" for speed in speeds)
    table = Table(title=f"{scope}, speeds {text}: at most {bound:.2f}x over uniform")
    table.add_column("contender")
    for column in ("tokens", "s", "tokens/s", "over best uniform", "of the bound", "rounds", "spread"):
        table.add_column(column, justify="right")
    for row in rows:
        share = row["efficiency_against_bound"]
        best = " (best uniform)" if row["contender"] == row["best_uniform"] else ""
        table.add_row(
            row["contender"] + best,
            *(str(row["tokens"]), f"{row['seconds']:.2f}", f"{row['tokens_per_s']:,.0f}"),
            within_bound(f"{row['over_best_uniform']:.2f}x", row["over_best_uniform"] / bound),
            within_bound(f"{share:.1%}", share),
            *(str(row["rounds"]), f"{row['spread']:.0%}"),
        )
    return table
