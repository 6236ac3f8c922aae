"""Small random clusters, models and lengths, to compare searches with the exact optimum.

Everything that makes planning hard is drawn: speeds over a factor of 15, memory that sometimes binds, nodes of several
devices, links over a factor of 100 with some pairs of nodes connected better or worse than the network, heads
that do not divide, grouped KV heads, lengths from where links decide to where compute does.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import combinations
from typing import Any

from ds_hetero.cluster import Cluster, cluster_from_dict
from ds_hetero.cost import CostModel, Workload, make_cost_model
from ds_hetero.models.shapes import ModelSpec

TOKEN_UNITS = {2: 24, 3: 24, 4: 24, 5: 12}  # into which the sequence is cut, by number of devices
HEADS = {2: (4, 8), 3: (4, 8), 4: (4, 8), 5: (4, 6)}  # fewest and most


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """One planning problem that can be solved exactly."""

    cluster: Cluster
    model: ModelSpec
    workload: Workload
    token_unit: int
    cost_model: str

    @property
    def cost(self) -> CostModel:
        """The objective."""
        return make_cost_model(self.cost_model, self.cluster, self.model, self.workload)


def random_cases(count: int, num_ranks: int, cost_model: str, seed: int = 0) -> Iterator[Case]:
    """``count`` cases, always the same ones for the same arguments."""
    rng = random.Random(f"{seed} {num_ranks} {cost_model}")
    for _ in range(count):
        yield random_case(rng, num_ranks, cost_model)


def random_case(rng: random.Random, num_ranks: int, cost_model: str) -> Case:
    """Draw one case."""
    num_heads = rng.randint(*HEADS[num_ranks])
    num_kv_heads = rng.choice([k for k in range(1, num_heads + 1) if num_heads % k == 0])
    if cost_model == "published":
        num_kv_heads = num_heads
    model = ModelSpec(
        name="random",
        num_layers=rng.choice((8, 16, 32)),
        hidden_size=num_heads * 640,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=640,
        mlp_size=num_heads * 640 * 4,
        vocab_size=32_000,
    )
    units = TOKEN_UNITS[num_ranks]
    token_unit = 2 ** rng.randint(9, 14)
    return Case(
        cluster=cluster_from_dict(_cluster(rng, num_ranks)),
        model=model,
        workload=Workload(seq_len=units * token_unit, causal=rng.random() < 0.7, zero_stage=rng.choice((1, 2, 3))),
        token_unit=token_unit,
        cost_model=cost_model,
    )


def _cluster(rng: random.Random, num_ranks: int) -> dict[str, Any]:
    sizes = []
    while sum(sizes) < num_ranks:
        sizes.append(rng.randint(1, num_ranks - sum(sizes)))
    kinds = rng.randint(1, num_ranks)
    devices = {
        f"gpu{i}": {
            "peak_tflops": _log_uniform(rng, 60, 990),
            "memory_gib": rng.choice((40, 80, 141, 192)),
            "memory_bandwidth_gb_per_s": _log_uniform(rng, 500, 4000),
        }
        for i in range(kinds)
    }
    nodes = [
        {
            "name": f"node{i}",
            "devices": [rng.choice(list(devices)) for _ in range(size)],
            "link": {"bandwidth_gb_per_s": _log_uniform(rng, 16, 450), "latency_us": _log_uniform(rng, 2, 20)},
        }
        for i, size in enumerate(sizes)
    ]
    network = {"bandwidth_gb_per_s": _log_uniform(rng, 1, 200), "latency_us": _log_uniform(rng, 2, 50)}
    links = [
        {"between": [a["name"], b["name"]], "bandwidth_gb_per_s": _log_uniform(rng, 1, 200)}
        for a, b in combinations(nodes, 2)
        if rng.random() < 0.3
    ]
    return {"nodes": nodes, "network": network, "links": links, "devices": devices}


def _log_uniform(rng: random.Random, low: float, high: float) -> float:
    """Rounded, so that the file of a case can be read."""
    return float(f"{low * (high / low) ** rng.random():.3g}")
