"""A plan file with its scenario comes back as it was written, whatever the workload says, and jobs leave it alone."""

from __future__ import annotations

import json
from dataclasses import asdict, fields, replace

import pytest

from ds_hetero.cluster import cluster_names, load_cluster
from ds_hetero.cost import Workload
from ds_hetero.cost.workload import Buffers
from ds_hetero.errors import PlanError
from ds_hetero.models import load_model, model_from_config, model_names
from ds_hetero.models.saved_tensors import SavedTensors
from ds_hetero.planner import strategy
from ds_hetero.reporting.described_plan import DescribedPlan, read_described_plan
from ds_hetero.reporting.run_file import plan_digest
from ds_hetero.reporting.scenario import PlanScenario, read_scenario
from ds_hetero.values.plans import Plan, read_plan

OTHER = {
    "seq_len": 8192,
    "micro_batch": 2,
    "micro_batches": 3,
    "causal": False,
    "zero_stage": 1,
    "zero_weights": (1.0, 2.0),
    "activation_checkpointing": False,
    "tiled_logits": False,
    "tiled_mlp": False,
    "tile_tokens": 512,
    "keep_attention": True,
    "ring_gradients": "bf16",
    "offload_activations": False,
    "element_bytes": 4,
    "gradient_bytes": 1.5,
    "optimizer_bytes": 6.0,
    "offload_optimizer": True,
    "offload_parameters": True,
    "buffers": Buffers(reduce_bucket=10, prefetch_bucket=20, live_parameters=30),
    "data_parallel": 2,
    "adapter_rank": 8,
    "trains_embedding": True,
    "quantization": "nf4",
    "logit_bytes": 18.7,
    "fused_kernels": True,
    "compiled": True,
    "selective_checkpointing": True,
    "experts": (3.0, 0.0),
}


@pytest.mark.parametrize("changed", [{}, OTHER, {"zero_within": True}, {"experts": "by_speed"}])
def test_a_scenario_comes_back_as_it_was_written(changed):
    assert set(OTHER) | {"zero_cluster", "zero_order", "zero_within"} == {field.name for field in fields(Workload)}
    for name in model_names():
        scenario = PlanScenario(
            cost_model="calibrated",
            model=load_model(name),
            workload=Workload(**{"seq_len": 4096, **changed}),
            clusters=(load_cluster(cluster_names()[0]),),
            lengths=(5, 6),
        )
        again = read_scenario(json.loads(json.dumps(scenario.to_dict())))
        assert replace(again, clusters=scenario.clusters) == scenario
        assert again.clusters[0].num_ranks == scenario.clusters[0].num_ranks


LLAMA = {
    "model_type": "llama",
    "num_hidden_layers": 4,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "intermediate_size": 128,
    "vocab_size": 96,
}
LATENT = {"kv_lora_rank": 16, "q_lora_rank": 8, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16}
KIMI = {
    "layer_types": ["linear_attention", "linear_attention", "full_attention", "full_attention"],
    "linear_num_heads": 4,
    "linear_head_dim": 8,
}
EXPERTS = {"n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "n_shared_experts": 1}


def scenario_of(config):
    return PlanScenario(
        cost_model="calibrated",
        model=model_from_config(config, "m"),
        workload=Workload(seq_len=4096),
        clusters=(load_cluster(cluster_names()[0]),),
    )


@pytest.mark.parametrize(
    "config",
    [
        LLAMA | {"model_type": "mistral", "sliding_window": 16},
        LLAMA | {"model_type": "gemma3_text", "sliding_window": 16},
        LLAMA | LATENT | EXPERTS | {"model_type": "deepseek_v3", "first_k_dense_replace": 1},
        LLAMA | EXPERTS | {"model_type": "afmoe", "num_dense_layers": 2},
        LLAMA | LATENT | KIMI | {"model_type": "kimi_linear"},
        LLAMA | {"model_type": "bert", "max_position_embeddings": 512},
        LLAMA | {"model_type": "lfm2", "layer_types": ["conv", "conv", "full_attention", "conv"]},
    ],
    ids=lambda config: config["model_type"],
)
def test_sizes_that_a_plain_configuration_does_not_say_are_in_the_file(config):
    scenario = scenario_of(config)
    content = json.loads(json.dumps(scenario.to_dict()))
    assert read_scenario(content).model == scenario.model
    assert content["model"]["sizes"]


def test_plain_models_have_no_sizes_in_their_file():
    assert set(scenario_of(LLAMA).to_dict()["model"]) == {"name", "config"}


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        (3, "scenario.model.sizes takes shared_mlp_size, .*, got 3"),
        ({"hidden_size": 3}, "scenario.model.sizes takes shared_mlp_size"),
        ({"window": -1}, "scenario.model.sizes.window: -1 is not a value of this field"),
        ({"gated_attention": 1}, "scenario.model.sizes.gated_attention: 1 is not a value of this field"),
        ({"latent": {"query_rank": 8}}, "scenario.model.sizes.latent takes whole numbers query_rank, kv_rank"),
        ({"saved": {"wide_norms": True}}, "scenario.model.sizes.saved takes wide_norms, native_norms"),
        (
            {"saved": {**asdict(SavedTensors()), "mlp_widths": "4"}},
            "saved.mlp_widths: '4' is not a value",
        ),
    ],
)
def test_wrong_sizes_are_refused_by_their_names(sizes, message):
    content = scenario_of(LLAMA).to_dict()
    content["model"]["sizes"] = sizes
    with pytest.raises(PlanError, match=message):
        read_scenario(content)


def test_a_file_of_a_version_without_buffers_has_the_default_ones():
    scenario = PlanScenario(
        cost_model="calibrated",
        model=load_model("llama-3.1-8b"),
        workload=Workload(seq_len=4096),
        clusters=(load_cluster(cluster_names()[0]),),
    )
    content = scenario.to_dict()
    content["workload"]["buffers"] = None
    assert read_scenario(content).workload == scenario.workload


def test_predictions_of_the_file_are_those_of_the_planner(tmp_path):
    for name in cluster_names():
        cluster = load_cluster(name)
        if cluster.num_ranks > 32:
            continue
        scenario = PlanScenario(
            cost_model="calibrated",
            model=load_model("llama-3.1-8b"),
            workload=Workload(seq_len=32768),
            clusters=(cluster,),
        )
        own = DescribedPlan(
            plan=Plan.of_replicas([strategy("ring", _cost(scenario))]),
            scenario=scenario,
        )
        (tmp_path / "plan.json").write_text(json.dumps(own.to_dict()))
        read = read_described_plan(tmp_path / "plan.json")
        assert isinstance(read, DescribedPlan) and plan_digest(read.plan) == plan_digest(own.plan)
        expected, found = (one.cost_of(0).predict(one.schedule_of(0)) for one in (own, read))
        assert found.iteration_s == pytest.approx(expected.iteration_s, rel=1e-12)
        assert read_plan(own.to_dict()) == own.plan  # what a job reads


def _cost(scenario):
    from ds_hetero.cost import make_cost_model

    return make_cost_model("calibrated", scenario.clusters[0], scenario.model, scenario.workload)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"cost_model": 1}, "cost_model and model.name must be text"),
        ({"clusters": []}, "scenario.clusters must be a list of clusters"),
        ({"lengths": [0]}, "scenario.lengths must be null or a list"),
        ({"workload": {}}, '"scenario.workload" takes seq_len'),
        ({"extra": 1}, '"scenario" takes cost_model'),
    ],
)
def test_a_wrong_scenario_is_refused_by_key(change, says):
    scenario = PlanScenario(
        cost_model="calibrated",
        model=load_model("gpt-3b"),
        workload=Workload(seq_len=4096),
        clusters=(load_cluster(cluster_names()[0]),),
    )
    with pytest.raises(PlanError, match=says):
        read_scenario({**scenario.to_dict(), **change})


def test_a_plan_of_other_ranks_than_its_clusters_is_refused():
    clusters = (load_cluster("hexiseq-setting-1"),)
    scenario = PlanScenario(
        cost_model="calibrated", model=load_model("gpt-3b"), workload=Workload(seq_len=4096), clusters=clusters
    )
    with pytest.raises(PlanError, match=f"have {clusters[0].num_ranks} devices"):
        DescribedPlan(plan=Plan.of_replicas([strategy("ring", _cost(scenario)).shifted(1)]), scenario=scenario)
