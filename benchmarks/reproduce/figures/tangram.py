"""Tangram's figures under the calibrated cost model: islands, pruning, composition, mixed clusters, tolerance."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from benchmarks.reproduce import tangram as rebuilt
from benchmarks.reproduce.figures.figure import Figure, Paper
from benchmarks.reproduce.tangram import SIZES, WORK, nodes_of
from ds_hetero.cluster import Cluster, cluster_from_dict
from ds_hetero.cost.stages.calibrated import CalibratedStageCosts
from ds_hetero.errors import PlanError
from ds_hetero.models import load_model
from ds_hetero.planner.pipelines.baselines import best_grid
from ds_hetero.planner.pipelines.planning import plan_pipelines
from ds_hetero.planner.published.tangram import TangramVariant, plan_tangram
from ds_hetero.planner.published.tangram.islands import form_islands

BASELINE_NOTE = (
    "We did not rebuild Aceso and Alpa; the best uniform grid, with or without recomputation, replaces them."
)


def islands(quick: bool) -> Figure:
    """Rebuild figure 2, which devices become islands."""
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
        title="GPUs that form islands",
        shows=(
            "Islands (groups of similar GPUs) at a tolerance of 0.2. The paper merges H100 SXM and H100 NVL, "
            "whose memory bandwidths differ by 15 %, and keeps three generations apart."
        ),
        columns=("island", "devices", "number of GPUs"),
        rows=rows,
        decides=(
            "We use datasheet values. The paper gives an H200 1979 TFLOP/s, which is its rate with sparsity, so "
            "the paper's H200 differs from an H100 in compute. In our datasheets the two differ in memory only. "
            "The second phase merges islands only while no sum of compute, memory or bandwidth decreases. An "
            "H100 PCIe has over 20 % less compute than an H100 SXM."
        ),
    )


def pruning(quick: bool) -> Figure:
    """Rebuild figure 3 and section 6.5, calls of the parallelizer."""
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
        title="calls saved by pruning",
        shows="Calls of the inner parallelizer under more and more pruning rules. The plan stays the same.",
        columns=("rules", "paper, relative", "calls, ours", "ours, relative", "step, s"),
        rows=rows,
        decides=(
            "The model and the cluster decide: here the rules on memory (Eq. 6 with Z_max = 3) and on interfaces "
            "exclude nothing."
        ),
        command="python -m benchmarks.reproduce.tangram",
    )


def example(quick: bool) -> Figure:
    """Rebuild the worked example, 80 layers on 64 H100 and 128 A100."""
    result = rebuilt.example()
    rows = [("paper", "about 48", "32", ""), ("balanced", *(f"{part:.1f}" for part in result["balanced"]), "")]
    plans = {"Algorithm 2": result["algorithm_2"], "exact composition": result["exact"]}
    rows += [(name, *map(str, plan["layers"]), f"{plan['step_s']:.3f}") for name, plan in plans.items()]
    return Figure(
        name="Worked example",
        title="layers of two islands",
        shows="Layers of a 70B model on an island of 64 H100 and an island of 128 A100.",
        columns=("plan", "H100", "A100", "step, s"),
        rows=rows,
        decides="Our plans balance the rates of the calibrated cost model; the paper balances peaks.",
        command="python -m benchmarks.reproduce.tangram",
    )


def composition(quick: bool) -> Figure:
    """Compare algorithm 2 with the exact composition."""
    result = rebuilt.composition(20 if quick else 200)
    return Figure(
        name="Algorithm 2",
        title="distance from the exact optimum",
        shows="Pipelines of the paper's dynamic programme beside exact ones, on random islands.",
        columns=("pipelines", "not optimal", "worst gap"),
        rows=[(str(result["pipelines"]), str(result["missed"]), f"{result['worst']:.1%}")],
        decides=(
            "No assumption decides. The programme keeps one state per number of layers, which is not enough "
            "(`ds_hetero/planner/published/tangram` explains why)."
        ),
        command="python -m benchmarks.reproduce.tangram",
    )


def throughput(quick: bool) -> Figure:
    """Rebuild figure 5, 70B on 512 GPUs, A100 and H100."""
    size = 1 if quick else 32
    cluster = nodes_of(("H100-SXM-80GB", 8, size), ("A100-SXM-80GB", 8, size), network=50)
    rows = [("paper, relative to Aceso", "2.3", "1.0", "Metis 0.43, Sailor 0.52, Alpa 0.95")]
    rows += _over_grid("llama-3.1-70b", cluster, 32 if quick else 1024)
    return Figure(
        name="Figure 5",
        title="70B on 512 GPUs",
        shows=(
            f"Throughput of a 70B model on {16 * size} GPUs, half H100 and half A100, relative to the best "
            "uniform grid."
        ),
        columns=("case", "Tangram", "grid (paper: Aceso)", "ours (paper: others)"),
        rows=rows,
        decides=(
            f"The baseline decides. {BASELINE_NOTE} The paper does not print the mix and the network; we take half "
            "H100, "
            "half A100 and 50 GB/s per GPU."
        ),
    )


def mixture(quick: bool) -> Figure:
    """Rebuild Mixtral 8x22B on H100 and A100."""
    size = 1 if quick else 4
    cluster = nodes_of(("H100-SXM-80GB", 8, size), ("A100-SXM-80GB", 8, size), network=50)
    rows = [("paper: 1.8 over Metis", "", "", "")]
    model_name, batch = "mixtral-8x7b" if quick else "mixtral-8x22b", 32 if quick else 128
    alone, divided = _steps_s(model_name, cluster, batch), _steps_s(model_name, cluster, batch, divides_experts=True)
    base_s = alone.grid_s or alone.tangram_s or alone.ours_s
    rows.append((f"{model_name}, {cluster.num_ranks} GPUs, experts as other weights", *alone.over(base_s)))
    rows.append(("the same, experts divided inside islands", *divided.over(base_s)))
    return Figure(
        name="Mixtral",
        title="a mixture of experts",
        shows=(
            f"Throughput of a mixture of experts on {8 * size} H100 and {8 * size} A100, relative to the best "
            "uniform grid without expert parallelism. The paper gains 1.8 over Metis by expert parallelism inside "
            "islands; Metis has none."
        ),
        columns=("case", "Tangram", "grid", "ours"),
        rows=rows,
        decides=(
            "The paper does not print the cluster, and Metis is not the grid: tensor parallelism of the grid splits "
            "experts like other weights, so that it needs no expert parallelism to fit. In the second row, devices of "
            "a stage that share sequences divide its experts equally, and tokens travel between them over NVLink; "
            "every expert gets equally many tokens. These plans are predictions alone: jobs divide experts of one "
            "replica, not of pipelines."
        ),
    )


class _Steps(NamedTuple):
    """Seconds of a step: Tangram, the best uniform grid, ours; None where nothing fits."""

    tangram_s: float | None
    grid_s: float | None
    ours_s: float | None

    def over(self, base_s: float | None) -> list[str]:
        """Return the speed of each over a step of ``base_s``, with its step."""
        texts = []
        for step_s in self:
            is_known = step_s is not None and base_s is not None
            texts.append(f"{base_s / step_s:.2f} ({step_s:.2f} s)" if is_known else "nothing fits")
        return texts


def _over_grid(model_name: str, cluster: Cluster, batch: int) -> list[tuple[str, ...]]:
    """Return speeds of Tangram and of ours over the best uniform grid."""
    steps = _steps_s(model_name, cluster, batch)
    base_s = steps.grid_s or steps.tangram_s or steps.ours_s
    return [(f"{model_name}, {cluster.num_ranks} GPUs", *steps.over(base_s))]


def _steps_s(model_name: str, cluster: Cluster, batch: int, *, divides_experts: bool = False) -> _Steps:
    """Return the steps of Tangram, of the grid and of ours, each with its better choice of recomputation.

    Args:
        divides_experts: whether plans may divide the experts of a stage among its devices.
    """
    model = load_model(model_name)
    models = [
        CalibratedStageCosts(
            cluster, model, replace(WORK, activation_checkpointing=recomputes), divides_experts=divides_experts
        )
        for recomputes in (True, False)
    ]
    grids = [best_grid(costs, costs.time_objective(), batch, SIZES)[0].step_s for costs in models]
    plans = [plan_tangram(costs, costs.time_objective(), batch, SIZES) for costs in models]
    grid_s = min((step for step in grids if step is not None), default=None)
    tangram_s = min((plan.candidate.step_s for plan in plans if plan is not None), default=None)
    ours = []
    for costs in models if divides_experts else (None,):  # None: both choices of recomputation, and tensor groups
        with contextlib.suppress(PlanError):
            ours.append(plan_pipelines(cluster, model, WORK, batch, costs=costs, micro_batch_sizes=SIZES).step_s)
    return _Steps(tangram_s, grid_s, min(ours, default=None))


def tolerance(quick: bool) -> Figure:
    """Measure suggestion E: the step as a function of the tolerance of islands."""
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
        title="step time by tolerance",
        shows=(
            "Step time of a 13B model by the tolerance tau of islands, on six nodes with GPUs of 312, 290, 260, "
            "220, 170 and 120 TFLOP/s. The review of the paper asks for this; the paper does not have it."
        ),
        columns=("tau", "islands", "step, s"),
        rows=rows,
        decides="The GPUs are invented.",
        lines={"Tangram": points},
        axes=("tau", "step, s", ""),
    )


def extreme(quick: bool) -> Figure:
    """Rebuild failure 1 of the review, A10 beside H100."""
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
        title="GPUs that differ by a factor of eight",
        shows=(
            "A 13B model on H100 and A10. The review expects that Tangram gains little over the H100 alone, "
            "because every island must take part."
        ),
        columns=("devices", "Tangram, s", "its layers by island", "ours, s", "idle GPUs in ours"),
        rows=rows,
        decides="Our plans may leave GPUs idle; those of Tangram may not.",
    )


def homogeneous(quick: bool) -> Figure:
    """Compare with the best homogeneous planner on equal devices."""
    cases = dict(list(rebuilt.HOMOGENEOUS.items())[: 1 if quick else None])
    return _cases(
        "Homogeneous clusters",
        "equal GPUs",
        "In the paper, Tangram is as fast as the best planner for equal GPUs. Our grids have context parallelism, "
        "which neither Tangram's inner parallelizer nor the paper's planners have; it decides for 64 H100.",
        cases,
    )


def mixed(quick: bool) -> Figure:
    """Plan for the mixed clusters of the other papers."""
    cases = dict(list(rebuilt.MIXED.items())[-1 if quick else 0 :])
    return _cases(
        "Mixed clusters",
        "clusters of the other papers",
        "The paper prints a gain of 2.3 over Metis on 512 GPUs (Figure 5). These are other clusters.",
        cases,
    )


def _cases(name: str, title: str, shows: str, cases: dict[str, tuple[rebuilt.MakeCluster, str, int]]) -> Figure:
    rows = []
    for row in rebuilt.beside_grid(cases):
        steps = ("-" if row[key] is None else f"{row[key]:.3f}" for key in ("grid_s", "tangram_s", "ours_s"))
        rows.append((row["name"], *steps))
    return Figure(
        name=name,
        title=title,
        shows=shows,
        columns=("case", "best grid, s", "Tangram, s", "ours, s"),
        rows=rows,
        decides=f"The baseline decides. {BASELINE_NOTE}",
        command="python -m benchmarks.reproduce.tangram",
    )


PAPER = Paper(
    key="tangram",
    name="Tangram",
    title="Tangram (arXiv:2606.16907, by its review)",
    result=(
        "For a 70B model on 64 H100 and 128 A100, Tangram's plan takes 11.113 s per step, ours 10.580 s, and the "
        "best uniform grid 21.576 s. On equal GPUs, ours is at least as fast as the best grid, and Tangram's is so "
        "where the grid has no context parallelism."
    ),
    setup=(
        'We have a review of the paper, not the paper; "paper" is what the review quotes. Our numbers use the '
        "calibrated cost model of ds_hetero. `python -m benchmarks.peers` runs the searches of Metis and Sailor."
    ),
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
        "Figures 1 and 4": "They are drawings.",
        "T5": "Neither the paper's slices nor ours describe encoders and decoders with cross-attention.",
        "Qwen3-MoE": "The paper prints no figure for it.",
    },
)
