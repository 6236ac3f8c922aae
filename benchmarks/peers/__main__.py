"""Compare public planners with ours on the same clusters and models, judged by our cost model with all samples counted.

    python -m benchmarks.peers --flashflex DIR --metis DIR --sailor DIR [--python PY] [--only CASE ...] [--json]

DIR is a checkout of the planner; nothing is downloaded. ``--python`` is an interpreter with the packages that they
need: numpy for FlashFlex, Metis and AMP (which is in Sailor's checkout), pymetis for FlashFlex, torch for AMP, Sailor's
own library. The exit code is 1 if a peer's plan is faster than ours. With ``--only``, rows of other cases stay in the
result file.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.measure.results import FOLDER, header, write
from benchmarks.peers import amp, flashflex, metis, sailor
from benchmarks.peers.judge import Case, NoPlan, best_that_fits, our_s, row_text
from benchmarks.reproduce.tangram import nodes_of
from ds_hetero.cluster.files import load_cluster
from ds_hetero.models import load_model
from ds_hetero.values.plans import Plan

PEERS: dict[str, tuple[str, Callable[[Path, str, Case, float], Iterable[Plan]]]] = {
    "flashflex": ("flashflex", flashflex.plans),
    "metis": ("metis", metis.plans),
    "sailor": ("sailor", sailor.plans),
    "amp": ("sailor", amp.plans),
}
"""By name: whose checkout a planner is in, and it: plans for a case, best first by its own cost."""


def cases() -> list[Case]:
    """Return clusters of the papers, and small ones on which every peer ends."""
    seven, thirteen = load_model("llama-2-7b"), load_model("llama-2-13b")
    return [
        Case("case study, 13B", load_cluster("hexiscale-case-study"), thirteen, 24),
        Case("setting 1, 7B", load_cluster("hexiscale-setting-1"), seven, 120),
        Case("setting 2, 7B", load_cluster("hexiscale-setting-2"), seven, 120),
        Case("setting 2, 13B", load_cluster("hexiscale-setting-2"), thirteen, 120),
        Case("setting 3, 30B", load_cluster("hexiscale-setting-3"), load_model("llama-30b"), 120),
        Case(
            "2 A100 + 2 V100 nodes of 4, 7B",
            nodes_of(("A100-SXM-40GB", 4, 2), ("V100-SXM-32GB", 4, 2), network=10),
            seven,
            64,
        ),
        Case("4 A800 + 4 4090, 7B", nodes_of(("A800-SXM-80GB", 4, 1), ("RTX-4090", 4, 1), network=3), seven, 64),
        Case("8 A800 + 8 4090, 13B", nodes_of(("A800-SXM-80GB", 8, 1), ("RTX-4090", 8, 1), network=3), thirteen, 64),
    ]


def compare(options: argparse.Namespace, case: Case) -> list[dict[str, Any]]:
    """Return our plan and every peer's for one case."""
    started = time.perf_counter()
    ours = our_s(case)
    rows: list[dict[str, Any]] = [
        {
            "case": case.name,
            "planner": "ours",
            "step_s": ours,
            "over_ours": 1.0,
            "took_s": time.perf_counter() - started,
        }
    ]
    for name, (owner, planner) in PEERS.items():
        checkout = getattr(options, owner)
        if checkout is None:
            continue
        started = time.perf_counter()
        row: dict[str, Any] = {"case": case.name, "planner": name}
        try:
            rank, step_s = best_that_fits(case, planner(checkout.resolve(), options.python, case, options.timeout_s))
            row |= {"step_s": step_s, "over_ours": step_s / ours, "its_rank": rank}
        except NoPlan as reason:
            row["reason"] = str(reason)
        rows.append({**row, "took_s": time.perf_counter() - started})
    return rows


def show(rows: Sequence[dict[str, Any]], console: Console) -> None:
    """Print one line per case with a column per planner, and the loss of each planner."""
    planners = list(dict.fromkeys(row["planner"] for row in rows))
    table = Table("case", *planners, title="Step under our cost model (over ours)")
    for case in dict.fromkeys(row["case"] for row in rows):
        cells = {row["planner"]: row_text(row) for row in rows if row["case"] == case}
        table.add_row(case, *(cells.get(planner, "") for planner in planners))
    console.print(table)
    for planner in planners[1:]:
        gains = [row["over_ours"] for row in rows if row["planner"] == planner and "over_ours" in row]
        if gains:
            console.print(
                f"{planner}: {len(gains)} plans; ours {min(gains):.2f} x as fast at least, {median(gains):.2f} x in "
                f"the median, {max(gains):.2f} x at most"
            )


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; return 0 if no peer is faster."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in dict.fromkeys(owner for owner, _ in PEERS.values()):
        parser.add_argument(f"--{name}", type=Path, help="its checkout")
    parser.add_argument("--python", default=sys.executable, help="interpreter that has what they need")
    parser.add_argument("--timeout-s", type=float, default=600, help="of one run of a peer")
    parser.add_argument("--only", nargs="+", help="cases whose names begin like this")
    parser.add_argument("--json", action="store_true", help="print the result as JSON instead of a table")
    parser.add_argument("--output", type=Path, default=FOLDER / "peers.json")
    options = parser.parse_args(arguments)
    selected_cases = [case for case in cases() if not options.only or case.name.startswith(tuple(options.only))]
    rows = []
    for case in selected_cases:
        rows += compare(options, case)
        print(
            f"{case.name}: " + "; ".join(f"{r['planner']} {row_text(r)}" for r in rows if r["case"] == case.name),
            file=sys.stderr,
            flush=True,
        )
    selected_names = {case.name for case in selected_cases}
    former_rows = json.loads(options.output.read_text())["rows"] if options.only and options.output.exists() else []
    rows = [row for row in former_rows if row["case"] not in selected_names] + rows
    outcome = {**header(" ".join(["python -m benchmarks.peers", *(arguments or sys.argv[1:])])), "rows": rows}
    write(outcome, options.output)
    if options.json:
        print(json.dumps(outcome))
    else:
        show(rows, Console(width=None if sys.stdout.isatty() else 170))
    return 1 if any(row.get("over_ours", 1.0) < 1 - 1e-9 for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
