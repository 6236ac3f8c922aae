"""The exact solver against a plain enumeration, and the search against the exact solver."""

from itertools import permutations, product

import numpy as np
import pytest

from benchmarks.measure.random_clusters import random_cases
from ds_hetero.cluster import cluster_from_dict
from ds_hetero.cost import Grouping, Workload, make_cost_model
from ds_hetero.errors import PlanError
from ds_hetero.models.shapes import ModelSpec
from ds_hetero.planner import make_problem
from ds_hetero.planner.exact import solve_exact
from ds_hetero.planner.search.search import search

MODEL = ModelSpec(
    name="tiny",
    num_layers=4,
    hidden_size=1024,
    num_heads=3,
    num_kv_heads=3,
    head_dim=128,
    mlp_size=4096,
    vocab_size=1000,
)


def tiny_cost(cost_model, seed, sizes, seq_len):
    rng = np.random.default_rng(seed)
    devices = {
        f"d{i}": {
            "peak_tflops": float(rng.uniform(1, 10)),
            "memory_gib": 1.06 * float(rng.uniform(1.2, 6)),  # less what the allocator loses
            "reserved_gib": 0,
            "memory_bandwidth_gb_per_s": float(rng.uniform(50, 500)),
        }
        for i in range(sum(sizes))
    }
    names = iter(devices)
    nodes = [
        {
            "name": f"n{i}",
            "devices": [next(names) for _ in range(size)],
            "link": {"bandwidth_gb_per_s": float(rng.uniform(1, 50)), "latency_us": 5},
        }
        for i, size in enumerate(sizes)
    ]
    network = {"bandwidth_gb_per_s": float(rng.uniform(0.2, 10)), "latency_us": 20}
    links = [{"between": ["n0", f"n{len(sizes) - 1}"], "bandwidth_gb_per_s": float(rng.uniform(0.2, 10))}]
    cluster = cluster_from_dict(
        {"nodes": nodes, "network": network, "links": links if len(sizes) > 1 else [], "devices": devices}
    )
    return make_cost_model(cost_model, cluster, MODEL, Workload(seq_len=seq_len, zero_stage=3))


def enumerate_all(problem, units):
    """The least time of any assignment: groups by label, all orders, all heads, all tokens, one call each."""
    cost, num_ranks = problem.cost, problem.num_ranks
    best = np.inf
    shares = [s for s in product(range(units + 1), repeat=num_ranks) if sum(s) == units]
    for labels in product(range(num_ranks), repeat=num_ranks):
        used = sorted(set(labels))
        blocks = [[rank for rank in range(num_ranks) if labels[rank] == label] for label in used]
        if used != list(range(len(used))):
            continue  # the same blocks under other labels
        for order in permutations(blocks):
            grouping = Grouping(cost.cluster, order, zigzag=problem.zigzag and len(order) > 1)
            for heads in product(range(MODEL.num_heads + 1), repeat=num_ranks):
                if any(sum(heads[rank] for rank in block) != MODEL.num_heads for block in blocks):
                    continue
                for share in shares:
                    tokens = np.array(share, dtype=float) * problem.token_unit
                    if (cost.memory_bytes(grouping, tokens, np.array(heads)) > cost.capacity_bytes_D).any():
                        continue
                    loss_s = (tokens * cost.loss_s_per_token_D).max() / MODEL.num_layers
                    best = min(best, cost.block_s(grouping, tokens, np.array(heads)) + loss_s)
    return best


@pytest.mark.parametrize("cost_model", ["published", "calibrated"])
@pytest.mark.parametrize(
    ("sizes", "units", "layout"),
    [((1, 1), 8, "zigzag"), ((2,), 8, "contiguous"), ((2, 1), 3, "zigzag"), ((1, 1, 1), 3, "contiguous")],
)
def test_equals_a_plain_enumeration(cost_model, sizes, units, layout):
    cost = tiny_cost(cost_model, len(sizes) + units, sizes, units * 4096)
    problem, _ = make_problem(cost, token_unit=4096, layout=layout)
    least = enumerate_all(problem, units)
    solved = solve_exact(problem)
    assert np.isfinite(least)
    assert solved.best.time_s == pytest.approx(least, rel=1e-12)
    assert solved.evaluated < solved.combinations * 6  # ring orders are counted in the first number alone
    assert solve_exact(problem, upper_bound_s=least * (1 - 1e-9)).best is None
    assert solved.complete and not solve_exact(problem, most=1).complete
    assert solve_exact(problem, upper_bound_s=least * (1 + 1e-9)).best.time_s == pytest.approx(least, rel=1e-12)


def test_refuses_what_would_take_for_ever():
    cost = tiny_cost("published", 0, (3, 3, 3), 9 * 4096)
    with pytest.raises(PlanError, match="at most 8 ranks, the cluster has 9"):
        solve_exact(make_problem(cost, token_unit=4096)[0])
    cost = tiny_cost("published", 0, (2, 3), 65536)
    with pytest.raises(PlanError, match="65536 token units can be split over 5 ranks"):
        solve_exact(make_problem(cost)[0])


@pytest.mark.parametrize(
    ("cost_model", "num_ranks"),
    [("published", 4), pytest.param("published", 5, marks=pytest.mark.slow), ("calibrated", 4)],
)
def test_the_search_is_near_the_optimum(cost_model, num_ranks):
    """A sample of ``python -m benchmarks.planner exact``, whose 200 clusters per cost model are the real figure."""
    gaps = []
    for case in random_cases(6, num_ranks, cost_model, seed=1):
        problem, _ = make_problem(case.cost, token_unit=case.token_unit)
        found = search(problem)
        solved = solve_exact(problem, upper_bound_s=found[0].time_s if found else np.inf)
        if found:
            gaps.append(found[0].time_s / (solved.best or found[0]).time_s - 1)
        else:
            assert solved.best is None
    assert len(gaps) >= 4
    assert max(gaps) <= 0.05
    assert sum(gap <= 0.01 for gap in gaps) >= len(gaps) - 1


@pytest.mark.parametrize("num_ranks", [3, 4])
def test_search_is_within_one_percent_of_the_optimum_on_cards_of_the_catalogue(num_ranks):
    for case in random_cases(3, num_ranks, "calibrated", seed=2, of_catalogue=True):
        problem, _ = make_problem(case.cost, token_unit=case.token_unit)
        found = search(problem)[:1]
        solved = solve_exact(problem, upper_bound_s=found[0].time_s if found else float("inf"))
        assert solved.best is None or (found and found[0].time_s <= 1.01 * solved.best.time_s)
