"""Owners of optimizer state by weight: what they own and send, against the chunks, and plans that need them to fit."""

import json
from dataclasses import replace

import numpy as np
import pytest

from ds_hetero.cli.installed.doctor_section import examine_section
from ds_hetero.cluster.files import cluster_from_dict, load_cluster
from ds_hetero.cost.stages.calibrated import CalibratedStageCosts
from ds_hetero.cost.stages.gradients import GradientTimes
from ds_hetero.cost.stages.stage import DeviceBlock, PlacedPipeline
from ds_hetero.cost.workload import Workload
from ds_hetero.decision.facts import ModelFacts
from ds_hetero.errors import PlanError
from ds_hetero.models import load_model
from ds_hetero.planner.pipeline_search.finish import finish, memory_bytes, to_plan
from ds_hetero.planner.pipeline_search.given_layers import evaluate_with_layers
from ds_hetero.planner.pipelines.given import judge_plan, owners_of
from ds_hetero.sharding.gradient_chunks import chunks_of, gathered_elements, reduced_elements
from ds_hetero.sharding.parameter_layouts import Cut, ParameterLayout
from ds_hetero.values.plans import read_plan
from tests.unit.cost.test_cost_stage import parameters_of

CLUSTER = load_cluster("hexiscale-setting-2")
WORK = Workload(seq_len=4096, zero_stage=0)
MODEL = replace(load_model("llama-3.1-8b"), num_layers=1)
PIPELINES = [
    PlacedPipeline((block,), (1,), 1, 1)
    for block in (DeviceBlock(2, 2, 2, "tensor"), DeviceBlock(3, 3, 1, "one"), DeviceBlock(1, 1, 1, "one"))
]
FREE = [0.0] * 8  # seconds per byte of memory, so that links alone count


def test_equal_weights_are_even_owners():
    times = GradientTimes(CLUSTER, MODEL, WORK, [1e-12] * 8)
    assert times.times(PIPELINES, np.ones(3)) == pytest.approx(times.times(PIPELINES), rel=1e-12)


def test_weighted_owners_send_and_own_what_the_chunks_say():
    """One matrix that pipelines hold in two halves, whole and whole."""
    weights = np.array([1.0, 0.5, 2.0])
    times, width = GradientTimes(CLUSTER, MODEL, WORK, FREE), 96 * 2**20
    layout = ParameterLayout(
        (width,), (Cut.along(0, (0, 1), (width // 2,) * 2), Cut.whole((width,), 2), Cut.whole((width,), 3))
    )
    chunks = chunks_of("weight", layout, owner_weights={0: 1.0, 1: 1.0, 2: 0.5, 3: 2.0})
    busiest = max(max(reduced_elements(chunks, rank), gathered_elements(chunks, rank)) for rank in range(4))
    parameters = parameters_of(MODEL, 0, 1)
    expected_s = 2 * busiest / width * parameters * 2 / CLUSTER.network.bytes_per_s
    assert times.times(PIPELINES, weights).total_s == pytest.approx(expected_s, rel=1e-3)
    owned = times.owned_parameters(PIPELINES, weights) / parameters
    assert owned == pytest.approx([0.5 * 1 / 3.5, 0.5 / 3.5, 2 / 3.5], rel=1e-6)


def test_weights_are_fitted_to_what_ranks_may_own_and_stay_even_where_they_can():
    times = GradientTimes(CLUSTER, MODEL, WORK, FREE)
    parameters = parameters_of(MODEL, 0, 1)
    assert times.fit(PIPELINES, np.full(3, parameters)).tolist() == [1, 1, 1]
    most = np.array([0.5, 0.1, 0.7]) * parameters
    weights = times.fit(PIPELINES, most)
    owned = times.owned_parameters(PIPELINES, weights)
    assert (owned <= most).all()
    assert owned @ [2, 1, 1] == pytest.approx(parameters)
    assert weights[0] == weights[2] == 1 > weights[1]
    assert times.fit(PIPELINES, np.array([0.1, 0.1, 0.7]) * parameters) is None


def two_kinds():
    nodes = [{"name": "a", "device": "A100-SXM-80GB", "count": 1}, {"name": "b", "device": "RTX-4090", "count": 1}]
    return cluster_from_dict({"nodes": nodes, "network": {"bandwidth_gb_per_s": 10, "latency_us": 10}})


def test_a_plan_that_fits_only_with_weighted_owners_is_judged_and_comes_back_from_its_file():
    cluster, model = two_kinds(), replace(load_model("llama-3.2-3b"), num_layers=16)
    even = CalibratedStageCosts(cluster, model, WORK)
    goal = even.time_objective()
    pipelines = [PlacedPipeline((DeviceBlock(kind, kind, 1, "one"),), (model.num_layers,), 1, 4) for kind in (0, 1)]
    assert evaluate_with_layers(even, goal, pipelines) is None
    fitted = even.with_owners("fitted")
    candidate = evaluate_with_layers(fitted, goal, pipelines)
    finished = finish(fitted, candidate)
    for needs, pool in zip(memory_bytes(fitted, finished), even.pools.pools, strict=True):
        device = even.pools.kinds[pool.kind].device
        assert needs[0][0] <= device.memory_bytes - device.reserved_bytes
    plan = read_plan(json.loads(json.dumps(to_plan(fitted, finished).to_dict())))
    weights = dict(plan.zero.owner_weights)
    assert weights[0] == 1 > weights[1] > 0
    again = judge_plan(even, plan, goal)
    assert again.step_s == pytest.approx(finished.step_s, rel=1e-12)
    with pytest.raises(PlanError, match="does not fit"):
        judge_plan(even, replace(plan, zero=replace(plan.zero, owner_weights=())), goal)


def test_weights_that_differ_within_a_stage_are_refused():
    cluster, model = load_cluster("hexiscale-case-study"), load_model("llama-2-7b")
    costs = CalibratedStageCosts(cluster, model, WORK)
    data = {
        "version": 2,
        "model": {"num_layers": model.num_layers, "num_heads": 32, "num_kv_heads": 32},
        "pipelines": [
            {
                "micro_batch_size": 1,
                "micro_batches": 8,
                "stages": [{"ranks": [0, 1], "layers": [0, model.num_layers], "inner": "tensor"}],
            }
        ],
        "zero": {"stage": 1, "owner_weights": {"0": 1.0, "1": 2.0}},
    }
    with pytest.raises(PlanError, match="one positive weight"):
        owners_of(read_plan(data), costs.pools)


def test_the_doctor_explains_a_plan_with_its_owners(tmp_path):
    model = load_model("llama-3.2-1b")
    heads = {"num_heads": model.num_heads, "num_kv_heads": model.num_kv_heads}
    nodes = [{"name": device, "device": device, "count": 1} for device in ("A100-SXM-80GB", "RTX-4090")]
    cluster = {"nodes": nodes, "network": {"bandwidth_gb_per_s": 10, "latency_us": 10}}
    whole = {"layers": [0, model.num_layers], "inner": "one"}
    plan = {
        "version": 2,
        "model": {"num_layers": model.num_layers, **heads},
        "pipelines": [
            {"micro_batch_size": 1, "micro_batches": 4, "stages": [{"ranks": [rank], **whole}]} for rank in (0, 1)
        ],
        "zero": {"stage": 1, "owner_weights": {"0": 1.0, "1": 0.25}},
    }
    config = tmp_path / "ds_config.json"
    section = {"schedule": plan, "cluster": cluster, "parallel": "full", "seq_len": 1024}
    config.write_text(json.dumps({"heterogeneity": section}))
    report = examine_section(config, ModelFacts(name="m", spec=model, **heads), 2, None)
    assert "optimizer state goes where memory is free: ranks own in proportions of 0.25 to 1" in report["decided"]
