"""Rebuild Tangram's figures (a review of arXiv:2606.16907).

    python -m benchmarks.reproduce.tangram [--only example pruning composition homogeneous mixed] [--json]

    example       70B on 64 H100 and 128 A100: layers of either island ("about 48 / 32" of 80 printed, balanced 49 / 31)
    pruning       calls of the inner parallelizer without and with each of the four rules (26 x fewer printed), the plan
                  with each, and the calls of a bisection, which are enough if latency grows with layers
    composition   Algorithm 2 against the exact composition on random pipelines whose time is not linear in layers
    homogeneous   equal devices: Tangram, ours and the best uniform grid ("equal to the best homogeneous planner")
    mixed         unequal devices: gains over the best uniform grid

Nothing is measured: everything follows from the cost model and the searches. The exit code is 1 if a target is missed.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise
from math import inf
from pathlib import Path
from statistics import geometric_mean
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.measure.results import FOLDER, header, write
from ds_hetero.cluster.files import cluster_from_dict, load_cluster
from ds_hetero.cluster.topology import Cluster
from ds_hetero.cost.stages.calibrated import CalibratedStageCosts
from ds_hetero.cost.stages.stage import StageCosts
from ds_hetero.cost.workload import Workload
from ds_hetero.errors import PlanError
from ds_hetero.models import load_model
from ds_hetero.planner.pipelines.baselines import best_grid
from ds_hetero.planner.pipelines.planning import plan_pipelines
from ds_hetero.planner.published.tangram import TangramVariant, plan_tangram
from ds_hetero.planner.published.tangram.composition import compose, compose_exactly, cycle_s
from ds_hetero.planner.published.tangram.questions import Rules

WORK = Workload(seq_len=4096)
LAYERS, BATCH = 80, 192
PRINTED_SAVING = 26  # calls without rules over calls with all four
SIZES = (1, 2)

RULES = {
    "none": Rules(equal_lengths=False, balanced=False, memory=False, interface=False),
    "1 equal lengths": Rules(balanced=False, memory=False, interface=False),
    "1-2 balance": Rules(memory=False, interface=False),
    "1-3 memory": Rules(interface=False),
    "1-4 interface": Rules(),
}


def example_cluster() -> Cluster:
    """Return 64 H100 and 128 A100 in nodes of 8 over 128 Gb/s."""
    nodes = [
        {"name": "h100", "device": "H100-SXM-80GB", "count": 8, "repeat": 8},
        {"name": "a100", "device": "A100-SXM-80GB", "count": 8, "repeat": 16},
    ]
    return cluster_from_dict({"nodes": nodes, "network": {"bandwidth_gb_per_s": 16, "latency_us": 10}})


def example() -> dict[str, Any]:
    """Return the balanced layers, and those of Tangram and its exact composition."""
    costs = CalibratedStageCosts(example_cluster(), load_model("llama-3.1-70b"), WORK)
    kinds = [kind.device.peak_flops_per_s for kind in costs.pools.kinds]
    share = LAYERS * 64 * kinds[0] / (64 * kinds[0] + 128 * kinds[1])
    row: dict[str, Any] = {"balanced": [share, LAYERS - share], "printed": [48, 32]}
    for name, exact in (("algorithm_2", False), ("exact", True)):
        plan = plan_tangram(costs, costs.time_objective(), BATCH, SIZES, variant=TangramVariant(exact=exact))
        assert plan is not None
        by_kind = {island.pools[0].kind: layers for island, layers in zip(plan.islands, plan.layers, strict=True)}
        lanes = [len(shape.blocks) for shape in plan.candidate.shapes]
        row[name] = {
            "layers": [by_kind[0], by_kind[1]],
            "first": costs.pools.kinds[plan.islands[0].pools[0].kind].device.name,
            "step_s": plan.candidate.step_s,
            "lanes": len(lanes),
            "stages": lanes[0],
            "calls": plan.calls,
        }
    return row


def pruning() -> dict[str, Any]:
    """Return calls and plans under more and more rules; the order H100 before A100 and its reverse are both tried."""
    costs = CalibratedStageCosts(example_cluster(), load_model("llama-3.1-70b"), WORK)
    rows = []
    for name, rules in RULES.items():
        plan = plan_tangram(costs, costs.time_objective(), BATCH, SIZES, rules=rules)
        assert plan is not None
        rows.append({"rules": name, "calls": plan.calls, "step_s": plan.candidate.step_s, "layers": list(plan.layers)})
    return {"rules": rows, "by_bisection": bisection(costs)}


def bisection(costs: StageCosts) -> dict[str, int]:
    """Return the calls to find the crossing of two islands' latencies; one grows with layers while the other falls.

    The time of an island is its layers over its speed, plus the head if the island holds it; so every call is one slice
    on one island.
    """
    speed = (64 * costs.pools.kinds[0].device.peak_flops_per_s, 128 * costs.pools.kinds[1].device.peak_flops_per_s)
    head = costs.model.vocab_size * costs.model.hidden_size / costs.model.layer_parameters
    calls = {}
    for name, extra in (("head_uncounted", (0.0, 0.0)), ("head_on_h100", (head, 0.0)), ("head_on_a100", (0.0, head))):
        asked: dict[tuple[int, int], float] = {}

        def latency(layers: int, island: int, extra: Sequence[float] = extra, asked: Any = asked) -> float:
            return asked.setdefault((layers, island), (layers + extra[island]) / speed[island])

        low, high = 1, LAYERS - 1
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if latency(middle, 0) < latency(LAYERS - middle, 1) else (low, middle)
        best = min((low, high), key=lambda layers: max(latency(layers, 0), latency(LAYERS - layers, 1)))
        calls[name] = {"layers_on_h100": best, "calls": len(asked)}
    return calls


def composition(count: int = 200) -> dict[str, Any]:
    """Return how often and by how much Algorithm 2 misses the best composition."""
    rng, gaps = random.Random(1), []
    while len(gaps) < count:
        islands, layers = rng.randint(3, 5), rng.randint(12, 24)
        tables = []
        for _ in range(islands):
            fixed, each, bend = rng.uniform(0, 2), rng.uniform(0.3, 2), rng.randint(3, 8)
            most = rng.randint(layers // islands, layers)
            length_s = {n: fixed + each * n * (1.33 if n > bend else 1) for n in range(1, most + 1)}
            starts = range(layers)
            tables.append({(a, a + n): (s, s) for a in starts for n, s in length_s.items() if a + n <= layers})
        number = rng.choice((4, 8, 16, 32))
        ends = [way(tables, layers, number) for way in (compose, compose_exactly)]
        if ends[1] is None:
            continue
        assert ends[0] is not None
        slices = [list(pairwise((0, *each))) for each in ends]
        first, best = (cycle_s([table[at] for at, table in zip(each, tables, strict=True)], number) for each in slices)
        gaps.append(first / best - 1)
    return {"pipelines": count, "missed": sum(gap > 1e-9 for gap in gaps), "worst": max(gaps)}


def nodes_of(*entries: tuple[str, int, int], network: float = 16) -> Cluster:
    """Return a cluster of nodes (device, devices per node, nodes)."""
    nodes = [
        {"name": f"n{i}", "device": device, "count": count, "repeat": repeat}
        for i, (device, count, repeat) in enumerate(entries)
    ]
    return cluster_from_dict({"nodes": nodes, "network": {"bandwidth_gb_per_s": network, "latency_us": 10}})


HOMOGENEOUS = {
    "8 A100, 7B": (lambda: nodes_of(("A100-SXM-80GB", 8, 1)), "llama-2-7b", 64),
    "16 A100, 13B": (lambda: nodes_of(("A100-SXM-80GB", 8, 2)), "llama-2-13b", 128),
    "32 H100, 30B": (lambda: nodes_of(("H100-SXM-80GB", 8, 4)), "llama-30b", 128),
    "64 H100, 70B": (lambda: nodes_of(("H100-SXM-80GB", 8, 8)), "llama-3.1-70b", 256),
    "16 4090 over 0.7 GB/s, 7B": (lambda: nodes_of(("RTX-4090", 8, 2), network=0.7), "llama-2-7b", 64),
}
MIXED = {
    "64 H100 + 128 A100, 70B": (example_cluster, "llama-3.1-70b", 192),
    "8 H100 + 8 A100, 13B": (
        lambda: nodes_of(("H100-SXM-80GB", 8, 1), ("A100-SXM-80GB", 8, 1)), "llama-2-13b", 64,
    ),
    "16 H100 + 16 A100 + 16 L40S, 30B": (
        lambda: nodes_of(("H100-SXM-80GB", 8, 2), ("A100-SXM-80GB", 8, 2), ("L40S", 8, 2)), "llama-30b", 192,
    ),
    "HexiScale's setting 1, 7B": (lambda: load_cluster("hexiscale-setting-1"), "llama-2-7b", 120),
    "HexiScale's setting 2, 7B": (lambda: load_cluster("hexiscale-setting-2"), "llama-2-7b", 120),
    "HexiScale's setting 2, 13B": (lambda: load_cluster("hexiscale-setting-2"), "llama-2-13b", 120),
    "HexiScale's setting 3, 30B": (lambda: load_cluster("hexiscale-setting-3"), "llama-30b", 120),
    "HexiScale's case study, 13B": (lambda: load_cluster("hexiscale-case-study"), "llama-2-13b", 24),
}  # fmt: skip


MakeCluster = Callable[[], Cluster]


def beside_grid(cases: dict[str, tuple[MakeCluster, str, int]]) -> list[dict[str, Any]]:
    """Return steps of the best grid, of Tangram and of ours, each with its best recomputation."""
    rows = []
    for name, (make, model_name, batch) in cases.items():
        cluster, model = make(), load_model(model_name)
        works = [replace(WORK, activation_checkpointing=choice) for choice in (True, False)]
        models = [CalibratedStageCosts(cluster, model, work) for work in works]
        grids = [best_grid(costs, costs.time_objective(), batch, SIZES)[0] for costs in models]
        plans = [plan_tangram(costs, costs.time_objective(), batch, SIZES) for costs in models]
        row: dict[str, Any] = {"name": name, "batch": batch}
        fitting_grids = [grid for grid in grids if grid.step_s is not None]
        fastest = min(fitting_grids, key=lambda grid: grid.step_s or inf, default=None)
        row["grid"], row["grid_s"] = (None, None) if fastest is None else (fastest.name, fastest.step_s)
        row["tangram_s"] = min((plan.candidate.step_s for plan in plans if plan is not None), default=None)
        try:
            row["ours_s"] = plan_pipelines(cluster, model, WORK, batch, micro_batch_sizes=SIZES).step_s
        except PlanError:
            row["ours_s"] = None
        rows.append(row)
    return rows


def failures(outcome: dict[str, Any]) -> list[str]:
    """Return the targets that are missed."""
    missed = []
    if "example" in outcome:
        algorithm_2_s, exact_s = (outcome["example"][name]["step_s"] for name in ("algorithm_2", "exact"))
        if algorithm_2_s > exact_s * (1 + 1e-9):
            missed.append(
                f"worked example: Algorithm 2 finds {algorithm_2_s:.3f} s, the exact composition {exact_s:.3f} s"
            )
    if "pruning" in outcome:
        rows = outcome["pruning"]["rules"]
        if rows[-1]["calls"] * PRINTED_SAVING > rows[0]["calls"] or rows[-1]["step_s"] > rows[0]["step_s"] * (1 + 1e-9):
            missed.append(f"pruning: {rows[0]['calls']} to {rows[-1]['calls']} calls")
    for section in ("homogeneous", "mixed"):
        for row in outcome.get(section, ()):
            baseline_times_s = [row[key] for key in ("grid_s", "tangram_s") if row[key] is not None]
            if baseline_times_s and row["ours_s"] > min(baseline_times_s) * (1 + 1e-9):
                missed.append(f"{row['name']}: ours {row['ours_s']:.3f} s, {min(baseline_times_s):.3f} s")
            has_context_parallelism = " cp" in (row["grid"] or "")  # which Tangram's inner parallelizer does not have
            is_slower = section == "homogeneous" and row["tangram_s"] > row["grid_s"] * 1.001
            if is_slower and not has_context_parallelism:
                missed.append(f"{row['name']}: Tangram {row['tangram_s']:.3f} s, grid {row['grid_s']:.3f} s")
    return missed


def show(outcome: dict[str, Any], console: Console) -> None:
    """Print the tables."""
    if "example" in outcome:
        row = outcome["example"]
        table = Table("70B, 80 layers", "on 64 H100", "on 128 A100", "lanes", "stages", "step", title="Worked example")
        table.add_row("printed", "about 48", "32", "", "", "")
        table.add_row("balanced by peak", *(f"{part:.1f}" for part in row["balanced"]), "", "", "")
        for key, name in (("algorithm_2", "Algorithm 2"), ("exact", "composed exactly")):
            each = row[key]
            shape = str(each["lanes"]), str(each["stages"]), f"{each['step_s']:.3f} s"
            table.add_row(f"{name}, {each['first']} first", *map(str, each["layers"]), *shape)
        console.print(table)
    if "pruning" in outcome:
        table = Table("rules", "calls", "of all", "step", "layers", title="Calls of the inner parallelizer")
        most = outcome["pruning"]["rules"][0]["calls"]
        for each in outcome["pruning"]["rules"]:
            share = f"1 / {most / each['calls']:.1f}"
            table.add_row(each["rules"], str(each["calls"]), share, f"{each['step_s']:.4f} s", str(each["layers"]))
        console.print(table)
        console.print(f"by bisection: {outcome['pruning']['by_bisection']}")
    if "composition" in outcome:
        each = outcome["composition"]
        console.print(
            f"Algorithm 2 misses the best composition in {each['missed']} of {each['pipelines']} random pipelines, at "
            f"worst by {100 * each['worst']:.1f} %"
        )
    for section in ("homogeneous", "mixed"):
        if section in outcome:
            console.print(_beside_grid_table(section, outcome[section]))
    for missed in outcome["failures"]:
        console.print(f"MISSED: {missed}")


def _beside_grid_table(section: str, rows: Sequence[dict[str, Any]]) -> Table:
    """Return the table of one section."""
    table = Table("devices", "batch", "best grid", "Tangram", "ours", title=f"Steps, {section} devices")
    gains: dict[str, list[float]] = {"tangram_s": [], "ours_s": []}
    for row in rows:
        cells = []
        for key in ("grid_s", "tangram_s", "ours_s"):
            gain = ""
            if key in gains and row[key] is not None and row["grid_s"] is not None:
                gains[key].append(row["grid_s"] / row[key])
                gain = f" ({gains[key][-1]:.2f} x)"
            cells.append("-" if row[key] is None else f"{row[key]:.3f} s{gain}")
        table.add_row(row["name"], str(row["batch"]), *cells)
    table.add_row("mean gain", "", "", *(f"{geometric_mean(each):.3f} x" for each in gains.values()))
    return table


PARTS: dict[str, Callable[[], Any]] = {
    "example": example,
    "pruning": pruning,
    "composition": composition,
    "homogeneous": lambda: beside_grid(HOMOGENEOUS),
    "mixed": lambda: beside_grid(MIXED),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; return 0 if every target is met."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=tuple(PARTS), nargs="+", default=list(PARTS))
    parser.add_argument("--json", action="store_true", help="print the result as JSON instead of tables")
    parser.add_argument("--output", type=Path, default=FOLDER / "tangram.json")
    options = parser.parse_args(arguments)
    outcome = header(" ".join(["python -m benchmarks.reproduce.tangram", *(arguments or sys.argv[1:])]))
    outcome |= {part: PARTS[part]() for part in options.only}
    outcome["failures"] = failures(outcome)
    write(outcome, options.output)
    if options.json:
        print(json.dumps(outcome))
    else:
        show(outcome, Console(width=None if sys.stdout.isatty() else 130))
    return 1 if outcome["failures"] else 0


if __name__ == "__main__":
    sys.exit(main())
