"""HexiScale's figures from its own cost model: its search as rebuilt, ours, and what else the print compares with."""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np

from benchmarks.reproduce import hexiscale as tables
from benchmarks.reproduce.figures.figure import Figure, Paper
from ds_hetero.cluster import Cluster, cluster_from_dict, load_cluster
from ds_hetero.common.arrays import Floats
from ds_hetero.cost.stages.hexiscale import HexiScaleStageCosts
from ds_hetero.cost.stages.stage import StageOption
from ds_hetero.models import load_model
from ds_hetero.planner.pipeline_search.evaluate import Evaluator, PlanCandidate
from ds_hetero.planner.pipeline_search.search import Search
from ds_hetero.planner.pipelines.rivals import best_grid
from ds_hetero.planner.published.hexiscale import plan_hexiscale
from ds_hetero.planner.published.tangram import plan_tangram

CODE = "constants of the public code (`--cost-model hexiscale`), 120 sequences of 4K tokens; neither is printed."
REBUILT = "HexiScale's search"
KINDS = {"RTX-3080Ti": "3080Ti", "RTX-3090": "3090", "RTX-4090": "4090"}


class OneDegree(HexiScaleStageCosts):
    """Stages of one tensor-parallel degree only: HexiScale without its asymmetric support."""

    degree = 1

    def stage(self, kind: int, size: int, inner: str, micro_batch_size: int, pipelines: int) -> StageOption | None:
        """See `HexiScaleStageCosts.stage`."""
        return super().stage(kind, size, inner, micro_batch_size, pipelines) if size == self.degree else None


def _costs(cluster: Cluster, model: str, kind: type[HexiScaleStageCosts] = HexiScaleStageCosts) -> HexiScaleStageCosts:
    return kind(cluster, load_model(model), tables.SEQ_LEN)


def _mfu(costs: HexiScaleStageCosts, plan: PlanCandidate | None, batch: int = tables.BATCH) -> float:
    return 0.0 if plan is None else 100 * costs.utilization(plan.step_s, batch)


def _ours(costs: HexiScaleStageCosts, batch: int = tables.BATCH) -> PlanCandidate | None:
    result = Search(Evaluator(costs, batch, costs.time_objective()), (1, 2)).run()
    return None if result is None else result.best


def case_study(quick: bool) -> Figure:
    """Figure 1: three machines."""
    study = tables.case_study()
    rows = []
    for row in study["printed"]:
        gradients = f"{row['printed_gradients_s']:.2f}", f"{row['scaled_s']:.2f}"
        rows.append((row["name"], f"{row['printed_pipelines_s']:.2f}", f"{row['pipelines_s']:.2f}", *gradients, ""))
    rows += [(row["name"], "", "", "", "", f"{row['step_s']:.2f}") for row in study["plans"]]
    return Figure(
        name="Figure 1",
        shows="Case study: 13B on 3 A800, 3 4090 and 2 3090, 24 sequences; seconds.",
        columns=("plan", "pipelines, print", "here", "gradients, print", "here", "step here"),
        rows=rows,
        decides=f"{CODE} 0.23 s of the printed gradients are in no equation.",
        command="python -m benchmarks.reproduce.hexiscale --only case-study",
    )


def ablation(quick: bool) -> Figure:
    """Figure 6: without asymmetric support, and without gradient accumulation."""
    cases = (("llama-2-7b", "setting 1"), ("llama-2-13b", "setting 1"), ("llama-30b", "setting 3"))
    rows = []
    for model, name in cases[:1] if quick else cases:
        cluster = tables.setting(name, model)
        costs = _costs(cluster, model)
        full = _mfu(costs, plan_hexiscale(costs, costs.time_objective(), tables.BATCH))
        symmetric = 0.0
        for degree in (4,) if quick else (1, 2, 4, 8):
            alike = _costs(cluster, model, type("Degree", (OneDegree,), {"degree": degree}))
            symmetric = max(symmetric, _mfu(alike, plan_hexiscale(alike, alike.time_objective(), tables.BATCH)))
        short = [_mfu(costs, plan_hexiscale(costs, costs.time_objective(), batch), batch) for batch in (60, 30, 15)]
        changes = (f"{value:.1f} ({value / full - 1:+.0%})" if full else "-" for value in (symmetric, *short))
        rows.append((f"{model}, {name}", f"{full:.1f}", *changes))
    return Figure(
        name="Figure 6",
        shows="Ablation, simulated MFU in %. The print says -15 % in the mean and -23 % at 30B without asymmetric "
        "support, -12 % and -15 % without gradient accumulation.",
        columns=("case", "all", "one tensor degree everywhere", "gradients every 60", "every 30", "every 15 sequences"),
        rows=rows,
        decides="what an iteration without accumulation trains, which is not printed: here shorter and shorter ones. "
        f"Also: {CODE}",
    )


def found_strategy(quick: bool) -> Figure:
    """Table 2: the layout for 30B in setting 3."""
    costs = _costs(tables.setting("setting 3", "llama-30b"), "llama-30b")
    rows: list[tuple[str, str, str]] = [
        ("print", "A800 x8: 60", "8"),
        ("print, twice", "4090 x4: 18 / 4090 x4: 18 / 4090 x4: 18 / 3090 x2: 6", "4 4 4 2"),
        ("print", "4090 x4: 18 / 4090 x4: 18 / six of 3090 x2: 4 each", "4 4 and six of 2"),
    ]
    plans = {"rebuilt": plan_hexiscale(costs, costs.time_objective(), tables.BATCH), "ours": _ours(costs)}
    for name, plan in plans.items():
        if plan is None:
            continue
        for shape, cut in zip(plan.shapes, plan.cuts, strict=True):
            stages = [
                f"{_device(costs, block.kind)} x{block.size}: {layers}"
                for block, layers in zip(shape.blocks, cut.layers, strict=True)
            ]
            rows.append((name, " / ".join(stages), " ".join(str(block.size) for block in shape.blocks)))
    mfu = ", ".join(f"{name} {_mfu(costs, plan):.1f}" for name, plan in plans.items())
    return Figure(
        name="Table 2",
        shows=f"Layouts for 30B in setting 3, pipelines row by row with devices and layers. Simulated MFU: print 28.0, "
        f"{mfu} %.",
        columns=("search", "stages", "tensor degrees"),
        rows=rows,
        decides="the seeds and limits of the graph partition, which the text leaves open: the rebuilt search finds "
        "other "
        "pipelines than the print.",
    )


def _device(costs: HexiScaleStageCosts, kind: int) -> str:
    name = costs.pools.kinds[kind].device.name
    return KINDS.get(name, name.partition("-")[0])


_REAL_MFU = (41.1, 53.7, 31.2, 33.5, 39.5, 51.1, 27.2, 31.4, 27.8, 39.0, 27.5)  # of tables.PRINTED_MFU, same order


@cache
def _mfu_rows(quick: bool) -> tuple[dict[str, Any], ...]:
    """Table 3's rows; in the quick mode those of 7B on the two mixed settings."""
    rows = []
    for (model, name, printed, programme), real in zip(tables.PRINTED_MFU, _REAL_MFU, strict=True):
        if quick and (model != "llama-2-7b" or programme is None):
            continue
        costs = _costs(tables.setting(name, model), model)
        found = {row["name"]: 100 * row.get("mfu", 0.0) for row in tables.searches(costs, tables.BATCH)}
        row = {"model": model, "setting": name, "real": real, "printed": printed, "programme": programme}
        rows.append({**row, **found})
    return tuple(rows)


def simulated_mfu(quick: bool) -> Figure:
    """Table 3: simulated MFU."""
    names = ("HexiScale's search", "Tangram's search", "ours")
    rows = [
        (
            row["model"],
            row["setting"],
            f"{row['real']:.1f}",
            f"{row['printed']:.1f}",
            *(f"{row[name]:.1f}" for name in names),
        )
        for row in _mfu_rows(quick)
    ]
    return Figure(
        name="Table 3",
        shows="Real and simulated MFU, %, recomputation counted as work.",
        columns=("model", "setting", "real", "simulated, print", "HexiScale rebuilt", "Tangram rebuilt", "ours"),
        rows=rows,
        decides=f"{CODE} Where the rebuilt search is below the print, the rival is weaker than the original by so "
        f"much; "
        "equal devices over RDMA cannot reach the print at 120 sequences, whatever the plan.",
        command="python -m benchmarks.reproduce.hexiscale --only tables",
    )


def programme(quick: bool) -> Figure:
    """Table 6: the integer programme."""
    rows = [
        (row["model"], row["setting"], f"{row['programme']:.1f}", f"{row['printed']:.1f}",
         f"{row[REBUILT]:.1f}", f"{row['ours']:.1f}")
        for row in _mfu_rows(quick) if row["programme"] is not None
    ]  # fmt: skip
    return Figure(
        name="Table 6",
        shows="Simulated MFU against the optimum of an integer programme, %.",
        columns=("model", "setting", "programme, print", "HexiScale, print", "HexiScale rebuilt", "ours"),
        rows=rows,
        decides=f"{CODE} Ours is above the printed programme, so the programme's space is smaller, or its constants "
        f"differ.",
        command="python -m benchmarks.reproduce.hexiscale --only tables",
    )


def _random_groups(rng: random.Random) -> Any:
    """A first phase that cuts shuffled devices into groups of about equal compute."""

    def divide(weight_V: Floats, bandwidth_VV: Floats, parts: int, *, maximize: bool = False) -> list[list[int]]:
        order = list(range(len(weight_V)))
        rng.shuffle(order)
        reached = np.cumsum(weight_V[order]) / weight_V.sum() * parts - 1e-9
        groups: list[list[int]] = [[] for _ in range(parts)]
        for i, vertex in enumerate(order):
            groups[min(max(int(reached[i]), i + parts - len(order), 0), parts - 1)].append(vertex)
        return sorted(sorted(group) for group in groups if group)

    return divide


def convergence(quick: bool) -> Figure:
    """Figure 8: the graph partition against a random one."""
    rows, lines = [], dict[str, list[tuple[float, float]]]()
    runs, rounds = (1, (2, 4)) if quick else (6, (10, 20, 30, 40, 50))
    cases = (("llama-2-7b", "setting 1", "8 %"), ("llama-30b", "setting 3", "23 %"))
    for model, name, printed in cases[:1] if quick else cases:
        costs = _costs(tables.setting(name, model), model)
        for number in rounds:
            ours = _mfu(costs, plan_hexiscale(costs, costs.time_objective(), tables.BATCH, (1,), number))
            drawn = [
                _mfu(
                    costs,
                    plan_hexiscale(
                        costs,
                        costs.time_objective(),
                        tables.BATCH,
                        (1,),
                        number,
                        divide=_random_groups(random.Random(run)),
                    ),
                )
                for run in range(runs)
            ]
            average = sum(drawn) / len(drawn)
            lines.setdefault(f"{model}, partition", []).append((number, ours))
            lines.setdefault(f"{model}, random", []).append((number, average))
            gap = f"{ours / average - 1:+.0%}" if average else "-"
            rows.append(
                (model, str(number), f"{ours:.1f}", f"{average:.1f}", gap, printed if number == rounds[-1] else "")
            )
    return Figure(
        name="Figure 8",
        shows="Estimated MFU by rounds of the search, with the graph partition and with random groups in its place "
        f"(mean of {runs} runs).",
        columns=("model", "rounds", "partition", "random", "gap", "gap, print"),
        rows=rows,
        decides=f"how random groups are drawn; here balanced by compute. {CODE}",
        lines=lines,
        axes=("rounds", "MFU, %", ""),
    )


def search_time(quick: bool) -> Figure:
    """Figure 9: run time and estimated MFU by devices."""
    from benchmarks.pipelines_planner import fleet

    rows, lines = [], dict[str, list[tuple[float, float]]]()
    for devices in (64,) if quick else (64, 128, 192, 256, 320):
        costs = _costs(fleet(devices), "llama-30b")
        cells = []
        for name, search in (("rebuilt", plan_hexiscale), ("ours", None)):
            started = time.process_time()
            batch = 2 * devices
            plan = _ours(costs, batch) if search is None else search(costs, costs.time_objective(), batch, (1,))
            seconds = time.process_time() - started
            lines.setdefault(name, []).append((devices, seconds))
            cells += [f"{seconds:.1f}", f"{_mfu(costs, plan, batch):.1f}"]
        rows.append((str(devices), "below 120 on 12 cores", *cells))
    return Figure(
        name="Figure 9",
        shows="Run time of 50 rounds of the search, CPU seconds of one core, and estimated MFU.",
        columns=("GPUs", "print", "HexiScale rebuilt, s", "MFU, %", "ours, s", "MFU, %"),
        rows=rows,
        decides="the mix of devices, which is not printed: two nodes of 3090, five of 4090 and one of A800 in eight.",
        lines=lines,
        axes=("GPUs", "CPU seconds", ""),
    )


def large_cluster(quick: bool) -> Figure:
    """Figure 10 with Table 4: 240 GPUs."""
    cluster = load_cluster("hexiscale-240")
    rows = []
    for model, printed in (("llama-30b", "1.6, 2.7"), ("llama-2-70b", "1.9, 3.3"))[: 1 if quick else 2]:
        costs, batch = _costs(cluster, model), 480
        grid = best_grid(costs, costs.time_objective(), batch, (1, 2))[1]
        tangram = plan_tangram(costs, costs.time_objective(), batch, (1,))
        found = {
            "rebuilt": plan_hexiscale(costs, costs.time_objective(), batch, (1,), 2 if quick else 50),
            "Tangram": None if tangram is None else tangram.candidate,
            "ours": _ours(costs, batch),
            "grid": grid,
        }
        rows.append((model, printed, *(f"{_mfu(costs, plan, batch):.1f}" for plan in found.values())))
    return Figure(
        name="Figure 10",
        shows="240 GPUs of three kinds (Table 4): MFU in %. The print has HexiScale's gain over Metis (1.6 and 1.9) "
        "and "
        "over Galvatron (2.7 and 3.3), and 17.1 % for Metis in setting 3.",
        columns=(
            "model",
            "over Metis, Galvatron, print",
            "HexiScale rebuilt",
            "Tangram rebuilt",
            "ours",
            "uniform grid",
        ),
        rows=rows,
        decides="the rivals. Galvatron is not rebuilt; a uniform grid with equal layers stands in, and has no plan "
        "that "
        "fits where the MFU is 0. Metis' own search runs under `python -m benchmarks.peers`, and ends with a KeyError "
        "in "
        f"setting 3. {CODE}",
    )


def network(quick: bool) -> Figure:
    """Appendix E: other rates between machines."""
    rows = []
    for rate, printed in ((0.5, 30.1), (0.7, 32.3), (5.0, 36.4))[: 1 if quick else None]:
        costs = _costs(_with_network(rate), "llama-2-7b")
        found = plan_hexiscale(costs, costs.time_objective(), tables.BATCH), _ours(costs)
        rows.append((f"{rate:g} GB/s", f"{printed:.1f}", *(f"{_mfu(costs, plan):.1f}" for plan in found)))
    return Figure(
        name="Appendix E",
        shows="7B in setting 1 by rate between machines: simulated MFU, %.",
        columns=("between machines", "print", "HexiScale rebuilt", "ours"),
        rows=rows,
        decides=CODE,
    )


def _with_network(rate: float) -> Cluster:
    """Setting 1 (section 5.1) with another network."""
    kinds: Sequence[tuple[str, int, int]] = (("RTX-3080Ti", 1, 24), ("RTX-3090", 1, 24), ("RTX-4090", 3, 32))
    nodes = [
        {"name": name, "device": name, "count": 8, "repeat": repeat, "link": {"bandwidth_gb_per_s": link}}
        for name, repeat, link in kinds
    ]
    return cluster_from_dict({"nodes": nodes, "network": {"bandwidth_gb_per_s": rate, "latency_us": 50}})


PAPER = Paper(
    key="hexiscale",
    title="HexiScale (arXiv:2409.01143)",
    makers={
        "Figure 1": case_study,
        "Figure 6": ablation,
        "Table 2": found_strategy,
        "Table 3": simulated_mfu,
        "Figure 8": convergence,
        "Figure 9": search_time,
        "Figure 10": large_cluster,
        "Table 6": programme,
        "Appendix E": network,
    },
    left_out={
        "Figures 2 and 3": "drawings of the two phases.",
        "Figures 4 and 5": "measured on rented GPUs. The like on ranks of a CPU: `python -m benchmarks.pipelines`.",
        "Figures 7 and 11": "measured breakdowns of systems on rented GPUs, drawn without numbers.",
        "Table 1": "notation.",
        "Table 4": "the 240 GPUs, `ds_configs/clusters/hexiscale-240.yaml`; used in Figure 10.",
        "Table 5": "a plan of Metis; data parallelism inside stages of one pipeline, which has no counterpart here.",
    },
)
