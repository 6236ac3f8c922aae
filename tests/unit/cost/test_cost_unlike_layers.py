"""Windows, latent attention, and layers without experts beside those with: hand-worked parts of their costs."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from ds_hetero.cluster import Cluster, cluster_from_dict
from ds_hetero.cost import CalibratedCostModel, Workload, make_cost_model
from ds_hetero.cost.stages.hexiscale import STAGE_COSTS, make_stage_costs
from ds_hetero.cost.terms.flops import training_flops
from ds_hetero.cost.terms.layer_memory import LayerShare, layer_memory
from ds_hetero.errors import PlanError
from ds_hetero.models.latent import LatentAttention
from ds_hetero.models.recurrent import RecurrentLayers
from ds_hetero.models.shapes import ModelSpec
from ds_hetero.models.trained_weights import adapter_parameters
from ds_hetero.planner.document_search.calibrated_costs import unit_costs
from ds_hetero.values.baselines import ulysses

FULL = ModelSpec(
    name="small",
    num_layers=4,
    hidden_size=512,
    num_heads=8,
    num_kv_heads=8,
    head_dim=64,
    mlp_size=2048,
    vocab_size=1000,
    gated_mlp=True,
)
ALTERNATING = replace(FULL, window=1024, window_layers=3)
EXPERTS = replace(FULL, mlp_size=256, num_experts=8, experts_per_token=2, shared_mlp_size=256)
FIRST_DENSE = replace(EXPERTS, dense_layers=1, dense_mlp_size=2048)
LATENT = replace(FULL, head_dim=96, latent=LatentAttention(query_rank=128, kv_rank=64, rope_dim=32, value_dim=64))


def cluster(count: int = 1) -> Cluster:
    device = {"peak_tflops": 1, "memory_gib": 1000, "memory_bandwidth_gb_per_s": 100}
    link = {"bandwidth_gb_per_s": 10, "latency_us": 0}
    nodes = [{"name": "n", "device": "d", "count": count, "link": link}]
    return cluster_from_dict({"nodes": nodes, "devices": {"d": device}, "network": link})


def cost(model: ModelSpec, **work: object) -> CalibratedCostModel:
    settings = {"seq_len": 8192, "zero_stage": 0, "activation_checkpointing": False} | work
    made = make_cost_model("calibrated", cluster(), model, Workload(**settings))
    assert isinstance(made, CalibratedCostModel)
    return made


def block_s(model: ModelSpec, **work: object) -> float:
    return cost(model, **work).predict(ulysses(1, model.num_heads, model.num_kv_heads)).block_s


def test_attention_over_a_window_costs_its_band():
    """Three of four layers see 1,024 keys: w L - w^2 / 2 pairs of L^2 / 2, 14 FLOPs, 8 heads of 64."""
    length = 8192
    pairs, band = length**2 / 2, 1024 * length - 1024**2 / 2
    saved_s = 3 / 4 * (pairs - band) * 14 * 8 * 64 / 1e12
    assert block_s(FULL) - block_s(ALTERNATING) == pytest.approx(saved_s, rel=1e-6)
    assert block_s(replace(ALTERNATING, window=length)) == block_s(FULL)
    assert block_s(replace(ALTERNATING, window=10 * length)) == block_s(FULL)


def test_a_window_takes_no_memory_away():
    schedule = ulysses(1, 8, 8)
    assert cost(ALTERNATING).predict(schedule).memory_bytes == cost(FULL).predict(schedule).memory_bytes


def test_the_needed_flops_are_those_of_bands_and_of_narrow_values():
    matmuls = 3 * 2 * (4 * (FULL.attention_parameters + FULL.mlp_parameters) + 512 * 1000)
    band = (1024 * 8192 - 1024**2 / 2) / 8192
    attention = 3 * 4 * 8 * 64 * (8192 / 2 + 3 * band)
    assert training_flops(ALTERNATING, 8192, causal=True) == pytest.approx(matmuls + attention)
    of_heads = training_flops(LATENT, 8192, causal=True) - training_flops(LATENT, 0, causal=True)
    assert of_heads == pytest.approx(3 * 4 * 2 * 8 * (96 + 64) * 8192 / 2)


def test_latent_attention_has_the_weights_of_its_projections_and_adapters_beside_them():
    down = 512 * (128 + 64 + 32)
    up = 128 * 8 * 96 + 64 * 8 * (64 + 64)
    out = 8 * 64 * 512
    assert LATENT.attention_parameters == down + up + out + 128 + 64
    inputs_and_outputs = (512 + 128) + (128 + 768) + (512 + 96) + (64 + 1024) + (512 + 512)
    mlp = 3 * (512 + 2048)
    assert adapter_parameters(LATENT, 4) == 4 * (inputs_and_outputs + mlp)
    straight = replace(LATENT, latent=replace(LATENT.latent, query_rank=0))
    assert LATENT.attention_parameters - straight.attention_parameters == 128 * (512 + 768 + 1) - 512 * 768


def test_layers_without_experts_count_as_such_in_time_parameters_and_adapters():
    dense = replace(FULL, mlp_size=2048)
    mean = (3 * EXPERTS.layer_parameters + dense.layer_parameters) / 4
    assert FIRST_DENSE.layer_parameters == pytest.approx(mean, rel=1e-6)
    assert block_s(FIRST_DENSE) == pytest.approx((3 * block_s(EXPERTS) + block_s(dense)) / 4, rel=1e-6)
    adapters = (3 * adapter_parameters(EXPERTS, 4) + adapter_parameters(dense, 4)) / 4
    assert adapter_parameters(FIRST_DENSE, 4) == pytest.approx(adapters, abs=1)


def memory(model: ModelSpec):
    work = Workload(seq_len=4096, activation_checkpointing=False)
    return layer_memory(model, work, LayerShare.of_cut(model, work, 1))


def test_kept_activations_are_those_of_both_kinds_of_layers():
    dense = replace(FULL, mlp_size=2048)
    of_kinds = {model.name: memory(model) for model in (replace(EXPERTS, name="experts"), replace(dense, name="dense"))}
    both = memory(FIRST_DENSE)
    saved = {name: float(np.squeeze(layer.saved_bytes)) for name, layer in of_kinds.items()}
    assert float(np.squeeze(both.saved_bytes)) == max(saved.values())
    assert float(np.squeeze(both.all_layers_saved_bytes)) == pytest.approx(3 * saved["experts"] + saved["dense"])


def test_layers_that_are_a_mixer_or_an_mlp_keep_what_they_have():
    """Nemotron-H: of six layers two recurrences, one attention, three MLPs."""
    layers = RecurrentLayers(
        num_layers=2,
        num_attention_layers=1,
        num_model_layers=6,
        delta_rule=False,
        num_heads=8,
        num_key_heads=1,
        key_dim=64,
        head_dim=64,
        conv_size=4,
        chunk=128,
    )
    model = replace(FULL, num_layers=6, recurrent=layers)
    in_every_layer = replace(model, num_layers=3, recurrent=replace(layers, num_model_layers=3))
    assert (model.num_mlps, in_every_layer.num_mlps) == (3, 3)
    norms = 2 * 512
    assert 6 * (model.layer_parameters - norms) == pytest.approx(
        3 * (in_every_layer.layer_parameters - norms), rel=1e-6
    )
    alone, together = memory(model), memory(in_every_layer)
    assert float(np.squeeze(alone.all_layers_saved_bytes - together.all_layers_saved_bytes)) == pytest.approx(0)
    assert float(np.squeeze(alone.saved_bytes)) < float(np.squeeze(together.saved_bytes))
    assert 6 * block_s(model) == pytest.approx(3 * block_s(in_every_layer), rel=1e-6)


@pytest.mark.parametrize(
    ("model", "kinds"),
    [
        (ALTERNATING, "layers whose attention sees 1,024 tokens beside those that see all"),
        (FIRST_DENSE, "layers with one MLP beside those with experts"),
    ],
)
def test_costs_that_do_not_know_unlike_layers_refuse_them_by_name(model, kinds):
    for name in STAGE_COSTS:
        with pytest.raises(PlanError, match=f"small has {kinds}, and the cost models of pipeline stages cover"):
            make_stage_costs(name, cluster(2), model, Workload(seq_len=4096))
    with pytest.raises(PlanError, match=f"small has {kinds}, which HexiSeq's equations do not cover"):
        make_cost_model("published", cluster(), model, Workload(seq_len=4096))


def test_windows_are_refused_where_attention_is_counted_without_them():
    every_layer = replace(FULL, window=1024, window_layers=4)
    assert every_layer.unlike_layers is None
    with pytest.raises(PlanError, match="which is planned for causal attention alone"):
        cost(every_layer, causal=False)
    with pytest.raises(PlanError, match="small has layers whose attention sees a window, which HexiSeq's equations do"):
        make_cost_model("published", cluster(), every_layer, Workload(seq_len=4096))
    with pytest.raises(PlanError, match="sees 1,024 tokens, and no cost model covers documents in these"):
        unit_costs(cost(every_layer), ulysses(1, 8, 8))
    with pytest.raises(PlanError, match="sees a window, which HexiScale's equations do not cover"):
        make_stage_costs("hexiscale", cluster(2), every_layer, Workload(seq_len=4096))
