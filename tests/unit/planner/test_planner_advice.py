"""What would be faster than the best schedule of all devices: fewer of them, or another ZeRO stage. Budget: 10 s."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

from ds_hetero.cli.app import app
from ds_hetero.cluster import cluster_from_dict, load_cluster
from ds_hetero.cost import Workload, make_cost_model
from ds_hetero.cost.terms.model_states import state_bytes
from ds_hetero.errors import PlanError
from ds_hetero.models import load_model
from ds_hetero.planner import plan
from ds_hetero.planner.fewer_ranks import FewerRanks, faster_with_fewer_ranks
from ds_hetero.planner.zero_stage import OtherStage, faster_zero_stage

MODEL = load_model("gpt-3b")


def far_node(bandwidth_gb_per_s: float) -> dict[str, Any]:
    """Four A100 and, behind a link of its own speed, one more."""
    link = {"bandwidth_gb_per_s": 300, "latency_us": 5}
    nodes = [
        {"name": "near", "device": "A100-SXM-80GB", "count": 4, "link": link},
        {"name": "far", "device": "A100-SXM-80GB", "count": 1, "link": link},
    ]
    return {"nodes": nodes, "network": {"bandwidth_gb_per_s": bandwidth_gb_per_s, "latency_us": 20}}


def advice(cluster: Any, **workload: Any) -> tuple[float, FewerRanks | None, OtherStage | None]:
    """The time of the best schedule of all ranks, and what would be faster."""
    work = Workload(seq_len=16_384, **workload)
    planned, cost = plan(cluster, MODEL, work), make_cost_model("calibrated", cluster, MODEL, work)
    now_s = planned.prediction.iteration_s
    return now_s, faster_with_fewer_ranks(cost, planned), faster_zero_stage(cost, planned.schedule, now_s)


@pytest.mark.parametrize("stage", range(4))
def test_a_device_behind_a_slow_link_is_to_be_left_out(stage: int) -> None:
    all_s, fewer, _ = advice(cluster_from_dict(far_node(1)), zero_stage=stage, optimizer_bytes=4)
    assert fewer is not None and fewer.left_out == (4,)
    work = Workload(seq_len=16_384, zero_stage=stage, optimizer_bytes=4)
    alone = plan(cluster_from_dict(far_node(1)).without([4]), MODEL, work).prediction
    assert fewer.planned.prediction == alone
    assert alone.iteration_s < 0.5 * all_s


def test_several_nodes_are_left_out_one_after_the_other() -> None:
    content = far_node(1)
    content["nodes"].append({**content["nodes"][1], "name": "farther"})
    _, fewer, _ = advice(cluster_from_dict(content))
    assert fewer is not None and fewer.left_out == (4, 5)
    assert fewer.planned.schedule.ranks == (0, 1, 2, 3)


def test_devices_that_add_more_than_they_cost_stay() -> None:
    assert advice(cluster_from_dict(far_node(100)))[1] is None
    assert advice(load_cluster("hexiseq-setting-3"))[1] is None


def test_a_stage_that_moves_less_is_told_if_it_fits() -> None:
    content = far_node(1)
    (near, _), slow = content["nodes"], {"bandwidth_gb_per_s": 1, "latency_us": 5}
    all_s, _, other = advice(
        cluster_from_dict({**content, "nodes": [{**near, "link": slow}]}),
        optimizer_bytes=4,
        zero_stage=2,
        micro_batches=4,
    )
    assert other is not None and other.stage == 0 and other.iteration_s < 0.7 * all_s  # reduces once a step
    assert advice(cluster_from_dict(far_node(1)), optimizer_bytes=100)[2] is None  # only stage 3 fits


def two_nodes(bandwidth_gb_per_s: float) -> Any:
    """Two A100 and one, each node large enough for the whole model."""
    content = far_node(bandwidth_gb_per_s)
    content["nodes"][0]["count"] = 2
    return cluster_from_dict(content)


def test_shards_inside_nodes_are_told_where_the_link_is_slow_and_every_node_has_room() -> None:
    """Flat, 2 gathers and a reduction of 2 P bytes cross a link for each micro-batch; inside nodes, once 2 P bytes."""
    all_s, _, other = advice(two_nodes(1), optimizer_bytes=4, micro_batches=4)
    assert other is not None and other.within and other.iteration_s < 0.95 * all_s
    _, _, other = advice(two_nodes(1), optimizer_bytes=30)
    assert other is None or not other.within  # the node of one has no room


@pytest.mark.parametrize("weights", [None, (3.0, 1.0, 2.0)])
def test_a_node_owns_everything_once(weights: tuple[float, ...] | None) -> None:
    cluster = two_nodes(1)
    work = Workload(seq_len=16_384, optimizer_bytes=4, zero_within=True, zero_weights=weights)
    states = state_bytes(MODEL, work, cluster)
    for name, size in (("optimizer_state", 4), ("gradients", 2), ("weights", 2)):
        first, second, alone = states[name] / (size * MODEL.num_parameters)
        assert (first, second, alone) == pytest.approx((0.75, 0.25, 1.0) if weights else (0.5, 0.5, 1.0))
    flat = make_cost_model("calibrated", cluster, MODEL, replace(work, zero_within=False))
    inside = make_cost_model("calibrated", cluster, MODEL, work)
    # Between two nodes 2 (N - 1) / N = 1 time the gradients each way, at 1 GB/s and two hops of 20 us.
    crossing_s = 2 * MODEL.num_parameters / 1e9 + 2 * 2 * 20e-6
    tokens = np.full(3, 16_384 / 3)
    assert inside.outside_blocks_s(tokens)["zero_s"] == pytest.approx(crossing_s, rel=1e-6)
    assert flat.outside_blocks_s(tokens)["zero_s"] == 0


def test_shards_inside_nodes_are_of_stage_3() -> None:
    with pytest.raises(PlanError, match="stage 2"):
        Workload(seq_len=16_384, zero_stage=2, zero_within=True)


def test_the_command_says_it_in_words_and_in_json(tmp_path: Any) -> None:
    import json

    cluster = tmp_path / "far.json"
    cluster.write_text(json.dumps(far_node(1)))
    job = ["plan", "--cluster", str(cluster), "--model", "gpt-3b", "--seq-len", "16384"]
    job += ["--parallel", "sequence", "--zero-stage", "3"]
    words = CliRunner().invoke(app, job).stdout
    assert "leave out:  4 (1 A100-SXM-80GB): a job of the other devices alone takes" in words
    assert "ZeRO's traffic goes over every rank of a job" in words
    told = json.loads(CliRunner().invoke(app, [*job, "--json"]).stdout)["advice"]["leave_out"]
    assert told["ranks"] == [4] and told["iteration_s"] > 0 and len(told["schedule"]["groups"]) >= 1
