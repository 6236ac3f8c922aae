"""Rebuild HexiScale's printed figures (arXiv:2409.01143) from its cost model, with better plans in the same model.

    python -m benchmarks.reproduce.hexiscale [--only case-study tables] [--json]

    case-study   section 3: the pipelines of Megatron and of HexiScale to all printed digits, the printed addition for
                 gradients, HexiScale's search as described, Tangram's, ours, and the exact optimum
    tables       tables 3 and 6: simulated MFU at a global batch of 120, with 8 bytes a parameter as in the public code,
                 and with 16 bytes for Adam in mixed precision and the inputs of all micro-batches in flight

Nothing is measured: everything follows from the cost model and the searches. The exit code is 1 if a target is missed.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.measure.exact_pipelines import solve_pipelines_exact
from benchmarks.measure.results import FOLDER, header, write
from ds_hetero.cluster.files import cluster_from_dict, load_cluster
from ds_hetero.cluster.topology import Cluster
from ds_hetero.cost.stages.hexiscale import GRADIENT_SCALE, HexiScaleStageCosts
from ds_hetero.cost.stages.stage import NO_SYNC, DeviceBlock, PlacedPipeline
from ds_hetero.models import load_model
from ds_hetero.planner.pipeline_search.cuts import make_cut
from ds_hetero.planner.pipeline_search.evaluate import Evaluator
from ds_hetero.planner.pipeline_search.search import Search
from ds_hetero.planner.published.hexiscale import plan_hexiscale
from ds_hetero.planner.published.tangram import plan_tangram

SECTIONS = ("case-study", "tables")
SEQ_LEN, BATCH = 4096, 120

# Section 3.1 and figure 1: layers and devices (kind, node, size) of the pipeline that ends last; printed seconds of the
# step and of its gradients; layers whose gradients cross the link between machines.
A800, R4090, R3090 = (DeviceBlock(i, i, 1, "one") for i in range(3))
PRINTED_CASES = {
    "Megatron": ((A800, A800, R4090, R3090), (10, 10, 10, 10), 12, 41.52, 9.90, 10),
    "HexiScale": ((A800, R4090, R4090, R3090), (25, 5, 5, 5), 10, 25.55, 5.07, 5),
}

# Tables 3 and 6: model, setting, simulated MFU in %, and that of the integer programme it is compared with.
PRINTED_MFU = (
    ("llama-2-7b", "homogeneous, Ethernet", 42.2, None),
    ("llama-2-7b", "homogeneous, RDMA", 54.0, None),
    ("llama-2-7b", "setting 1", 32.3, 32.3),
    ("llama-2-7b", "setting 2", 33.8, 34.6),
    ("llama-2-13b", "homogeneous, Ethernet", 41.0, None),
    ("llama-2-13b", "homogeneous, RDMA", 52.2, None),
    ("llama-2-13b", "setting 1", 28.6, 29.1),
    ("llama-2-13b", "setting 2", 31.8, 33.2),
    ("llama-30b", "homogeneous, Ethernet", 28.6, None),
    ("llama-30b", "homogeneous, RDMA", 40.4, None),
    ("llama-30b", "setting 3", 28.0, 29.7),
)

OPEN_CONSTANTS = (
    (
        "global batch of tables 3 and 6",
        "120, as in the scripts of the public code; it is not printed. Equal devices over RDMA cannot "
        "reach the print at 120, whatever the plan: their pipelines are too short a time full",
    ),
    ("peaks", "312, 165.2, 80 and 56.9 Tflop/s in 2^40, links in 2^30 bytes, as in the public code"),
    ("pipelines", "1.8 x the slowest one, with a barrier per step in place of Eq. 9, as in the public code"),
    ("gradients", "1.1 x 1.5 of Eqs. 4 and 7; the code sums over layers where Eq. 7 has a maximum over devices"),
    ("latencies", "0, as in the public code; their values are not printed"),
    ("bytes a parameter", "8, as in the public code; Adam in mixed precision takes 16"),
    ("MFU", "recomputation counts as work (96 of 72), so 1 / 1.8 = 55.6 % is the most that can appear"),
    ("link inside an A800 PCIe machine", "32 GB/s; it is not printed"),
    ("machines of setting 3", "as listed; the printed 4.67 % less compute needs a ninth machine of 8 3080Ti"),
)


def case_study() -> dict[str, Any]:
    """Rebuild section 3: printed pipelines, and plans of all searches."""
    cluster, model = load_cluster("hexiscale-case-study"), load_model("llama-2-13b")
    costs = HexiScaleStageCosts(cluster, model, SEQ_LEN)
    printed = []
    for name, (blocks, layers, number, step_s, gradients_s, across) in PRINTED_CASES.items():
        cut = make_cut(costs, blocks, layers, 1, 2, fits=False)
        assert cut is not None
        eq_4_s = equation_4_s(costs, across)
        printed.append(
            {
                "name": name,
                "printed_pipelines_s": round(step_s - gradients_s, 2),
                "pipelines_s": costs.step_s(costs.pipeline_s(*cut.times, number), NO_SYNC, 0.0),
                "printed_gradients_s": gradients_s,
                "layers_across": across,
                "eq_4_s": eq_4_s,
                "scaled_s": GRADIENT_SCALE * eq_4_s,
                "unexplained_s": gradients_s - GRADIENT_SCALE * eq_4_s,
            }
        )
    optimum = solve_pipelines_exact(Evaluator(costs, 24, costs.time_objective()), sizes=(1,))
    assert optimum is not None
    return {"printed": printed, "plans": [*searches(costs, 24), {"name": "exact optimum", "step_s": optimum.step_s}]}


def equation_4_s(costs: HexiScaleStageCosts, layers: int) -> float:
    """Return the seconds of gradients of layers that two pipelines hold on machines A and B (Eqs. 4 and 7)."""
    num_layers = costs.model.num_layers
    pipelines = [PlacedPipeline((block,), (num_layers,), 1, 1) for block in (A800, R4090)]
    return costs.sync_times(pipelines).total_s * layers / num_layers


def searches(costs: HexiScaleStageCosts, batch: int) -> list[dict[str, Any]]:
    """Run all searches under one cost model; return steps, MFU, pipelines, and the seconds of each."""
    rows = []
    for name in ("HexiScale's search", "Tangram's search", "ours"):
        started = time.process_time()
        if name == "ours":
            result = Search(Evaluator(costs, batch, costs.time_objective()), (1, 2)).run()
            plan = None if result is None else result.best
        elif name == "HexiScale's search":
            plan = plan_hexiscale(costs, costs.time_objective(), batch)
        else:
            tangram = plan_tangram(costs, costs.time_objective(), batch)
            plan = None if tangram is None else tangram.candidate
        row: dict[str, Any] = {"name": name, "search_cpu_s": time.process_time() - started}
        if plan is not None:
            row |= {
                "step_s": plan.step_s,
                "mfu": costs.utilization(plan.step_s, batch),
                "stages": [len(shape.blocks) for shape in plan.shapes],
            }
        rows.append(row)
    return rows


def setting(name: str, model: str) -> Cluster:
    """Return a cluster of section 5.1."""
    if name.startswith("setting"):
        return load_cluster(f"hexiscale-{name.replace(' ', '-')}")
    link = {"bandwidth_gb_per_s": 32, "latency_us": 5}
    machines = 4 if model == "llama-30b" else 2
    between = {"bandwidth_gb_per_s": 10 if name.endswith("RDMA") else 0.7, "latency_us": 50}
    nodes = [{"name": "a800", "device": "A800-PCIe-80GB", "count": 8, "repeat": machines, "link": link}]
    return cluster_from_dict({"nodes": nodes, "network": between})


def tables() -> list[dict[str, Any]]:
    """Rebuild tables 3 and 6."""
    rows = []
    for model, name, printed, programme in PRINTED_MFU:
        cluster, spec = setting(name, model), load_model(model)
        row: dict[str, Any] = {"model": model, "setting": name, "printed": printed, "printed_programme": programme}
        for key, options in (("as_code", {}), ("with_adam", {"parameter_bytes": 16, "stash": True})):
            row[key] = searches(HexiScaleStageCosts(cluster, spec, SEQ_LEN, **options), BATCH)
        rows.append(row)
    return rows


def failures(outcome: dict[str, Any]) -> list[str]:
    """Return the targets that are missed."""
    missed = []
    if "case_study" in outcome:
        missed += [
            f"pipelines of {row['name']}: {row['pipelines_s']:.4f} s"
            for row in outcome["case_study"]["printed"]
            if round(row["pipelines_s"], 2) != row["printed_pipelines_s"]
        ]
        plans = {row["name"]: row["step_s"] for row in outcome["case_study"]["plans"]}
        if plans["ours"] > min(16.3, 1.001 * plans["exact optimum"]):
            missed.append(f"case study: {plans['ours']:.3f} s")
    for row in outcome.get("tables", ()):
        mfu = {result["name"]: 100 * result.get("mfu", 0.0) for result in row["as_code"]}
        printed = 0.0 if row["printed_programme"] is None else max(row["printed"], row["printed_programme"])
        if mfu["ours"] < max(printed, *mfu.values()) - 1e-6:
            missed.append(f"{row['model']}, {row['setting']}: MFU {mfu}")
    return missed


def show(outcome: dict[str, Any], console: Console) -> None:
    """Print the tables."""
    if "case_study" in outcome:
        table = Table(
            "step of", "pipelines, printed", "here", "gradients, printed", "Eq. 4", f"x {GRADIENT_SCALE:.2f}", "rest",
            title="Case study, seconds: 13B, 24 sequences",
        )  # fmt: skip
        for row in outcome["case_study"]["printed"]:
            keys = ("printed_pipelines_s", "pipelines_s", "printed_gradients_s", "eq_4_s", "scaled_s", "unexplained_s")
            table.add_row(row["name"], *(f"{row[key]:.4g}" for key in keys))
        console.print(table)
        console.print(
            "The printed gradients differ by 1.65 x Eq. 4 for the five layers more that cross machines, the 1.1 x 1.5 "
            "of the public code. The rest, 0.23 s, is the same in both, and no equation of the paper has it."
        )
        table = Table("plan of", "step", "stages", "search, CPU")
        for row in outcome["case_study"]["plans"]:
            table.add_row(row["name"], f"{row['step_s']:.4f} s", str(row.get("stages", "")), seconds(row))
        console.print(table)
    if "tables" in outcome:
        title = f"MFU in %, {BATCH} sequences of {SEQ_LEN} tokens; in brackets 16 bytes a parameter and 1F1B's stash"
        table = Table(
            "model", "setting", "printed", "programme", "HexiScale", "Tangram", "ours", "CPU s", title=title
        )  # fmt: skip
        for row in outcome["tables"]:
            pairs = zip(row["as_code"], row["with_adam"], strict=True)
            cells = [f"{percent(a)} ({percent(b)})" for a, b in pairs]
            spent = " / ".join(f"{result['search_cpu_s']:.1f}" for result in row["as_code"])
            programme = "" if row["printed_programme"] is None else str(row["printed_programme"])
            table.add_row(row["model"], row["setting"], str(row["printed"]), programme, *cells, spent)
        console.print(table)
        table = Table("the print leaves open", "taken here")
        for question in OPEN_CONSTANTS:
            table.add_row(*question)
        console.print(table)
    for missed in outcome["failures"]:
        console.print(f"MISSED: {missed}")


def percent(row: dict[str, Any]) -> str:
    return f"{100 * row['mfu']:.1f}" if "mfu" in row else "-"


def seconds(row: dict[str, Any]) -> str:
    return f"{row['search_cpu_s']:.1f} s" if "search_cpu_s" in row else ""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; return 0 if every target is met."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=SECTIONS, nargs="+", default=list(SECTIONS))
    parser.add_argument("--json", action="store_true", help="print the result as JSON instead of tables")
    parser.add_argument("--output", type=Path, default=FOLDER / "hexiscale.json")
    options = parser.parse_args(arguments)
    outcome = header(" ".join(["python -m benchmarks.reproduce.hexiscale", *(arguments or sys.argv[1:])]))
    if "case-study" in options.only:
        outcome["case_study"] = case_study()
    if "tables" in options.only:
        outcome["tables"] = tables()
    outcome["failures"] = failures(outcome)
    write(outcome, options.output)
    if options.json:
        print(json.dumps(outcome))
    else:
        show(outcome, Console(width=None if sys.stdout.isatty() else 150))
    return 1 if outcome["failures"] else 0


if __name__ == "__main__":
    sys.exit(main())
