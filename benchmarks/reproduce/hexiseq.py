"""Rebuild HexiSeq's simulations, with published figures beside ours.

    python -m benchmarks.reproduce.hexiseq [--quick] [--json] [--only simulations assumptions equal-flops table-3]

    simulations   six panels (three clusters, two models) over context lengths: gains over the strongest legal baseline,
                  and the plan's closeness to the bound total work / sum of speeds
    assumptions   the same under every way to settle questions that the paper leaves open (`hexiseq_paper.ASSUMPTIONS`)
    equal-flops   simulations 4 and 5: mixed against homogeneous clusters of equal FLOPs
    table-3       predicted throughput of the testbed, with datasheet numbers and with two constants fitted to it

Nothing is measured: everything follows from the cost model and the search. Parts that are not run again stay in the
result file. The scheduler-time figure is ``python -m benchmarks.planner growth``.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from itertools import product
from math import gcd, log
from pathlib import Path
from typing import Any

import yaml
from rich.console import Console
from rich.progress import track

from benchmarks.measure.machine import describe_machine
from benchmarks.measure.results import FOLDER, write
from benchmarks.reproduce import hexiseq_paper as paper
from benchmarks.reproduce.hexiseq_paper import DATASHEET, Assumptions
from benchmarks.reproduce.hexiseq_plot import draw
from benchmarks.reproduce.hexiseq_show import show, summary
from ds_hetero.cluster import Cluster, cluster_from_dict, load_cluster
from ds_hetero.cluster.catalogue import CATALOGUE, LINK_EFFICIENCY
from ds_hetero.common.reading import config_dir
from ds_hetero.common.units import GB
from ds_hetero.cost import CostModel, Workload, make_cost_model
from ds_hetero.models import load_model
from ds_hetero.models.shapes import ModelSpec
from ds_hetero.planner import PlannedSchedule, plan, strategy
from ds_hetero.values.baselines import ring, ulysses, usp_meshes
from ds_hetero.values.schedule import Schedule

_SECTIONS = ("simulations", "assumptions", "equal-flops", "table-3")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; return 0 if every expectation holds."""
    options = _parser().parse_args(arguments)
    outcome: dict[str, Any] = {
        "command": " ".join(["python -m benchmarks.reproduce.hexiseq", *(arguments or sys.argv[1:])]),
        "machine": describe_machine(),
    }
    contexts = paper.CONTEXTS[::2] if options.quick else paper.CONTEXTS
    if "simulations" in options.only:
        outcome["simulations"] = simulations(DATASHEET, contexts)
    if "assumptions" in options.only:
        outcome["assumptions"] = [
            {"assumptions": asdict(each), **summary(simulations(each, contexts))} for each in paper.ASSUMPTIONS
        ]
    if "equal-flops" in options.only:
        outcome["equal_flops"] = [equal_flops(name, each) for name in paper.EQUAL_FLOPS for each in EQUAL_FLOPS]
    if "table-3" in options.only:
        outcome["table_3"] = table_3()
    outcome["failures"] = failures(outcome)
    output = options.output or FOLDER / f"hexiseq{'_quick' if options.quick else ''}.json"
    if output.is_file():
        outcome = {**json.loads(output.read_text()), **outcome}
    write(outcome, output)
    if "simulations" in options.only:
        draw(outcome["simulations"], output.with_suffix(".png"))
    if options.json:
        print(json.dumps(outcome))
    else:
        show(outcome, Console(width=None if sys.stdout.isatty() else 130))
    Console(stderr=True).print(f"written to {output}")
    return 1 if outcome["failures"] else 0


def _parser() -> argparse.ArgumentParser:
    """Return the parser of the command."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.reproduce.hexiseq", description=__doc__.partition("\n")[0]
    )
    parser.add_argument("--only", choices=_SECTIONS, nargs="+", default=list(_SECTIONS))
    parser.add_argument("--quick", action="store_true", help="every other context")
    parser.add_argument("--json", action="store_true", help="print the result as JSON instead of tables")
    parser.add_argument("--output", type=Path, help="the result file; default: in benchmarks/results")
    return parser


# --- clusters under assumptions ---------------------------------------------------------------------


def cluster_under(name: str, assumptions: Assumptions) -> Cluster:
    """Return a cluster of the paper with rates, latencies and network as assumed; all efficiencies are 1.

    The calibrated model counts activations per layer and ZeRO's traffic, which Eqs. 2-12 leave out. To compare the two,
    its devices have unlimited memory, and by `workload` every rank keeps the whole model.
    """
    endless = 1000 if assumptions.cost_model == "calibrated" else 1
    data = yaml.safe_load((config_dir() / "clusters" / f"{name}.yaml").read_text())
    for node in data["nodes"]:
        node["link"]["latency_us"] = assumptions.latency_us[0]
    data["network"] = {"bandwidth_gb_per_s": assumptions.between_gb_per_s, "latency_us": assumptions.latency_us[1]}
    data["devices"] = {}
    for device in {node["device"] for node in data["nodes"]}:
        spec = CATALOGUE[device].device
        data["devices"][f"{device} "] = {
            "peak_tflops": assumptions.tflops.get(device, spec.peak_flops_per_s / 1e12),
            "memory_gib": spec.memory_bytes / 2**30 * endless,
            "memory_bandwidth_gb_per_s": spec.memory_bytes_per_s / 1e9,
        }
    for node in data["nodes"]:
        node["device"] += " "  # a device of our own: the catalogue's efficiencies do not apply
    return cluster_from_dict(data)


def workload(context: int, assumptions: Assumptions) -> Workload:
    """Return a global batch of 8 in micro-batches of one sequence, with checkpointing, whose FLOPs the paper counts."""
    stage = 0 if assumptions.cost_model == "calibrated" else 3
    return Workload(seq_len=context, micro_batches=paper.GLOBAL_BATCH, causal=assumptions.causal, zero_stage=stage)


def search(cluster: Cluster, model: ModelSpec, context: int, assumptions: Assumptions) -> PlannedSchedule:
    """Return our plan for `workload`."""
    return plan(cluster, model, workload(context, assumptions), cost_model=assumptions.cost_model)


def baselines(cost: CostModel, fractional_heads: bool) -> dict[str, float]:
    """Return the block time of ring, Ulysses and every USP mesh that the number of heads allows."""
    model, num_ranks = cost.model, cost.cluster.num_ranks
    seconds_by_name: dict[str, float] = {}
    for mesh in usp_meshes(num_ranks, model.num_heads, model.num_kv_heads):
        name = "ring" if mesh.ring_size == num_ranks else "ulysses" if mesh.ring_size == 1 else None
        seconds_by_name[name or f"usp {mesh.ring_size} x {num_ranks // mesh.ring_size}"] = cost.predict(mesh).block_s
    if fractional_heads and "ulysses" not in seconds_by_name:
        seconds_by_name["ulysses, fractions of heads"] = fractional_ulysses(cost)
    return seconds_by_name


def fractional_ulysses(cost: CostModel) -> float:
    """Return the block time of Ulysses on any number of ranks: the same model with more and smaller heads."""
    num_ranks = cost.cluster.num_ranks
    finer = num_ranks // gcd(cost.model.num_heads, num_ranks)
    model = replace(
        cost.model,
        num_heads=cost.model.num_heads * finer,
        num_kv_heads=cost.model.num_kv_heads * finer,
        head_dim=cost.model.head_dim / finer,  # type: ignore[arg-type]
    )
    fine = make_cost_model(cost.name, cost.cluster, model, cost.workload)
    grouping, tokens, heads = fine.arrays(usp_meshes(num_ranks, model.num_heads, model.num_kv_heads)[-1])
    return fine.block_s(grouping, tokens, heads)


# --- simulations 1 to 3 -----------------------------------------------------------------------------


def simulations(assumptions: Assumptions, contexts: Sequence[int]) -> list[dict[str, Any]]:
    """Return one cell per cluster, model and context."""
    cells = list(product(paper.SIMULATIONS, paper.MODELS, contexts))
    console = Console(stderr=True)
    return [cell(*which, assumptions) for which in track(cells, description=assumptions.name, console=console)]


def cell(simulation: str, model_name: str, context: int, assumptions: Assumptions) -> dict[str, Any]:
    """Return baselines, our plan and the bound."""
    cluster, model = cluster_under(paper.SIMULATIONS[simulation], assumptions), load_model(model_name)
    work = workload(context, assumptions)
    cost = make_cost_model(assumptions.cost_model, cluster, model, work)
    block_s_of_baselines = baselines(cost, assumptions.fractional_heads)
    strongest = min(block_s_of_baselines, key=lambda name: block_s_of_baselines[name])
    planned = search(cluster, model, context, assumptions)
    tokens = context * work.micro_batch / model.num_layers  # of one micro-batch, per block
    return {
        "simulation": simulation,
        "model": model_name,
        "context": context,
        "baselines_s": block_s_of_baselines,
        "strongest": strongest,
        "ours_s": planned.prediction.block_s,
        "bound_s": planned.prediction.bound_s,
        "gain": block_s_of_baselines[strongest] / planned.prediction.block_s,
        "of_bound": planned.prediction.bound_s / planned.prediction.block_s,
        "possible_gain": block_s_of_baselines[strongest] / planned.prediction.bound_s,
        "groups": planned.schedule.ring_size,
        "tokens_per_s": tokens / planned.prediction.block_s,
        "search_s": planned.search_s,
    }


# --- simulations 4 and 5 ----------------------------------------------------------------------------

EQUAL_FLOPS = (
    Assumptions(name="H100 = 3 A100, no barrier", tflops={"H100-SXM-80GB": 936}, cost_model="calibrated"),
    Assumptions(name="H100 = 3 A100, Eq. 2", tflops={"H100-SXM-80GB": 936}),
    Assumptions(name="datasheet (3.17 : 1), no barrier", cost_model="calibrated"),
    Assumptions(name="datasheet (3.17 : 1), Eq. 2"),
)


def equal_flops(name: str, assumptions: Assumptions) -> dict[str, Any]:
    """Compare our plan on the mixed cluster with the best legal baseline on the homogeneous one.

    Fractional Ulysses on the homogeneous cluster is returned, too.
    """
    mixed, plain, model_name, context = paper.EQUAL_FLOPS[name]
    model, work = load_model(model_name), workload(context, assumptions)
    homogeneous = make_cost_model(assumptions.cost_model, cluster_under(plain, assumptions), model, work)
    block_s_of_baselines = baselines(homogeneous, fractional_heads=True)
    legal = {baseline: block_s for baseline, block_s in block_s_of_baselines.items() if "fractions" not in baseline}
    strongest = min(legal, key=lambda baseline: legal[baseline])
    planned = search(cluster_under(mixed, assumptions), model, context, assumptions)
    flops = [cluster_under(side, assumptions).peak_flops_per_s.sum() for side in (mixed, plain)]
    return {
        "pair": name,
        "assumptions": assumptions.name,
        "flops_ratio": float(flops[0] / flops[1]),
        "strongest": strongest,
        "homogeneous_s": legal[strongest],
        "fractional_ulysses_s": block_s_of_baselines.get("ulysses, fractions of heads", legal.get("ulysses")),
        "ours_s": planned.prediction.block_s,
        "throughput_ratio": legal[strongest] / planned.prediction.block_s,
    }


# --- Table 3 ----------------------------------------------------------------------------------------

_TABLE_3_MODELS = (
    DATASHEET,
    Assumptions(name="no barrier, bytes summed", cost_model="calibrated"),
    Assumptions(name="no barrier, bytes summed, causal", cost_model="calibrated", causal=True),
)
_SHARES = (0.3, 0.35, 0.4, 0.45, 0.5, 0.55, 0.6, 0.65, 0.7, 0.8, 0.9, 1.0)
_BANDWIDTHS = (3.0, 4.0, 4.5, 5.0, 6.0, 7.0, 8.0, 10.0, 12.5, 15.0, 20.0, 25.0)


def table_3() -> list[dict[str, Any]]:
    """Return throughputs with datasheet numbers, and with two constants fitted to the baselines' simulated column.

    The constants are one fraction of all peaks and one bandwidth between nodes. HexiSeq's rows are not used in the fit.
    """
    results = []
    for model_row in _TABLE_3_MODELS:
        fitted = [row for row in paper.TABLE_3 if row.method != "hexiseq"]
        share, bandwidth = min(
            product(_SHARES, _BANDWIDTHS),
            key=lambda both: sum(_log_error(row, model_row, *both) ** 2 for row in fitted),
        )
        rows = [
            {
                **asdict(row),
                "datasheet": testbed_ktps(row, model_row, 1.0, 25.0),
                "fitted": testbed_ktps(row, model_row, share, bandwidth),
            }
            for row in paper.TABLE_3
        ]
        error = (sum(_log_error(row, model_row, share, bandwidth) ** 2 for row in fitted) / len(fitted)) ** 0.5
        results.append(
            {"assumptions": model_row.name, "share": share, "gb_per_s": bandwidth, "rms_log_error": error, "rows": rows}
        )
    return results


_PORTS_GB_PER_S, _NEIGHBOUR_SHARES = (20, 30, 40, 60, 80, 160), (0.2, 0.3, 0.4, 0.5, 0.6, 0.8)


def network_fit() -> dict[str, Any]:
    """Return throughputs at the catalogue's rates, and with two network constants that best fit the baselines' rows.

    The constants are the bandwidth of all ranks of a node through its NICs, and the fraction of the link that a message
    to one neighbour gets. The measured column is fitted; HexiSeq's rows, Algorithm 1's schedules, are not used for the
    fit.
    """
    fitted = [row for row in paper.TABLE_3 if row.method != "hexiseq"]

    def error(ports_gb_per_s: float, share: float) -> float:
        logs = [log(catalogue_ktps(row, ports_gb_per_s, share) / row.measured) for row in fitted]
        return (sum(each**2 for each in logs) / len(logs)) ** 0.5

    given = (float("inf"), LINK_EFFICIENCY)
    ports_gb_per_s, share = min(product(_PORTS_GB_PER_S, _NEIGHBOUR_SHARES), key=lambda both: error(*both))
    return {
        "assumptions": "rates of FlashAttention-2",
        "gb_per_s": ports_gb_per_s,
        "share": share,
        "before": error(*given),
        "rms_log_error": error(ports_gb_per_s, share),
        "rows": [
            {
                **asdict(row),
                "datasheet": catalogue_ktps(row, *given),
                "fitted": catalogue_ktps(row, ports_gb_per_s, share),
            }
            for row in paper.TABLE_3
        ],
    }


def catalogue_ktps(row: paper.Row, ports_gb_per_s: float, share: float) -> float:
    """Return the thousands of tokens per second of one line of table 3 at the catalogue's rates.

    Args:
        row: its line.
        ports_gb_per_s: of all ranks of a node together.
        share: of the network's rate, for a message to one neighbour.
    """
    cluster = load_cluster(f"hexiseq-setting-{row.setting}")
    nodes = tuple(replace(node, nic_bytes_per_s=ports_gb_per_s * GB) for node in cluster.nodes)
    cluster = replace(cluster, nodes=nodes, network=replace(cluster.network, p2p_efficiency=share))
    model, work = load_model(row.model), Workload(seq_len=row.context, micro_batches=paper.GLOBAL_BATCH, zero_stage=1)
    cost = make_cost_model("calibrated", cluster, model, work)
    if row.method == "hexiseq":
        return cost.predict(strategy("hexiseq", cost)).tokens_per_s / 1e3
    return max(cost.predict(mesh).tokens_per_s for mesh in _meshes(row, cluster, model)) / 1e3


def _meshes(row: paper.Row, cluster: Cluster, model: ModelSpec) -> tuple[Schedule, ...]:
    """Return the uniform schedules of a line of table 3; the fastest one counts."""
    num_ranks, heads = cluster.num_ranks, (model.num_heads, model.num_kv_heads)
    if row.method == "usp":
        return usp_meshes(num_ranks, *heads)
    # 40 heads over 16 ranks as evenly as whole heads allow
    return (ring(num_ranks, *heads) if row.method == "ring" else ulysses(num_ranks, *heads),)


def _log_error(row: paper.Row, assumptions: Assumptions, share: float, gb_per_s: float) -> float:
    return log(testbed_ktps(row, assumptions, share, gb_per_s) / row.simulated)


def testbed_ktps(row: paper.Row, assumptions: Assumptions, share: float, gb_per_s: float) -> float:
    """Return the thousands of tokens per second of one line of table 3."""
    names = ("H100-SXM-80GB", "A100-SXM-80GB")
    tflops = {name: CATALOGUE[name].device.peak_flops_per_s / 1e12 * share for name in names}
    assumptions = replace(assumptions, tflops=tflops, between_gb_per_s=gb_per_s)
    model, work = load_model(row.model), workload(row.context, assumptions)
    cluster = cluster_under(f"hexiseq-setting-{row.setting}", assumptions)
    if row.method == "hexiseq":
        block_s = search(cluster, model, row.context, assumptions).prediction.block_s
    else:
        cost = make_cost_model(assumptions.cost_model, cluster, model, work)
        block_s = min(cost.predict(mesh).block_s for mesh in _meshes(row, cluster, model))
    return row.context / 1e3 / (model.num_layers * block_s)


# --- verdict ------------------------------------------------------------------------------------


def failures(outcome: dict[str, Any]) -> list[str]:
    """Return the expectations that do not hold."""
    missed = []
    if "simulations" in outcome:
        total = summary(outcome["simulations"])
        if total["least"] < 1:
            missed.append(f"a plan is slower than the best baseline: gain {total['least']:.4f}")
        if total["mean"] < paper.GAIN_TARGET:
            missed.append(f"mean gain {total['mean']:.3f} is below {paper.GAIN_TARGET}")
        if total["of_bound_least"] < paper.OF_BOUND_TARGET:
            missed.append(f"a plan reaches only {total['of_bound_least']:.1%} of the bound")
    missed += [
        f"{each['pair']}: {each['throughput_ratio'] - 1:+.2%} against the homogeneous cluster"
        for each in outcome.get("equal_flops", [])
        if each["assumptions"] == EQUAL_FLOPS[0].name and each["throughput_ratio"] < 1 - paper.EQUAL_FLOPS_WITHIN
    ]
    return missed


if __name__ == "__main__":
    sys.exit(main())
