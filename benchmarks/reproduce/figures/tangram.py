"""Tangram's figures under the calibrated cost model: islands, pruning, composition, mixed clusters, tolerance."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from benchmarks.reproduce import tangram as rebuilt
from benchmarks.reproduce.figures.figure import Figure, Paper
from benchmarks.reproduce.tangram import SIZES, WORK, nodes_of
from ds_hetero.cluster import Cluster, cluster_from_dict
from ds_hetero.cost.stages.calibrated import CalibratedStageCosts
from ds_hetero.errors import PlanError
from ds_hetero.models import load_model
from ds_hetero.planner.pipelines.planning import plan_pipelines
from ds_hetero.planner.pipelines.rivals import best_grid
from ds_hetero.planner.published.tangram import TangramVariant, plan_tangram
from ds_hetero.planner.published.tangram.islands import form_islands

RIVALS = (
    "Metis and Sailor run under `python -m benchmarks.peers`; Aceso and Alpa are not rebuilt, and the best uniform "
    "grid "
    "with or without recomputation stands in for them."
)


def islands(quick: bool) -> Figure:
    """Figure 2: which devices become islands."""
    cluster = nodes_of(
        ("H100-SXM-80GB", 8, 1), ("H100-PCIe-80GB", 8, 1), ("A100-SXM-80GB", 8, 1), ("H200-SXM-141GB", 8, 1)
    )
    costs = CalibratedStageCosts(cluster, load_model("llama-3.1-70b"), WORK)
    rows = []
    for i, island in enumerate(form_islands(costs.pools)):
        names = sorted({costs.pools.kinds[pool.kind].device.name for pool in island.pools})
        rows.append((str(i), ", ".join(names), str(island.num_devices)))
    return Figure(
        name="Figure 2",
        shows="Islands at a tolerance of 0.2. The print merges H100 SXM and H100 NVL, which differ by 15 % in memory "
        "bandwidth, and keeps three generations apart.",
        columns=("island", "devices", "number"),
        rows=rows,
        decides="datasheet values; the print takes 1979 TFLOP/s for an H200, which is its rate with sparsity, so that "
        "there an H200 is no neighbour of an H100 in compute. Here it is none in memory, and the second phase merges "
        "islands only as long as no sum of compute, memory and its bandwidth falls; an H100 PCIe has over 20 % less "
        "compute.",
    )


def pruning(quick: bool) -> Figure:
    """Figure 3 and section 6.5: calls of the parallelizer."""
    names = list(rebuilt.RULES)[-1:] if quick else list(rebuilt.RULES)
    costs = CalibratedStageCosts(rebuilt.example_cluster(), load_model("llama-3.1-70b"), WORK)
    printed = {"none": "26", "1-3 memory": "1.5", "1-4 interface": "1"}
    rows, last = [], 0
    for name in reversed(names):
        plan = plan_tangram(costs, costs.time_objective(), rebuilt.BATCH, SIZES, rules=rebuilt.RULES[name])
        assert plan is not None
        last = last or plan.calls
        step = f"{plan.candidate.step_s:.3f}"
        rows.append((name, printed.get(name, ""), str(plan.calls), f"{plan.calls / last:.1f}", step))
    return Figure(
        name="Figure 3",
        shows="Calls of the inner parallelizer under more and more rules, over those with all four; the plan stays.",
        columns=("rules", "print", "calls here", "over all four", "step, s"),
        rows=rows,
        decides="the model and the cluster: memory (Eq. 6 with Z_max = 3) and interfaces exclude nothing here.",
        command="python -m benchmarks.reproduce.tangram",
    )


def example(quick: bool) -> Figure:
    """The worked example: 80 layers on 64 H100 and 128 A100."""
    found = rebuilt.example()
    rows = [("print", "about 48", "32", ""), ("balanced", *(f"{part:.1f}" for part in found["balanced"]), "")]
    plans = {"Algorithm 2": found["algorithm_2"], "exact composition": found["exact"]}
    rows += [(name, *map(str, plan["layers"]), f"{plan['step_s']:.3f}") for name, plan in plans.items()]
    return Figure(
        name="Worked example",
        shows="70B on 64 H100 and 128 A100: layers on either island.",
        columns=("plan", "H100", "A100", "step, s"),
        rows=rows,
        decides="the calibrated cost model's rates; the print balances peaks.",
        command="python -m benchmarks.reproduce.tangram",
    )


def composition(quick: bool) -> Figure:
    """Algorithm 2 against the exact composition."""
    found = rebuilt.composition(20 if quick else 200)
    return Figure(
        name="Algorithm 2",
        shows="The dynamic programme against the exact composition on random islands.",
        columns=("pipelines", "not optimal", "worst gap"),
        rows=[(str(found["pipelines"]), str(found["missed"]), f"{found['worst']:.1%}")],
        decides="nothing: it keeps one state for every number of layers, which is not enough (its module says why).",
        command="python -m benchmarks.reproduce.tangram",
    )


def throughput(quick: bool) -> Figure:
    """Figure 5: 70B on 512 GPUs, A100 and H100."""
    size = 1 if quick else 32
    cluster = nodes_of(("H100-SXM-80GB", 8, size), ("A100-SXM-80GB", 8, size), network=50)
    rows = [("print, relative to Aceso", "2.3", "1.0", "Metis 0.43, Sailor 0.52, Alpa 0.95")]
    rows += _beside("llama-3.1-70b", cluster, 32 if quick else 1024)
    return Figure(
        name="Figure 5",
        shows=f"70B on {16 * size} GPUs, half H100 and half A100: throughput over that of the best uniform grid.",
        columns=("", "Tangram", "grid (print: Aceso)", "ours and others"),
        rows=rows,
        decides=f"the rival. {RIVALS} The mix and the network are not printed: half and half, 50 GB/s a GPU.",
    )


def mixture(quick: bool) -> Figure:
    """Mixtral 8x22B on H100 and A100."""
    size = 1 if quick else 4
    cluster = nodes_of(("H100-SXM-80GB", 8, size), ("A100-SXM-80GB", 8, size), network=50)
    rows = [("print: 1.8 over Metis", "", "", "")]
    rows += _beside("mixtral-8x7b" if quick else "mixtral-8x22b", cluster, 32 if quick else 128)
    return Figure(
        name="Mixtral",
        shows=f"A mixture of experts on {8 * size} H100 and as many A100: throughput over the best uniform grid. "
        "The print has 1.8 over Metis, from expert parallelism inside islands.",
        columns=("", "Tangram", "grid", "ours"),
        rows=rows,
        decides="expert parallelism, which is neither planned nor run here: experts are cut by tensor parallelism like "
        "other weights. So this is Tangram without what the print says its gain comes from.",
    )


def _beside(model_name: str, cluster: Cluster, batch: int) -> list[tuple[str, str, str, str]]:
    """Steps of the grid over those of Tangram and ours, with the better choice of recomputation for each."""
    model = load_model(model_name)
    models = [
        CalibratedStageCosts(cluster, model, replace(WORK, activation_checkpointing=choice)) for choice in (True, False)
    ]
    grids = [best_grid(costs, costs.time_objective(), batch, SIZES)[0].step_s for costs in models]
    plans = [plan_tangram(costs, costs.time_objective(), batch, SIZES) for costs in models]
    grid_s = min((step for step in grids if step is not None), default=None)
    tangram_s = min((plan.candidate.step_s for plan in plans if plan is not None), default=None)
    try:
        ours_s = plan_pipelines(cluster, model, WORK, batch, micro_batch_sizes=SIZES).step_s
    except PlanError:
        ours_s = None
    base = grid_s or tangram_s or ours_s

    def over(step_s: float | None) -> str:
        return "nothing fits" if step_s is None or base is None else f"{base / step_s:.2f} ({step_s:.2f} s)"

    return [(f"{model_name}, {cluster.num_ranks} GPUs", over(tangram_s), over(grid_s), over(ours_s))]


def tolerance(quick: bool) -> Figure:
    """Suggestion E: how the step follows the tolerance of islands."""
    devices = {
        f"bin{i}": {"peak_tflops": tflops, "memory_gib": 80, "memory_bandwidth_gb_per_s": 2000}
        for i, tflops in enumerate((312, 290, 260, 220, 170, 120))
    }
    nodes = [{"name": name, "device": name, "count": 8, "link": {"bandwidth_gb_per_s": 300}} for name in devices]
    network = {"bandwidth_gb_per_s": 25, "latency_us": 10}
    cluster = cluster_from_dict({"nodes": nodes, "network": network, "devices": devices})
    costs = CalibratedStageCosts(cluster, load_model("llama-2-13b"), WORK)
    rows, points = [], []
    for tau in (0.05, 0.4) if quick else (0.05, 0.08, 0.1, 0.15, 0.2, 0.3, 0.4):
        plan = plan_tangram(costs, costs.time_objective(), 96, (1,), variant=TangramVariant(tau=tau))
        step_s = float("nan") if plan is None else plan.candidate.step_s
        points.append((tau, step_s))
        rows.append((f"{tau:g}", str(len(form_islands(costs.pools, tau))), f"{step_s:.3f}"))
    return Figure(
        name="Tolerance",
        shows="13B on six nodes whose devices are 312, 290, 260, 220, 170 and 120 TFLOP/s: step by tolerance tau. The "
        "review asks for this; the paper has none.",
        columns=("tau", "islands", "step, s"),
        rows=rows,
        decides="the devices, which are made up.",
        lines={"Tangram": points},
        axes=("tau", "step, s", ""),
    )


def extreme(quick: bool) -> Figure:
    """Failure 1 of the review: A10 beside H100."""
    both = nodes_of(("H100-SXM-80GB", 8, 2), ("A10", 8, 2))
    alone = nodes_of(("H100-SXM-80GB", 8, 2))
    rows = []
    for name, cluster in (("16 H100 and 16 A10", both), ("16 H100", alone)):
        costs = CalibratedStageCosts(cluster, load_model("llama-2-13b"), WORK)
        plan = plan_tangram(costs, costs.time_objective(), 64, (1,))
        ours = plan_pipelines(cluster, load_model("llama-2-13b"), WORK, 64, costs=costs, micro_batch_sizes=(1,))
        layers: Sequence[int] = () if plan is None else plan.layers
        step = "-" if plan is None else f"{plan.candidate.step_s:.3f}"
        rows.append((name, step, ", ".join(map(str, layers)), f"{ours.step_s:.3f}", str(len(ours.idle_ranks))))
    return Figure(
        name="A10 beside H100",
        shows="13B where devices differ by a factor of eight. The review expects a plan that is little faster than "
        "H100 "
        "alone, since every island has to take part.",
        columns=("devices", "Tangram, s", "its layers by island", "ours, s", "idle in ours"),
        rows=rows,
        decides="ours may leave devices idle, Tangram may not.",
    )


def homogeneous(quick: bool) -> Figure:
    """Equal devices: as good as the best homogeneous planner."""
    cases = dict(list(rebuilt.HOMOGENEOUS.items())[: 1 if quick else None])
    return _cases("Homogeneous clusters", "Equal devices: the print is equal to the best homogeneous planner.", cases)


def mixed(quick: bool) -> Figure:
    """Mixed clusters of the other papers."""
    cases = dict(list(rebuilt.MIXED.items())[-1 if quick else 0 :])
    return _cases("Mixed clusters", "The print has 2.3 over Metis at 512 GPUs (Figure 5); here other clusters.", cases)


def _cases(name: str, shows: str, cases: dict[str, tuple[rebuilt.MakeCluster, str, int]]) -> Figure:
    rows = []
    for row in rebuilt.beside_grid(cases):
        steps = ("-" if row[key] is None else f"{row[key]:.3f}" for key in ("grid_s", "tangram_s", "ours_s"))
        rows.append((row["name"], *steps))
    return Figure(
        name=name,
        shows=shows,
        columns=("case", "best grid, s", "Tangram, s", "ours, s"),
        rows=rows,
        decides=RIVALS,
        command="python -m benchmarks.reproduce.tangram",
    )


PAPER = Paper(
    key="tangram",
    title="Tangram (arXiv:2606.16907, by its review)",
    makers={
        "Figure 2": islands,
        "Figure 3": pruning,
        "Worked example": example,
        "Algorithm 2": composition,
        "Figure 5": throughput,
        "Homogeneous clusters": homogeneous,
        "Mixed clusters": mixed,
        "Mixtral": mixture,
        "Tolerance": tolerance,
        "A10 beside H100": extreme,
    },
    left_out={
        "Figures 1 and 4": "drawings.",
        "T5": "encoders and decoders with cross-attention; neither the paper's slices nor ours describe them.",
        "Qwen3-MoE": "no figure is printed.",
    },
)
