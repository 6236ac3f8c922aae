"""Zeppelin's figures from its simulator: costs by length, zones, throughput, scalability, ablation, traces."""

from __future__ import annotations

import random
from dataclasses import replace
from functools import cache
from math import inf
from statistics import mean
from typing import Any

from benchmarks.reproduce import zeppelin as simulator
from benchmarks.reproduce import zeppelin_paper as paper
from benchmarks.reproduce.figures.figure import Figure, Paper
from benchmarks.reproduce.zeppelin_setting import BACKWARD_COMPUTE, Setting
from benchmarks.reproduce.zeppelin_simulator import METHODS, round_s
from ds_hetero.cluster.files import load_cluster
from ds_hetero.cluster.topology import Cluster
from ds_hetero.cost.stages.calibrated import CalibratedStageCosts
from ds_hetero.cost.stages.stage import DeviceBlock, PlacedPipeline, PoolPart
from ds_hetero.cost.workload import Workload
from ds_hetero.models.shapes import ModelSpec
from ds_hetero.planner.documents.length_distributions import BINS, DISTRIBUTIONS
from ds_hetero.planner.expert_choice import divisions
from ds_hetero.planner.pipeline_search.given_layers import evaluate_with_layers
from ds_hetero.planner.pipeline_search.stage_schedules import ScheduleFinder
from ds_hetero.planner.planning import plan
from ds_hetero.planner.published.zeppelin import CAPACITY_OVER_MEAN, zeppelin_rings
from ds_hetero.values.baselines import ring

BATCHES, QUICK_BATCHES = 20, 2
MIXTURE = (
    "The paper prints neither the sizes of 8x550M nor the cost of its routing. We take a LLaMA of 551 million weights "
    "with eight MLPs in each layer, two of them for each token, and equally many tokens for each MLP. Tokens travel to "
    "their experts inside a node, over NVLink."
)
_SHOWN = ("llama", "hybrid", "with remap", "ours")
_PLANNED = {
    "sequence": "sequence alone",
    "ring": "TP 2 x ring",
    "groups": "tensor groups of 2",
    "experts": "experts divided",
}
FITTED = (
    "We use the three fitted constants. At nominal rates, all gains are higher, and Zeppelin's is slightly above ours."
)
_LABELS = tuple("<1K" if i == 0 else f"{1 << (i - 1)}-{1 << i}K" for i in range(len(BINS)))


def _batches(name: str, tokens: int, count: int) -> list[list[int]]:
    generator = random.Random(simulator.SEED)
    return [DISTRIBUTIONS[name].batch(tokens, generator) for _ in range(count)]


def _bin_of(length: int) -> int:
    return next((i for i, (_, most) in enumerate(BINS) if length < most), len(BINS) - 1)


def cost_by_length(quick: bool) -> Figure:
    """Rebuild figure 3: wasted computation of packing, and superfluous messages of even context parallelism."""
    rows = []
    for name in DISTRIBUTIONS:
        pairs, tokens, packed = [0.0] * len(BINS), [0.0] * len(BINS), [0.0] * len(BINS)
        for batch in _batches(name, 65_536, QUICK_BATCHES if quick else 200):
            for n in batch:
                pairs[_bin_of(n)] += n * n / 2
                tokens[_bin_of(n)] += n
                packed[_bin_of(n)] += n * max(4096, n) / 2  # in a pack of a rank's 4K tokens without a mask
        for what, values in (("attention", pairs), ("packed, over attention", packed), ("sent by even CP", tokens)):
            shares = (
                ("-" if not b else f"{a / b:.1f}") if "over" in what else f"{a / sum(values):.1%}"
                for a, b in zip(values, pairs, strict=True)
            )
            rows.append((name, what, *shares))
    return Figure(
        name="Figure 3",
        title="cost of attention by document length",
        shows=(
            "Three costs of attention, by length of the documents: the share of useful attention, the attention "
            "that packing to 4K tokens without masks computes (times the useful attention), and the share of "
            "what even context parallelism sends. The paper draws this without numbers."
        ),
        columns=("data", "cost", *_LABELS),
        rows=rows,
        decides="The documents are drawn from Table 2.",
    )


def zones(quick: bool) -> Figure:
    """Rebuild figure 5: curves of computing and sending, and their crossings."""
    where = Setting.fitted("3b", "A", 1, 16)
    lengths = [1 << shift for shift in range(7, 19)]
    lines = {
        "attention on one GPU": [(n, n * n / 2 * where.pair_s) for n in lengths],
        "send within a node": [(n, where.wire_s(n, crosses=False, routed=False)) for n in lengths],
        "send between nodes": [(n, where.wire_s(n, crosses=True, routed=False)) for n in lengths],
    }
    inside, between = (2 * where.wire_s(1, crosses=crosses, routed=False) / where.pair_s for crosses in (False, True))
    return Figure(
        name="Figure 5",
        title="where zones begin",
        shows=(
            "A longer document belongs to a wider zone. A zone begins where attention on an A800 takes as long "
            "as sending the keys and values. The paper draws the curves; their crossings have no numbers."
        ),
        columns=("zone", "from tokens"),
        rows=[("intra-node", f"{inside:,.0f}"), ("inter-node", f"{between:,.0f}")],
        decides=(
            "The paper does not name the model behind the drawing. We take one layer of the 3B model (hidden "
            "size 3200), forward."
        ),
        lines=lines,
        axes=("tokens", "seconds", "log both"),
    )


@cache
def _cells(quick: bool) -> list[dict[str, Any]]:
    """Return the cells of figure 8, with fitted constants and with nominal rates; quick, one for each model."""
    count = QUICK_BATCHES if quick else BATCHES
    return [simulator.cell(*which, count) for which in simulator.cells()[:: 9 if quick else 1]]


def throughput(quick: bool) -> Figure:
    """Rebuild figure 8, 36 cells."""
    cells, rows = _cells(quick), []
    for method in METHODS:
        printed = f"{paper.GAIN_MEAN:.2f}, {paper.GAIN_BEST:.2f}" if method == "with remap" else ""
        by_rates = (simulator.summary(cells, rates)[method] for rates in ("fitted", "nominal"))
        rows.append((method, printed, *(f"{each['mean']:.2f}, {each['best']:.2f}" for each in by_rates)))
    return Figure(
        name="Figure 8",
        title="gains over Transformer Engine",
        shows=(
            "Mean and best gain over the context parallelism of Transformer Engine (TE), for 7B, 13B, 30B and the "
            "mixture of experts 8x550M, three data sets and three contexts."
        ),
        columns=("method", "paper", "ours, fitted constants", "ours, nominal rates"),
        rows=rows,
        decides=f"{FITTED} {MIXTURE}",
        command="python -m benchmarks.reproduce.zeppelin",
    )


def by_model(quick: bool) -> Figure:
    """Rebuild figure 8 model by model: cells with tensor parallelism of 2, and those of the mixture of experts."""
    cells = [cell for cell in _cells(quick) if cell["rates"] == "fitted"]
    rows = []
    for model, machine, tensor_parallel in paper.CELLS:
        gains = [cell["gain"] for cell in cells if cell["model"] == model]
        inside = f"TP {tensor_parallel}" if tensor_parallel > 1 else "-"
        texts = (f"{mean(g[m] for g in gains):.2f}, {max(g[m] for g in gains):.2f}" for m in _SHOWN)
        rows.append((model, machine, inside, *texts))
    return Figure(
        name="Figure 8 by model",
        title="tensor parallelism and experts",
        shows=(
            "Mean and best gain over TE of the cells of each model, with the fitted constants. 13B and 30B have tensor "
            "parallelism of 2 beside context parallelism. The paper draws the cells without numbers. It says that 13B "
            "gains more than 7B, and that LLaMA's context parallelism is the fastest for 8x550M at 64K tokens. In our "
            "simulator neither is so."
        ),
        columns=("model", "cluster", "inside", *_SHOWN),
        rows=rows,
        decides=MIXTURE,
        command="python -m benchmarks.reproduce.zeppelin",
    )


def planned(quick: bool) -> Figure:
    """Predict the cells with tensor parallelism, and those of the mixture, by the cost model of ds_hetero."""
    rows = []
    for model_name, machine, tensor_parallel in paper.CELLS[1:]:
        model = paper.MODELS[model_name]
        for context in paper.CONTEXTS[: 1 if quick else None]:
            cluster = _cluster(machine, context // paper.TOKENS_PER_GPU)
            work = Workload(seq_len=context)
            steps_s = {"sequence": plan(cluster, model, work).step_s}
            if tensor_parallel > 1:
                steps_s["ring"], steps_s["groups"] = _grouped_steps_s(cluster, model, work, tensor_parallel)
            else:
                stage_1 = replace(work, zero_stage=1)
                steps_s["experts"] = min(
                    plan(cluster, model, each).step_s for each in divisions(model, stage_1, cluster)
                )
            texts = (f"{context / steps_s[name] / 1e3:.1f}" if name in steps_s else "-" for name in _PLANNED)
            rows.append((model_name, machine, f"{context // 1024}K", str(cluster.num_ranks), *texts))
    return Figure(
        name="Figure 8 planned",
        title="tensor groups and divided experts",
        shows=(
            "Thousands of tokens per second that ds_hetero's cost model predicts for the cells with tensor parallelism "
            "and with experts: sequence parallelism alone under ZeRO-3, tensor parallelism of 2 beside a ring as in "
            "Megatron-LM, [tensor groups](../schedules.md#tensor-groups) of 2 with the planner's schedule, and "
            "[divided experts](../experts.md)."
        ),
        columns=("model", "cluster", "context", "GPUs", *_PLANNED.values()),
        rows=rows,
        decides=(
            "One document fills the context, since jobs with tensor groups cut documents by length. Times include the "
            "optimizer. Recomputation is on or off, whichever is faster. The sizes of 8x550M are ours, as in Figure 8."
        ),
    )


def _cluster(machine: str, num_gpus: int) -> Cluster:
    """Return a cluster of the paper with so many GPUs, in nodes of 8."""
    cluster = load_cluster(f"zeppelin-{machine.lower()}")
    node = cluster.nodes[0]
    return replace(cluster, nodes=tuple(replace(node, name=f"n{i}") for i in range(num_gpus // 8)))


def _grouped_steps_s(cluster: Cluster, model: ModelSpec, work: Workload, size: int) -> tuple[float, float]:
    """Return the steps of all GPUs as tensor groups of ``size``: in a ring of equal shares, and as planned."""
    steps_s: list[list[float]] = [[], []]
    for recomputes in (True, False):
        costs = CalibratedStageCosts(
            cluster, model, replace(work, activation_checkpointing=recomputes), find=ScheduleFinder()
        )
        parts = [PoolPart(pool.kind, pool.node, len(pool.ranks)) for pool in costs.pools.pools]
        block = DeviceBlock.of_parts(parts, size)
        pipelines = [PlacedPipeline((block,), (model.num_layers,), 1, 1)]
        in_ring = costs.with_even_shares()
        in_ring.keep_schedule(
            block, 1, ring(cluster.num_ranks // size, model.num_heads // size, model.num_kv_heads // size)
        )
        for found, each in zip(steps_s, (in_ring, costs), strict=True):
            candidate = evaluate_with_layers(each, each.time_objective(), pipelines)
            found.append(inf if candidate is None else candidate.step_s)
    return min(steps_s[0]), min(steps_s[1])


def scalability(quick: bool) -> Figure:
    """Rebuild figure 9, 3B on 16 to 128 GPUs of cluster A."""
    methods_shown = ("te", "llama", "hybrid", "with remap", "ours")
    rows, lines = [], dict[str, list[tuple[float, float]]]()
    for name in DISTRIBUTIONS:
        for gpus in (16, 64) if quick else (16, 32, 64, 128):
            where, tokens = Setting.fitted("3b", "A", 1, gpus), gpus * paper.TOKENS_PER_GPU
            batches = _batches(name, tokens, QUICK_BATCHES if quick else BATCHES)
            layers = paper.MODELS["3b"].num_layers
            rates = {
                m: tokens / layers / mean(METHODS[m](batch, where) for batch in batches) / 1e3 for m in methods_shown
            }
            rows.append((name, str(gpus), *(f"{rates[method]:.0f}" for method in methods_shown)))
            for method in methods_shown:
                if name == "arxiv":
                    lines.setdefault(method, []).append((gpus, rates[method]))
    return Figure(
        name="Figure 9",
        title="throughput on 16 to 128 GPUs",
        shows=(
            "Thousands of tokens per second of the 3B model on cluster A, with 4K tokens per GPU. In the paper, "
            "TE stays nearly constant and LLaMA's context parallelism is faster. Hybrid DP is slower than "
            "LLaMA's at 16 and 32 GPUs. Zeppelin scales. The picture shows ArXiv."
        ),
        columns=("data", "GPUs", *methods_shown),
        rows=rows,
        decides=f"{FITTED} Only transformer layers are counted.",
        lines=lines,
        axes=("GPUs", "thousand tokens/s", "log"),
    )


def two_clusters(quick: bool) -> Figure:
    """Rebuild figure 10, clusters A and B."""
    rows = []
    for machine in ("A", "B"):
        for name in DISTRIBUTIONS:
            where = Setting.fitted("3b", machine, 1, 32)
            if machine == "B":  # routing over eight NICs at the efficiency that the traces of A give
                nics = paper.MACHINES["B"]["nics"] * paper.FITTED["routed_nics"][0] / paper.MACHINES["A"]["nics"]
                where = Setting(
                    model="3b", machine="B", tensor_parallel=1, gpus=32, attention_share=where.attention_share,
                    routed_nics=nics, remap_s=where.remap_s,
                )  # fmt: skip
            gain = simulator.gains(where, name, 32 * paper.TOKENS_PER_GPU, QUICK_BATCHES if quick else BATCHES)
            rows.append((machine, name, *(f"{gain[m]:.2f}" for m in ("llama", "hybrid", "with remap", "ours"))))
    return Figure(
        name="Figure 10",
        title="gains on clusters A and B",
        shows="Gain over TE for the 3B model on 32 GPUs. In the paper, Zeppelin gains more on cluster A.",
        columns=("cluster", "data", "llama", "hybrid", "Zeppelin", "ours"),
        rows=rows,
        decides=(
            "The paper does not print the rate of the NICs of cluster B; we take 200 Gb/s, as in cluster A. Then "
            "the gain is larger on B, the reverse of the paper: a GPU of B has three times the FLOPs but the "
            "same NIC, and TE waits for the NIC."
        ),
    )


def ablation(quick: bool) -> Figure:
    """Rebuild figure 11, all three data sets."""
    result = {
        name: simulator.ablation("fitted", QUICK_BATCHES if quick else BATCHES, name)["gain"] for name in DISTRIBUTIONS
    }
    rows = [
        (method, f"{printed:.2f}", *(f"{result[name][method]:.2f}" for name in DISTRIBUTIONS))
        for method, printed in paper.ABLATION.items()
    ]
    return Figure(
        name="Figure 11",
        title="gain of each part",
        shows=(
            "Gain over TE of parts of Zeppelin, for the 3B model on 32 GPUs of cluster A. The paper prints "
            "numbers for ArXiv only."
        ),
        columns=("parts", "paper", *DISTRIBUTIONS),
        rows=rows,
        decides=(
            f"{FITTED} Routing and engine together gain less than in the paper, and remapping gains more: the "
            "queues of the simulator run one after the other, so any imbalance of tokens costs its full time."
        ),
        command="python -m benchmarks.reproduce.zeppelin",
    )


def timelines(quick: bool) -> Figure:
    """Rebuild figure 12, rounds of one ring."""
    rows = []
    for name, each in simulator.rounds().items():
        printed, here = ("{:.3g} + {:.3g}, {:.1f}".format(*each[kind]) for kind in ("published", "simulated"))
        rows.append((name, str(each["rounds"]), printed, here))
    return Figure(
        name="Figure 12",
        title="one ring over time",
        shows=(
            "Milliseconds of a ring round for the 3B model on 16 GPUs at 64K tokens: forward + backward of a "
            "round, then all rounds."
        ),
        columns=("ring", "rounds", "paper", "ours"),
        rows=rows,
        decides=(
            "Two of the fitted constants are taken from these traces. The backward passes and the other ring are "
            "predictions."
        ),
        command="python -m benchmarks.reproduce.zeppelin",
    )


def distributions(quick: bool) -> Figure:
    """Rebuild table 2: the distributions, and those of batches drawn from them."""
    rows = []
    for name, distribution in DISTRIBUTIONS.items():
        rows.append((name, "paper", *(f"{share:.3f}" for share in distribution.shares)))
        generator = random.Random(simulator.SEED)
        lengths = [distribution.length(generator) for _ in range(2_000 if quick else 50_000)]
        counts = [0] * len(BINS)
        for n in lengths:
            counts[_bin_of(n)] += 1
        rows.append((name, "drawn", *(f"{count / len(lengths):.3f}" for count in counts)))
    return Figure(
        name="Table 2",
        title="documents by length",
        shows="Share of the documents in each range of lengths, as printed and as drawn by our generator.",
        columns=("data", "", *_LABELS),
        rows=rows,
        decides="Inside a range, the generator spreads lengths evenly over the logarithm.",
    )


def cost_distribution(quick: bool) -> Figure:
    """Rebuild table 3: costs over ranks under two distributions, 7B on 32 GPUs of cluster C, 128K tokens."""
    balanced = [max(64, int((least * most) ** 0.5)) for least, most in BINS[:7]]
    balanced += [131_072 - sum(balanced)] if sum(balanced) < 131_072 else []
    cases = {"balanced": balanced, "skewed": [120_000, 4096, 4096, 1440, 1440]}
    printed = {
        "balanced": ("161-670", "93-97", "14-16", "422-1108"),
        "skewed": ("801-854", "91-105", "14-45", "1605-1608"),
    }
    rows = []
    for name, lengths in cases.items():
        attention_s, tokens = _rank_costs(lengths, Setting.fitted("7b", "C", 1, 32))
        layers, where = paper.MODELS["7b"].num_layers, Setting.fitted("7b", "C", 1, 32)
        linear = [1e3 * layers * where.linear_s * count for count in tokens]
        attention = [1e3 * layers * seconds for seconds in attention_s]
        backward = [BACKWARD_COMPUTE * a + 2 * b for a, b in zip(attention, linear, strict=True)]
        even = sum(lengths) / len(tokens)
        moved = [1e3 * layers * where.remap_s * abs(count - even) / paper.TOKENS_PER_GPU for count in tokens]
        here = (f"{min(each):.0f}-{max(each):.0f}" for each in (attention, linear, moved, backward))
        rows += [(name, "paper", *printed[name]), (name, "ours", *here)]
    return Figure(
        name="Table 3",
        title="cost by rank",
        shows=(
            "Least and most milliseconds over the ranks, for the 7B model on four nodes of cluster C with 128K tokens."
        ),
        columns=("distribution", "", "forward attention", "forward linear", "remapping", "backward"),
        rows=rows,
        decides=(
            "The paper does not print the documents of the batch, so compare ranges, not seconds. Our times of "
            "linear modules are for the tokens before remapping; those of the paper are for the tokens after it."
        ),
    )


def _rank_costs(lengths: list[int], where: Setting) -> tuple[list[float], list[float]]:
    """Return the forward seconds of attention in a layer, and the tokens, by rank."""
    attention_s, tokens = [0.0] * where.ranks, [0.0] * where.ranks
    capacity = CAPACITY_OVER_MEAN * sum(lengths) / where.ranks
    for document, zone, units in zeppelin_rings(lengths, where.units_by_node, capacity):
        size, n = len(units), lengths[document]
        compute_s = n * n / 2 / size**2 * where.pair_s
        forward_s, _ = round_s(compute_s, where.wire_s(n / size, crosses=zone == "cluster", routed=True))
        for unit in units:
            attention_s[unit] += (size - 1) * forward_s + compute_s
            tokens[unit] += n / size
    return attention_s, tokens


PAPER = Paper(
    key="zeppelin",
    name="Zeppelin",
    title="Zeppelin (EuroSys 2026)",
    result=(
        "Over the context parallelism of Transformer Engine, our placement gains 3.59 in the mean and 9.19 at "
        "best. Zeppelin gains 3.06 and 7.25 in our simulator, and 2.80 and 6.60 in the paper."
    ),
    setup=(
        "Our numbers come from a simulator of the paper's clusters. Three of its constants are fitted to traces "
        "that the paper prints (`benchmarks/reproduce/zeppelin_paper.py`). Methods: `te` is the context "
        "parallelism of Transformer Engine, `llama` that of LLaMA, `hybrid` hybrid data parallelism. `routing`, "
        "`engine` and `remap` are parts of Zeppelin; `with remap` is all of it. `ours` is our placement of "
        "documents."
    ),
    makers={
        "Table 2": distributions,
        "Figure 3": cost_by_length,
        "Figure 5": zones,
        "Figure 8": throughput,
        "Figure 8 by model": by_model,
        "Figure 8 planned": planned,
        "Figure 9": scalability,
        "Figure 10": two_clusters,
        "Figure 11": ablation,
        "Figure 12": timelines,
        "Table 3": cost_distribution,
    },
    left_out={
        "Figure 1": "It has histograms of seven data sets. Table 2 has the numbers of three.",
        "Figures 2, 4, 6 and 7": "They are drawings.",
        "Table 1": "It explains notation.",
    },
)
