"""Measure how time and traffic grow with ranks and tokens, uniform and planned, on two unequal nodes with a slow link.

One attention layer runs, forward and backward. Counted are the payload bytes that all ranks together give to torch's
communication operators for other ranks, per token of the sequence, and the bytes on the links between the nodes, with
headers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

import torch.distributed as dist

from benchmarks.emulation.cluster import EmulatedCluster, EmulatedNode
from benchmarks.emulation.emulator import RankLab
from benchmarks.lab.planning import cost_model, profile_ranks, scaled
from benchmarks.measure.comparison import sent_by_device
from benchmarks.measure.contenders import Contender, Shape, make_contender, make_engine
from benchmarks.measure.traffic import Traffic
from benchmarks.measure.turns import take_turns
from ds_hetero.planner import strategy

CONTENDERS = ("stock", "ring", "plan")
LINK_BIT_PER_S, LINK_DELAY_S = 1e9, 50e-6
_CORES = 1.5  # of all ranks together
_WARM_UP_TOKENS = 512


@dataclass(frozen=True)
class GrowthPlan:
    """The measurements of one number of ranks.

    Args:
        tokens: sequence lengths, ascending.
        shape: of the layer.
        max_rounds: turns of every contender at most.
        budget_s: seconds of one length after which no further round begins.
    """

    tokens: tuple[int, ...]
    shape: Shape
    max_rounds: int
    budget_s: float


def grown(num_ranks: int) -> EmulatedCluster:
    """Return ranks of speeds n, n - 1, ...

    1 in two nodes, the faster half in the first, with a core and a half in all.
    """
    speeds = [float(num_ranks - rank) for rank in range(num_ranks)]
    half = num_ranks // 2
    nodes = tuple(
        EmulatedNode(speeds=tuple(part), link_bit_per_s=LINK_BIT_PER_S, link_delay_s=LINK_DELAY_S)
        for part in (speeds[:half], speeds[half:])
    )
    return EmulatedCluster(nodes=nodes, fastest_cores=min(0.6, _CORES * max(speeds) / sum(speeds)))


def measure(lab: RankLab, plan: GrowthPlan) -> dict[str, Any]:
    """Measure all lengths on one number of ranks; return the results of this rank."""
    lab.report(0, f"{dist.get_world_size()} ranks: profiling")
    profiled = profile_ranks(lab)
    profile_cores = min(max(lab.cluster.cores), 1.2 / dist.get_world_size())
    cluster = scaled(profiled, [cores / profile_cores for cores in lab.cluster.cores])
    result: dict[str, Any] = {"cases": [], "text": lab.describe(), **lab.to_dict()}
    for num_done, tokens in enumerate(plan.tokens, start=1):
        lab.report(num_done / (1 + len(plan.tokens)), f"{dist.get_world_size()} ranks, {tokens} tokens")
        engines = {name: _contender(name, plan.shape, tokens, cluster) for name in CONTENDERS}
        layers = {name: engine.layer(plan.shape, tokens) for name, engine in engines.items()}
        traffic = {}
        for name, layer in layers.items():
            engines[name].layer(plan.shape, _WARM_UP_TOKENS)()
            dist.barrier()
            before = sent_by_device()
            with Traffic() as counter:
                layer()
            dist.barrier()
            traffic[name] = {
                "payload_bytes": sum(counter.sent_bytes.values()),
                "node_bytes": sent_by_device() - before,
            }
        turns = take_turns(layers, plan.max_rounds, plan.budget_s, lab.own_pids)
        result["cases"].append({"tokens": tokens, "traffic": traffic, **asdict(turns)})
    return result


def _contender(name: str, shape: Shape, tokens: int, cluster: Any) -> Contender:
    if name != "plan":
        return make_contender(name, shape)
    return make_engine(name, strategy("plan", cost_model(cluster, shape, tokens)), shape)


# --- from times to rows -----------------------------------------------------------------------------


def summarize(by_rank: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return one row per contender and length from the results of all ranks."""
    rows = []
    speeds = by_rank[0]["cluster"]["speeds"]
    node_of_rank = [index for index, node in enumerate(by_rank[0]["cluster"]["nodes"]) for _ in node["speeds"]]
    first_ranks = [node_of_rank.index(node) for node in sorted(set(node_of_rank))]
    for index, case in enumerate(by_rank[0]["cases"]):
        views = [rank_result["cases"][index]["traffic"] for rank_result in by_rank]
        for name in CONTENDERS:
            seconds = median(case["seconds"][name])
            payload = sum(view[name]["payload_bytes"] for view in views)
            # All ranks of a node share its device, so one of them speaks for it.
            between = sum(views[rank][name]["node_bytes"] for rank in first_ranks)
            rows.append(
                {
                    "contender": name,
                    "ranks": len(speeds),
                    "speeds": speeds,
                    "tokens": case["tokens"],
                    "seconds": seconds,
                    "tokens_per_s": case["tokens"] / seconds,
                    "payload_bytes_per_token": payload / case["tokens"],
                    "between_nodes_bytes_per_token": between / case["tokens"],
                    "rounds": len(case["seconds"][name]),
                    "spread": max(case["seconds"][name]) / min(case["seconds"][name]) - 1,
                    "foreign_cores": case["foreign_cores"],
                }
            )
    return rows
