"""HexiScale as described: its graph partition, its paths, and its plans."""

import itertools
import random
from dataclasses import replace

import numpy as np
import pytest

from ds_hetero.cluster.files import load_cluster
from ds_hetero.cost.stages.calibrated import CalibratedStageCosts
from ds_hetero.cost.stages.hexiscale import HexiScaleStageCosts
from ds_hetero.cost.workload import Workload
from ds_hetero.models import load_model
from ds_hetero.planner.published.hexiscale import plan_hexiscale
from ds_hetero.planner.published.hexiscale.partition import BALANCE, bandwidth_between, partition
from ds_hetero.planner.published.hexiscale.pipelines import paths

CASE = load_cluster("hexiscale-case-study")
MODEL = load_model("llama-2-13b")


def machines(sizes, inside=10.0, between=1.0):
    """Bandwidths of devices on machines of these sizes."""
    machine = np.repeat(np.arange(len(sizes)), sizes)
    return np.where(machine[:, None] == machine, inside, between)


def cut_of(groups, bandwidth):
    pairs = itertools.combinations(groups, 2)
    return sum(bandwidth[np.ix_(a, b)].sum() for a, b in pairs)


def test_the_least_cut_keeps_machines_whole_and_the_most_divides_them():
    bandwidth = machines([4, 4, 4, 4])
    least = partition(np.ones(16), bandwidth, 4)
    assert least == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11], [12, 13, 14, 15]]
    most = partition(np.ones(16), bandwidth, 4, maximize=True)
    assert all(len({rank // 4 for rank in group}) == 4 for group in most)


@pytest.mark.parametrize("parts", [2, 3])
def test_small_graphs_are_cut_as_well_as_any_balanced_cut(parts):
    rng = np.random.default_rng(0)
    for _ in range(5):
        bandwidth = rng.uniform(1, 10, (6, 6))
        bandwidth += bandwidth.T
        groups = partition(np.ones(6), bandwidth, parts)
        assert sorted(rank for group in groups for rank in group) == list(range(6))
        best = min(
            cut_of([np.flatnonzero(np.array(choice) == part) for part in range(parts)], bandwidth)
            for choice in itertools.product(range(parts), repeat=6)
            if all(choice.count(part) == 6 // parts for part in range(parts))
        )
        assert cut_of(groups, bandwidth) <= 1.1 * best


@pytest.mark.parametrize("parts", [2, 5, 8])
def test_large_graphs_are_coarsened_and_stay_balanced(parts):
    bandwidth = machines([8] * 16)
    rng = np.random.default_rng(1)
    weight = rng.choice([1.0, 2.0], 128)
    groups = partition(weight, bandwidth, parts)
    assert sorted(rank for group in groups for rank in group) == list(range(128))
    assert max(weight[group].sum() for group in groups) <= BALANCE * weight.sum() / parts
    shuffled = [sorted(part.tolist()) for part in np.array_split(rng.permutation(128), parts)]
    assert cut_of(groups, bandwidth) < cut_of(shuffled, bandwidth)


def test_paths_go_on_over_the_fastest_links():
    between = bandwidth_between([[0, 1], [2, 3], [4]], machines([1, 2, 2], inside=10, between=1))
    assert between.tolist() == [[0, 10, 1], [10, 0, 10], [1, 10, 0]]
    assert list(paths(between, tau=1)) == [(0, 1, 2), (1, 0, 2), (2, 1, 0)]
    assert sorted(paths(between, tau=2)) == sorted(itertools.permutations(range(3)))
    assert len(list(paths(np.ones((9, 9)), max_paths=18))) == 18


@pytest.mark.parametrize("published", [False, True])
def test_plans_are_sound_and_the_same_every_time(published):
    costs = (
        HexiScaleStageCosts(CASE, MODEL, 4096)
        if published
        else CalibratedStageCosts(CASE, MODEL, Workload(seq_len=4096))
    )
    plan = plan_hexiscale(costs, costs.time_objective(), 24, rounds=10)
    assert plan == plan_hexiscale(costs, costs.time_objective(), 24, rounds=10)
    assert sum(shape.micro_batch_size * n for shape, n in zip(plan.shapes, plan.micro_batches, strict=True)) == 24
    assert all(sum(cut.layers) == MODEL.num_layers for cut in plan.cuts)
    for pool in costs.pools.pools:
        blocks = [block for shape in plan.shapes for block in shape.blocks]
        assert sum(b.size for b in blocks if (b.kind, b.node) == (pool.kind, pool.node)) == len(pool.ranks)


def test_the_case_study_is_planned_about_as_well_as_printed():
    costs = HexiScaleStageCosts(CASE, MODEL, 4096)
    assert plan_hexiscale(costs, costs.time_objective(), 24).step_s < 25.55  # as printed, with gradients


def test_a_strategy_by_machine_comes_near_the_printed_plan_of_30b():
    """Setting 3: 28.0 % printed; with one degree a machine, judged for all micro-batches alone, it was 22.2 %."""
    costs = HexiScaleStageCosts(load_cluster("hexiscale-setting-3"), load_model("llama-30b"), 4096)
    plan = plan_hexiscale(costs, costs.time_objective(), 120)
    assert costs.utilization(plan.step_s, 120) > 0.25


def test_what_fits_nowhere_has_no_plan():
    small = replace(CASE, nodes=CASE.nodes[2:])
    costs = CalibratedStageCosts(small, MODEL, Workload(seq_len=4096))
    assert plan_hexiscale(costs, costs.time_objective(), 8, rounds=4) is None


def test_more_rounds_are_never_worse():
    costs = CalibratedStageCosts(load_cluster("hexiscale-setting-2"), MODEL, Workload(seq_len=4096))
    rounds = random.Random(0).sample(range(2, 14), 3)
    values = [plan_hexiscale(costs, costs.time_objective(), 64, (1,), count).value for count in sorted(rounds)]
    assert values == sorted(values, reverse=True)
