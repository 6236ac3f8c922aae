"""Draw small random clusters, models and lengths, to compare searches with the exact optimum.

All properties that make planning hard are drawn: speeds over a factor of 15, memory that is sometimes the limit, nodes
of several devices, links over a factor of 100 with some pairs of nodes connected better or worse than the network,
numbers of heads with few divisors, grouped KV heads, lengths at which links decide and lengths at which compute does.
Or GPUs of the catalogue are drawn, with their measured rates and their usual links.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import combinations, islice
from itertools import count as endless
from typing import Any

from ds_hetero.cluster import Cluster, cluster_from_dict
from ds_hetero.cost import CostModel, Workload, make_cost_model
from ds_hetero.models.shapes import ModelSpec
from ds_hetero.planner.search.memory_fit import has_room

TOKEN_UNITS = {2: 24, 3: 24, 4: 24, 5: 12, 6: 10, 7: 8, 8: 8}  # into which the sequence is cut, by number of devices
HEADS = {2: (4, 8), 3: (4, 8), 4: (4, 8), 5: (4, 6), 6: (4, 4), 7: (4, 4), 8: (4, 4)}  # fewest and most
CARDS = ("H100-SXM-80GB", "A100-SXM-80GB", "A100-SXM-40GB", "B200-SXM-180GB", "RTX-A6000", "RTX-4090", "RTX-3090")
MAX_KINDS = 3  # of cards in a cluster: with more, eight ranks are too many for the exact solver


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


def random_cases(
    count: int, num_ranks: int, cost_model: str, seed: int = 0, *, of_catalogue: bool = False
) -> Iterator[Case]:
    """Yield ``count`` cases, always the same ones for the same arguments.

    GPUs of the catalogue have room for the model.
    """
    rng = random.Random(f"{seed} {num_ranks} {cost_model}")
    cases = (random_case(rng, num_ranks, cost_model, of_catalogue=of_catalogue) for _ in endless())
    yield from islice((case for case in cases if not of_catalogue or has_room(case.cost)), count)


def random_case(rng: random.Random, num_ranks: int, cost_model: str, *, of_catalogue: bool = False) -> Case:
    """Draw one case; with ``of_catalogue`` of its GPUs, otherwise of GPUs that do not exist."""
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
        cluster=cluster_from_dict((_catalogue_cluster if of_catalogue else _cluster)(rng, num_ranks)),
        model=model,
        workload=Workload(seq_len=units * token_unit, causal=rng.random() < 0.7, zero_stage=rng.choice((1, 2, 3))),
        token_unit=token_unit,
        cost_model=cost_model,
    )


def _sizes(rng: random.Random, num_ranks: int) -> list[int]:
    """Draw the number of devices of every node."""
    sizes: list[int] = []
    while sum(sizes) < num_ranks:
        sizes.append(rng.randint(1, num_ranks - sum(sizes)))
    return sizes


def _catalogue_cluster(rng: random.Random, num_ranks: int) -> dict[str, Any]:
    """Draw nodes of one kind of GPU each, or of several behind PCIe, with one NIC or one for every GPU."""
    cards = rng.sample(CARDS, rng.randint(1, min(MAX_KINDS, num_ranks)))
    nodes = []
    for i, size in enumerate(_sizes(rng, num_ranks)):
        node: dict[str, Any] = {"name": f"node{i}", "device": rng.choice(cards), "count": size}
        if rng.random() < 0.3:
            devices = [rng.choice(cards) for _ in range(size)]
            link = {"bandwidth_gb_per_s": rng.choice((8, 16, 32)), "latency_us": 5, "efficiency": 0.8}
            node = {"name": f"node{i}", "devices": devices, "link": link}
        nodes.append(node)
    rate, nics = rng.choice((1.25, 3.125, 12.5, 25, 50)), rng.choice((1, 1, "per_rank"))
    network = {"bandwidth_gb_per_s": rate, "latency_us": 10, "nics": nics, "efficiency": 0.8}
    return {"nodes": nodes, "network": network}


def _cluster(rng: random.Random, num_ranks: int) -> dict[str, Any]:
    """Draw a cluster of GPUs that do not exist."""
    sizes = _sizes(rng, num_ranks)
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
    """Draw a number; it is rounded, so that people can read the file of a case."""
    return float(f"{low * (high / low) ** rng.random():.3g}")
