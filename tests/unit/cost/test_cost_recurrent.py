"""Linear-attention and SSM layers in the calibrated cost model: hand-worked parts, and rules for every schedule."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest

from ds_hetero.cluster import Cluster, cluster_from_dict
from ds_hetero.cost import Workload, make_cost_model
from ds_hetero.cost.calibrated import CalibratedCostModel
from ds_hetero.cost.recurrent import heads_by_tokens, moved_states
from ds_hetero.cost.stages.hexiscale import STAGE_COSTS, make_stage_costs
from ds_hetero.cost.terms.grouping import Grouping
from ds_hetero.errors import ModelError, PlanError
from ds_hetero.models import model_from_config
from ds_hetero.models.shapes import ModelSpec
from ds_hetero.planner import plan, strategy
from ds_hetero.reporting.scenario import _config_of
from ds_hetero.runtime.attention.batch_layout import batch_layout
from ds_hetero.runtime.recurrent.state_passing import chains_of
from ds_hetero.runtime.replica import Replica
from ds_hetero.values.baselines import ring, ulysses
from ds_hetero.values.placement import Rows, stream_placement
from ds_hetero.values.plans import Plan
from ds_hetero.values.schedule import Group, Schedule
from ds_hetero.values.splits import share

QWEN_NEXT = {  # Qwen3-Next-80B-A3B
    "model_type": "qwen3_next",
    "hidden_size": 2048,
    "intermediate_size": 5120,
    "num_hidden_layers": 48,
    "num_attention_heads": 16,
    "num_key_value_heads": 2,
    "head_dim": 256,
    "vocab_size": 151936,
    "hidden_act": "silu",
    "full_attention_interval": 4,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_value_head_dim": 128,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "moe_intermediate_size": 512,
    "num_experts": 512,
    "num_experts_per_tok": 10,
    "shared_expert_intermediate_size": 512,
}
BAMBA = {  # Bamba-9B
    "model_type": "bamba",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "hidden_act": "silu",
    "attn_layer_indices": [9, 18, 27],
    "mamba_n_heads": 128,
    "mamba_d_head": 64,
    "mamba_d_state": 128,
    "mamba_n_groups": 1,
    "mamba_d_conv": 4,
    "mamba_chunk_size": 256,
}
FALCON = {**BAMBA, "model_type": "falcon_h1", "mamba_d_ssm": 8192}


def cluster(*speeds: float, bandwidth: float = 10.0, latency_us: float = 0.0) -> Cluster:
    devices = {
        f"d{i}": {"peak_tflops": speed, "memory_gib": 10_000, "memory_bandwidth_gb_per_s": 1000 * speed}
        for i, speed in enumerate(speeds)
    }
    link = {"bandwidth_gb_per_s": bandwidth, "latency_us": latency_us}
    nodes = [{"name": f"n{i}", "device": f"d{i}", "count": 1, "link": link} for i in range(len(speeds))]
    return cluster_from_dict({"nodes": nodes, "devices": devices, "network": link})


def cost(model: ModelSpec, machines: Cluster, **work: object) -> CalibratedCostModel:
    settings = {"seq_len": 65536, "zero_stage": 0, "activation_checkpointing": False} | work
    made = make_cost_model("calibrated", machines, model, Workload(**settings))
    assert isinstance(made, CalibratedCostModel)
    return made


def in_ring(model: ModelSpec, *tokens: float) -> Schedule:
    groups = tuple(Group(ranks=(r,), tokens=(t,), heads=(model.num_heads,)) for r, t in enumerate(tokens))
    return Schedule(num_heads=model.num_heads, num_kv_heads=model.num_kv_heads, groups=groups)


@pytest.mark.parametrize(
    ("config", "billions", "active", "layers"),
    [(QWEN_NEXT, 79.6, 3.9, (36, 12)), (BAMBA, 9.8, 9.8, (29, 3)), (FALCON, 11.3, 11.3, (32, 32))],
    ids=["Qwen3-Next-80B-A3B", "Bamba-9B", "both in every layer"],
)
def test_a_configuration_gives_the_model_its_size(config, billions, active, layers):
    model = model_from_config(config, "m")
    assert model.recurrent is not None
    assert (model.recurrent.num_layers, model.attention_layers) == layers
    assert model.num_parameters / 1e9 == pytest.approx(billions, rel=0.02)
    used = model.num_layers * model.active_layer_parameters + model.embedding_parameters
    assert used / 1e9 == pytest.approx(active, rel=0.02)


@pytest.mark.parametrize("config", [QWEN_NEXT, BAMBA, FALCON], ids=["delta rule", "Mamba-2", "both"])
def test_a_described_plan_holds_the_model(config):
    model = model_from_config(config, "m")
    assert model_from_config(_config_of(model), "m") == model


@pytest.mark.parametrize(
    ("config", "changes", "message"),
    [
        (QWEN_NEXT, {"layer_types": ["full_attention", "conv"]}, "layer_types has conv; it must name one of"),
        (QWEN_NEXT, {"layer_types": ["full_attention"]}, "layer_types names 1 layers of 48"),
        (QWEN_NEXT, {"layer_types": 3}, "layer_types must be a list of names, got 3"),
        (QWEN_NEXT, {"linear_num_value_heads": 40}, "40 heads of the scan are not a multiple of its 16 key heads"),
        (QWEN_NEXT, {"linear_key_head_dim": None}, "linear_key_head_dim must be a whole number >= 1, got None"),
        (BAMBA, {"attn_layer_indices": None}, "no layer has attention, and a schedule cuts heads"),
        (BAMBA, {"attn_layer_indices": [32]}, "attn_layer_indices must be layers from 0 to 31"),
        (BAMBA, {"mamba_n_heads": 100, "mamba_d_head": "auto"}, "mamba_n_heads=100 does not divide"),
        (BAMBA, {"mamba_n_heads": None}, "mamba_d_state names a kind of layer"),
    ],
)
def test_layers_that_have_no_cost_model_are_refused_by_their_key(config, changes, message):
    with pytest.raises(ModelError, match=message):
        model_from_config(config | changes, "m")


def test_other_cost_models_refuse_them():
    model, machines = model_from_config(BAMBA, "bamba"), cluster(1, 1)
    with pytest.raises(PlanError, match="SSM layers, which HexiSeq's equations do not cover"):
        make_cost_model("published", machines, model, Workload(seq_len=4096))
    for name in STAGE_COSTS:
        with pytest.raises(PlanError, match="cost models of pipeline stages cover attention layers only"):
            make_stage_costs(name, machines, model, Workload(seq_len=4096))


def test_heads_are_cut_as_the_runtime_cuts_them():
    rng = random.Random(0)
    for _ in range(300):
        tokens = [rng.choice([0, 1, 5, rng.randrange(1, 5000)]) for _ in range(rng.randrange(1, 9))]
        tokens[0] = tokens[0] or 7
        heads = rng.choice([1, 3, 8, 32, 48])
        assert heads_by_tokens(np.array([tokens], dtype=float), heads)[0].tolist() == list(share(heads, tokens))


def test_one_scan_moves_what_the_formula_of_the_docs_says():
    """Two ranks of 3:1: the first sends a quarter of its tokens' width, the second three quarters of its own."""
    model, length = model_from_config(QWEN_NEXT, "m"), 65536
    slow = cost(model, cluster(1, 1, bandwidth=0.01), seq_len=length)
    fast = cost(model, cluster(1, 1, bandwidth=1e6), seq_len=length)
    tokens = np.array([[length * 3 / 4, length / 4]])
    one_pass = [each._recurrent.passes(Grouping(each.cluster, [[0], [1]]), tokens)[0] for each in (slow, fast)]
    width_in, width_out = 2 * 16 * 128 * 2 + 32 * 128 * 2 + 32 * 2 + 32 * 4, 32 * 128 * 2
    sent_bytes = length * (3 / 4) * (1 / 4) * (width_in + width_out)  # equal for both ranks and both ways
    assert one_pass[0].exchange_B[0] - one_pass[1].exchange_B[0] == pytest.approx(sent_bytes / 0.01e9, rel=1e-4)


def test_a_layer_takes_its_work_its_exchange_and_its_scan():
    """One rank, no efficiencies: operations over the peak and elements over the memory's bandwidth."""
    device = {"peak_tflops": 1, "memory_gib": 10_000, "memory_bandwidth_gb_per_s": 1e6, "efficiency": {}}
    node = {"name": "n", "device": "d", "count": 1, "link": {"bandwidth_gb_per_s": 1}}
    machines = cluster_from_dict({"nodes": [node], "devices": {"d": device}})
    model, length = model_from_config(BAMBA, "m"), 4096
    tokens = np.array([[float(length)]])
    forward, backward = cost(model, machines, seq_len=length)._recurrent.passes(Grouping(machines, [[0]]), tokens)
    inner, groups = 128 * 64, 2 * 128
    weights = 4096 * (2 * inner + groups + 128) + 4096 * inner + (inner + groups) * 4 + 3 * 4096 * 14336
    scan = 2 * 256 * (128 + 64) + 4 * 128 * 64
    assert forward.exchange_B[0] == 0
    assert forward.before_B[0] == pytest.approx(2 * weights * length / 1e12, rel=1e-4)
    assert forward.scan_BD[0, 0] == pytest.approx(scan * 128 * length / 1e12, rel=1e-3)
    assert backward.total_B[0] == pytest.approx(2 * forward.total_B[0])


@pytest.mark.parametrize("layout", ["contiguous", "zigzag"])
def test_passed_states_are_counted_as_the_runtime_counts_them(layout):
    rng = random.Random(2)
    for _ in range(20):
        weights = [rng.choice([0, rng.randrange(1, 9)]) for _ in range(rng.randrange(2, 7))]
        weights[0] = weights[0] or 1
        groups = tuple(Group(ranks=(rank,), tokens=(weight,), heads=(4,)) for rank, weight in enumerate(weights))
        schedule = Schedule(num_heads=4, num_kv_heads=4, groups=groups, layout=layout)
        batch = batch_layout(stream_placement(schedule, 1000), (Rows(0, 1, ((0, 1000),)),))
        replica = Replica(plan=Plan.of_replicas([schedule]), rank=0, sp_group=None, a2a_group=None)
        grouping = Grouping.of_schedule(cluster(*[1] * len(weights)), schedule)
        counted = moved_states(grouping, np.array([weights], dtype=float))[0]
        assert counted == chains_of(replica, batch).moved_states, weights


def test_states_take_no_longer_for_longer_sequences():
    """Two ranks of 3:1 on a slow link: one state of all heads, whatever the length; the delta rule has no such way."""
    model = model_from_config(BAMBA, "m")
    taken = []
    for length in (65536, 131072):
        bounds = [cost(model, cluster(1, 1, bandwidth=each), seq_len=length) for each in (0.01, 1e6)]
        tokens = np.array([[length * 3 / 4, length / 4]])
        times = [each._recurrent.passes(Grouping(each.cluster, [[0], [1]], zigzag=False), tokens)[0] for each in bounds]
        taken.append(times[0].exchange_B[0] - times[1].exchange_B[0])
        assert times[0].work_BD[0] == pytest.approx([3 * times[0].work_BD[0, 1], times[0].work_BD[0, 1]], rel=1e-3)
    assert taken == pytest.approx([4 * 128 * (64 * 128 + 1) / 0.01e9] * 2, rel=1e-3)


def test_kept_attention_leaves_the_recomputation_of_recurrent_layers():
    """The block gets shorter by what attention layers save, and by no more."""
    nodes = cluster(4, 3, 2, 1, latency_us=20)
    model, schedule = model_from_config(QWEN_NEXT, "qwen"), ring(4, 16, 2)
    whole, again, kept = (
        cost(model, nodes, **work).predict(schedule).block_s
        for work in (
            {},
            {"activation_checkpointing": True},
            {"activation_checkpointing": True, "keep_attention": True},
        )
    )
    alone = replace(model, recurrent=None)
    of_attention = [
        cost(alone, nodes, activation_checkpointing=True, keep_attention=each).predict(schedule).block_s
        for each in (False, True)
    ]
    assert whole < kept < again
    assert again - kept == pytest.approx((of_attention[0] - of_attention[1]) / 4)


@pytest.mark.parametrize("config", [QWEN_NEXT, BAMBA, FALCON], ids=["delta rule", "Mamba-2", "both"])
@pytest.mark.parametrize("checkpointing", [False, True])
def test_parts_add_up_for_random_schedules(config, checkpointing):
    rng = random.Random(1)
    model = model_from_config(config, "m")
    bound = cost(model, cluster(4, 3, 2, 1, latency_us=20), activation_checkpointing=checkpointing)
    for _ in range(10):
        schedule = in_ring(model, *(rng.randrange(1, 9) for _ in range(4)))
        if rng.random() < 0.3:
            schedule = ulysses(4, model.num_heads, model.num_kv_heads)
        prediction = bound.predict(schedule)
        assert prediction.terms.block_s == pytest.approx(prediction.block_s)
        assert all(getattr(prediction.terms, name) >= 0 for name in prediction.terms.__slots__)
        assert prediction.block_s >= bound.bound_s
        spans = bound.timeline(schedule)
        assert max(span.stop_s for span in spans) == pytest.approx(prediction.block_s)
        assert max(prediction.busy_s) <= prediction.block_s
        assert prediction.bottleneck.text


def test_a_layer_counts_as_often_as_the_model_has_it():
    """A block is the mean of both kinds, so that its time is linear in how many of them have attention."""
    model = model_from_config(BAMBA, "m")
    schedule, machines = ring(4, 32, 8), cluster(1, 1, 1, 1)

    def blocks_s(attention: int) -> float:
        layers = replace(model.recurrent, num_layers=32 - attention, num_attention_layers=attention)
        return cost(replace(model, recurrent=layers), machines).predict(schedule).block_s * 32

    assert blocks_s(2) - blocks_s(1) == pytest.approx((blocks_s(32) - blocks_s(2)) / 30)


@pytest.mark.parametrize("config", [QWEN_NEXT, BAMBA], ids=["delta rule", "Mamba-2"])
def test_the_planned_split_follows_speed(config):
    """Of a model whose time is mostly that of its scans and products, tokens and with them heads go by speed."""
    model, machines = model_from_config(config, "m"), cluster(4, 3, 2, 1, bandwidth=100)
    work = Workload(seq_len=16384, zero_stage=0)
    planned = plan(machines, model, work)
    tokens = planned.schedule.tokens(16384)
    assert [tokens[rank] / 16384 for rank in range(4)] == pytest.approx([0.4, 0.3, 0.2, 0.1], abs=0.03)
    bound = make_cost_model("calibrated", machines, model, work)
    even, proportional = (
        bound.predict(each).block_s for each in (ring(4, *_heads(model)), strategy("proportional", bound))
    )
    assert planned.prediction.block_s <= proportional * 1.001
    assert even / planned.prediction.block_s > 1.8


def _heads(model: ModelSpec) -> tuple[int, int]:
    return model.num_heads, model.num_kv_heads


def test_slow_links_move_the_split_away_from_many_small_shares():
    """On links that take longer than the scan, a rank that holds nearly all tokens beats four equal ones."""
    model = model_from_config(BAMBA, "m")
    bound = cost(model, cluster(1, 1, 1, 1, bandwidth=0.001), seq_len=8192)
    alone, even = (bound.predict(in_ring(model, *tokens)).block_s for tokens in ((1, 0, 0, 0), (1, 1, 1, 1)))
    assert alone < even
