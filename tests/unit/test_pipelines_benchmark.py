"""What the benchmark of pipelines makes of measured times."""

from __future__ import annotations

import pytest

from benchmarks.measure.contenders import Shape
from benchmarks.pipelines.plans import Task, grouped_candidates, predicted_s, tensor_candidates
from benchmarks.pipelines.tables import summarize, summarize_memory
from ds_hetero.cluster import cluster_from_dict

FOUND = {
    "seconds": {
        "deepspeed": [4.0, 4.2, 4.1],
        "ours": [1.0, 1.1, 0.9],
        "grid pp4": [2.0, 2.2, 2.1],
        "grid pp2": [2.1, 2.3, 2.2],
        "sequence": [3.0, 3.0, 3.0],
    },
    "plans": {
        "ours": {"predicted_s": 0.9},
        "grid pp4": {"predicted_s": 2.0},
        "grid pp2": {"predicted_s": 1.9},
        "sequence": {"predicted_s": 1.8},
    },
}


def test_pairs_that_hardly_differ_are_not_ranked():
    summary = summarize(FOUND)
    assert summary["best_grid"] == "grid pp4"
    assert summary["fastest"] == "ours"
    assert summary["over_best_grid"] == pytest.approx(2.0)
    assert summary["over_stock"] == pytest.approx(4.0, rel=0.15)
    assert summary["pairs"] == 5 and summary["pairs_in_order"] == 3
    assert sorted(summary["wrong_pairs"]) == [("grid pp2", "sequence"), ("grid pp4", "sequence")]
    assert summary["errors"]["ours"] == pytest.approx(-0.1)


def test_plans_with_tensor_stages_hold_all_layers_and_samples():
    device = {"peak_tflops": 0.02, "memory_gib": 8, "memory_bandwidth_gb_per_s": 10}
    link = {"bandwidth_gb_per_s": 0.1, "latency_us": 100}
    nodes = [{"name": name, "device": name, "count": 2, "link": link} for name in ("fast", "slow")]
    devices = {"fast": device, "slow": {**device, "peak_tflops": 0.01}}
    cluster = cluster_from_dict({"nodes": nodes, "network": link, "devices": devices})
    shape = Shape(num_heads=4, num_kv_heads=4, head_dim=16, hidden_size=64, num_layers=12)
    made = tensor_candidates(cluster, Task(shape, 64, 6), 10)
    degrees = [[[len(s.ranks) for s in pipeline.stages] for pipeline in each.plan.pipelines] for each in made]
    assert degrees == [[[2, 2]], [[2, 2]], [[2, 1, 1]], [[1, 1, 2]], [[2], [2]], [[2], [1, 1]]]
    assert all(each.plan.batch_split.samples == 6 and each.predicted_s > 0 for each in made)
    assert {len(each.memory_bytes) for each in made} == {4}
    assert made[0].plan.pipelines[0].stages[0].layers == (0, 8)
    assert [p.micro_batches for p in made[4].plan.pipelines] == [4, 2]
    half = cluster_from_dict(
        {
            "nodes": nodes,
            "network": link,
            "devices": {name: {**each, "peak_tflops": each["peak_tflops"] / 2} for name, each in devices.items()},
        }
    )
    for each in made:  # what was predicted for the cluster of the plan, and for slower devices
        assert predicted_s(cluster, Task(shape, 64, 6), each.plan) == pytest.approx(each.predicted_s)
        assert each.predicted_s < predicted_s(half, Task(shape, 64, 6), each.plan) < 2 * each.predicted_s


def test_tensor_groups_run_beside_uniform_grids_of_tensor_and_sequence_parallelism():
    link = {"bandwidth_gb_per_s": 0.1, "latency_us": 100}
    nodes = [{"name": name, "device": name, "count": 2, "link": link} for name in ("fast", "slow")]
    devices = {
        name: {"peak_tflops": speed, "memory_gib": 8, "memory_bandwidth_gb_per_s": 10}
        for name, speed in (("fast", 0.02), ("slow", 0.01))
    }
    cluster = cluster_from_dict({"nodes": nodes, "network": link, "devices": devices})
    shape = Shape(num_heads=12, num_kv_heads=12, head_dim=16, hidden_size=192, num_layers=4)
    ours, *grids = grouped_candidates(cluster, Task(shape, 1024, 2), 6)
    names = [grid.name for grid in grids]
    assert {"grid tp2 cp2 in 2 groups", "grid tp2 cp2 in 1 groups"} < set(names)
    assert sum("tp1 cp4" in name for name in names) == 1
    (stage,) = ours.plan.pipelines[0].stages
    tokens = stage.schedule.tokens(1024)
    assert tokens[0] > 1.5 * tokens[2]
    assert ours.predicted_s < min(grid.predicted_s for grid in grids)
    for each in (ours, *grids):
        assert predicted_s(cluster, Task(shape, 1024, 2), each.plan) > 0


def test_the_worst_rank_counts():
    plan = {"bytes": {0: 110, 1: 80}, "predicted_bytes": {0: 100, 1: 100}}
    assert summarize_memory({"plans": {"ours": plan}})["worst"] == pytest.approx(0.1)
