"""Tangram as described: islands, pruned questions, composition, and its plans."""

import itertools
import random
from dataclasses import replace

import pytest

from ds_hetero.cluster.files import cluster_from_dict, load_cluster
from ds_hetero.cost.stages.calibrated import CalibratedStageCosts
from ds_hetero.cost.stages.stage import Pools
from ds_hetero.cost.workload import Workload
from ds_hetero.models import load_model
from ds_hetero.planner.pipelines.baselines import best_grid
from ds_hetero.planner.published.tangram import plan_tangram
from ds_hetero.planner.published.tangram.composition import compose, compose_exactly, cycle_s
from ds_hetero.planner.published.tangram.interface import CheckedParallelizer, Slice
from ds_hetero.planner.published.tangram.islands import form_islands
from ds_hetero.planner.published.tangram.questions import Answers, Rules
from ds_hetero.planner.published.tangram.uniform_parallelizer import UniformParallelizer

MODEL = load_model("llama-2-7b")
WORK = Workload(seq_len=4096)


def cluster_of(*nodes, **options):
    link = {"bandwidth_gb_per_s": 100, "latency_us": 5}
    named = [(f"n{i}", device, count) for i, (device, count) in enumerate(nodes)]
    entries = [{"name": name, "device": device, "count": count, "link": link} for name, device, count in named]
    return cluster_from_dict({"nodes": entries, "network": {"bandwidth_gb_per_s": 10, "latency_us": 10}, **options})


def islands_of(cluster, **options):
    pools = Pools(cluster)
    return [{cluster.nodes[pool.node].name for pool in island.pools} for island in form_islands(pools, **options)]


def test_islands_are_the_nodes_that_differ_little():
    larger = {"H100-94GB": {"peak_tflops": 989.4, "memory_gib": 94, "memory_bandwidth_gb_per_s": 3350}}
    cluster = cluster_of(
        ("H100-SXM-80GB", 8), ("H100-94GB", 8), ("A100-SXM-80GB", 8), ("A100-SXM-80GB", 8), devices=larger
    )
    assert islands_of(cluster) == [{"n0", "n1"}, {"n2", "n3"}]
    island = form_islands(Pools(cluster))[0]
    assert Pools(cluster).kinds[island.weakest].device.name == "H100-SXM-80GB"
    assert sorted(map(len, islands_of(cluster, tau=0.01))) == [1, 1, 2]
    assert islands_of(cluster, merge=10) == [{"n0", "n1", "n2", "n3"}]


@pytest.mark.parametrize("memory_gib, gb_per_s", [(80, 2000), (160, 1000)])
def test_islands_merge_as_long_as_memory_and_bandwidth_suffice_too(memory_gib, gb_per_s):
    """Equal compute: 8 devices of half the memory or bandwidth beside 8 whole ones leave (8 + 8) / (16 + 8) of it."""
    whole = {"peak_tflops": 300, "memory_gib": 160, "memory_bandwidth_gb_per_s": 2000}
    half = {**whole, "memory_gib": memory_gib, "memory_bandwidth_gb_per_s": gb_per_s}
    cluster = cluster_of(("whole", 8), ("half", 8), devices={"whole": whole, "half": half})
    assert len(islands_of(cluster)) == len(islands_of(cluster, merge=1.49)) == 2
    assert islands_of(cluster, merge=1.51) == [{"n0", "n1"}]


def test_similarity_carries_over_chains_of_nodes():
    devices = {
        f"x{i}": {"peak_tflops": tflops, "memory_gib": 80, "memory_bandwidth_gb_per_s": 2000}
        for i, tflops in enumerate((100, 90, 80))
    }
    cluster = cluster_of(*((name, 2) for name in devices), devices=devices)
    assert islands_of(cluster, tau=0.1) == [{"n0", "n1", "n2"}]


def test_a_parallelizer_answers_once_for_every_degree_of_data_parallelism():
    costs = CalibratedStageCosts(cluster_of(("A100-SXM-80GB", 8)), MODEL, WORK)
    (island,) = form_islands(costs.pools)
    inner = CheckedParallelizer(UniformParallelizer(costs, 32, (1, 2)), costs, 32)
    plans = inner.plan(Slice(32, True, True), island)
    assert inner.calls == 1
    keys = [(plan.data_parallel, plan.micro_batch_size) for plan in plans]
    assert len(set(keys)) == len(keys) > 3
    for plan in plans:
        assert sum(plan.layers) == 32
        assert max(plan.layers) - min(plan.layers) <= 1
        assert plan.data_parallel * plan.tensor_parallel * len(plan.layers) <= 8
        assert plan.period_s <= plan.latency_s
        assert plan.output_shape == (plan.micro_batch_size, 4096, MODEL.hidden_size)
        assert plan.memory_bytes <= costs.cluster.devices[0].memory_bytes


def test_the_rules_save_calls_and_keep_the_plan():
    model = replace(MODEL, num_layers=24)
    costs = CalibratedStageCosts(cluster_of(("A800-SXM-80GB", 4), ("RTX-4090", 4)), model, WORK)
    without = Rules(equal_lengths=False, balanced=False, memory=False, interface=False)
    one, two = Rules(balanced=False, memory=False, interface=False), Rules(memory=False, interface=False)
    plans = [plan_tangram(costs, costs.time_objective(), 32, rules=rules) for rules in (without, one, two, None)]
    calls = [plan.calls for plan in plans]
    assert calls == sorted(calls, reverse=True)
    assert calls[0] == 2 * 24 * 25 // 2
    assert calls[-1] < calls[0] / 4
    assert plans[-1].candidate.value == pytest.approx(min(plan.candidate.value for plan in plans), rel=0.01)


def test_a_slice_is_asked_about_within_its_share_and_its_memory():
    costs = CalibratedStageCosts(cluster_of(("A800-SXM-80GB", 4), ("RTX-3090", 1)), MODEL, WORK)
    islands = form_islands(costs.pools)
    inner = CheckedParallelizer(UniformParallelizer(costs, 32, (1,)), costs, 32)
    ask = Answers(costs, islands, inner)
    assert not ask((0, 4), islands[0], True, False)  # far below its share
    assert not ask((8, 32), islands[1], False, True)  # far above
    assert inner.calls == 0
    assert ask((0, 30), islands[0], True, False)
    assert ask((0, 30), islands[0], True, False)
    assert inner.calls == 1
    assert not ask((0, 30), islands[0], False, True)  # its layers are not those of the last island


def test_the_memory_of_a_slice_is_that_of_the_highest_stage_of_zero():
    """Eq. 6: three times the parameters have to fit, whatever two times would."""
    half = MODEL.layer_parameters * 2 * 32 / 0.9 / 2**30  # GiB of one device that all layers fill
    for times, fits in ((2.9, False), (3.1, True)):
        device = {"peak_tflops": 300, "memory_gib": times * half, "memory_bandwidth_gb_per_s": 2000}
        costs = CalibratedStageCosts(cluster_of(("x", 1), devices={"x": device}), MODEL, WORK)
        islands = form_islands(costs.pools)
        inner = CheckedParallelizer(UniformParallelizer(costs, 32, (1,)), costs, 32)
        Answers(costs, islands, inner)((0, 32), islands[0], True, True)
        assert inner.calls == fits


def test_stages_share_sequences_where_that_is_faster():
    """At 64K tokens two ranks exchange less for attention than for sums of tensor parallelism."""
    costs = CalibratedStageCosts(cluster_of(("A100-SXM-80GB", 4)), MODEL, Workload(seq_len=65536))
    (island,) = form_islands(costs.pools)
    plans = UniformParallelizer(costs, 2, (1,)).plan(Slice(32, True, True), island)
    assert {plan.block(costs.pools.largest[0]).inner for plan in plans} > {"sequence"}
    alone = CalibratedStageCosts(costs.cluster, MODEL, Workload(seq_len=65536), inners=("tensor",))
    both, tensor = (plan_tangram(each, each.time_objective(), 2, (1,)) for each in (costs, alone))
    assert both.candidate.step_s < tensor.candidate.step_s


def random_tables(rng):
    """Slices by length of 3 to 5 islands; a long one recomputes, so time is not linear in length."""
    count, layers = rng.randint(3, 5), rng.randint(10, 18)
    tables = []
    for _ in range(count):
        fixed, each, bend, most = rng.uniform(0, 2), rng.uniform(0.3, 2), rng.randint(3, 8), rng.randint(3, layers)
        length_s = {n: fixed + each * n * (1.33 if n > bend else 1) for n in range(1, most + 1)}
        starts = range(layers)
        tables.append({(a, a + n): (s, s) for a in starts for n, s in length_s.items() if a + n <= layers})
    return tables, layers, rng.choice((4, 8, 16, 32))


def brute_force(tables, layers, micro_batches):
    values = []
    for ends in itertools.combinations(range(1, layers), len(tables) - 1):
        slices = list(itertools.pairwise((0, *ends, layers)))
        if all(at in table for at, table in zip(slices, tables, strict=True)):
            values.append(cycle_s([table[at] for at, table in zip(slices, tables, strict=True)], micro_batches))
    return min(values, default=None)


def value_of(ends, tables, micro_batches):
    slices = itertools.pairwise((0, *ends))
    return cycle_s([table[at] for at, table in zip(slices, tables, strict=True)], micro_batches)


def test_composition_against_trying_everything():
    rng, gaps = random.Random(0), []
    for _ in range(60):
        tables, layers, micro_batches = random_tables(rng)
        best, ends = brute_force(tables, layers, micro_batches), compose_exactly(tables, layers, micro_batches)
        if best is None:
            assert ends is None and compose(tables, layers, micro_batches) is None
            continue
        assert value_of(ends, tables, micro_batches) == pytest.approx(best)
        gaps.append(value_of(compose(tables, layers, micro_batches), tables, micro_batches) / best - 1)
    assert len(gaps) > 40
    assert min(gaps) > -1e-9
    assert 0 < max(gaps) < 0.1  # Algorithm 2 is close, but not exact


def test_plans_use_equal_lanes_over_all_islands():
    costs = CalibratedStageCosts(load_cluster("hexiscale-setting-2"), MODEL, WORK)
    plan = plan_tangram(costs, costs.time_objective(), 64)
    lanes = {(tuple(block.size for block in shape.blocks), shape.micro_batch_size) for shape in plan.candidate.shapes}
    assert len(lanes) == 1
    assert sum(plan.layers) == MODEL.num_layers
    assert len(set(plan.candidate.micro_batches)) == 1
    assert plan_tangram(costs, costs.time_objective(), 64) == plan


@pytest.mark.parametrize("nodes", [[("A100-SXM-80GB", 8)], [("RTX-4090", 4), ("RTX-4090", 4)]])
def test_equal_devices_are_planned_as_by_the_best_homogeneous_planner(nodes):
    costs = CalibratedStageCosts(cluster_of(*nodes), MODEL, WORK)
    grid = best_grid(costs, costs.time_objective(), 32, (1, 2))[0]
    plan = plan_tangram(costs, costs.time_objective(), 32)
    assert len(plan.islands) == 1
    assert plan.candidate.step_s <= grid.step_s * 1.001
