"""The default cost model: hand-worked parts, and what must hold for every schedule."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ds_hetero.cluster import Cluster, cluster_from_dict, load_cluster
from ds_hetero.cost import Grouping, Workload, calibrated, make_cost_model
from ds_hetero.cost.terms.exchange import exchange_s
from ds_hetero.cost.terms.head_cuts import kv_heads_of_ranks, ring_edges
from ds_hetero.cost.terms.host_memory import host_bytes_of_nodes
from ds_hetero.cost.terms.zero import RingCollective
from ds_hetero.models import load_model
from ds_hetero.models.shapes import ModelSpec
from ds_hetero.values.baselines import ring, ulysses, usp
from ds_hetero.values.schedule import Group, Schedule
from tests.work import lines_run

MODEL = ModelSpec(
    name="small",
    num_layers=4,
    hidden_size=512,
    num_heads=8,
    num_kv_heads=4,
    head_dim=64,
    mlp_size=2048,
    vocab_size=1000,
    gated_mlp=True,
)
# Round numbers and no efficiencies: 1 TFLOPS, 100 GB/s of memory.
ROUND = {"peak_tflops": 1, "memory_gib": 8, "memory_bandwidth_gb_per_s": 100}


def cluster(
    *sizes: int, inside=10.0, between=1.0, latency=0.0, nics=None, total=None, efficiency=None, memory=100, **speeds
):
    numbers = ROUND | {"memory_bandwidth_gb_per_s": memory}
    devices = {f"d{i}": numbers | {"peak_tflops": speeds.get(f"d{i}", 1)} for i in range(len(sizes))}
    for device in devices.values():
        device["efficiency"] = efficiency or {}
    link = {"bandwidth_gb_per_s": inside, "latency_us": latency} | ({"total_gb_per_s": total} if total else {})
    nodes = [{"name": f"n{i}", "device": f"d{i}", "count": size, "link": link} for i, size in enumerate(sizes)]
    for node in nodes:
        node["nics"] = {"bandwidth_gb_per_s": nics} if nics else "per_rank"
    return cluster_from_dict(
        {"nodes": nodes, "devices": devices, "network": {"bandwidth_gb_per_s": between, "latency_us": latency}}
    )


def plan(*groups, layout="zigzag", model=MODEL):
    return Schedule(
        num_heads=model.num_heads,
        num_kv_heads=model.num_kv_heads,
        layout=layout,
        groups=tuple(Group(ranks=r, tokens=t, heads=h) for r, t, h in groups),
    )


def cost(cluster: Cluster, model=MODEL, **work):
    work = {"seq_len": 4096, "zero_stage": 0, "activation_checkpointing": False} | work
    return make_cost_model("calibrated", cluster, model, Workload(**work))


def test_zero_communicates_over_the_devices_of_all_replicas():
    whole = cluster(2, 2, inside=100.0, between=1.0)
    part = whole.part(0, 2)
    work = {"zero_stage": 1, "data_parallel": 2}
    alone = cost(part, **work).predict(ulysses(2, 8, 4))
    both = cost(part, **work, zero_cluster=whole).predict(ulysses(2, 8, 4))
    # All-reduce (two passes) and all-gather of 2-byte elements: 1/2 of them at 100 GB/s; 3/4 at two ports of 1 GB/s.
    assert alone.parts_s["zero_s"] == pytest.approx(MODEL.num_parameters * 3 * 2 * (1 / 2) / 100e9)
    assert both.parts_s["zero_s"] == pytest.approx(MODEL.num_parameters * 3 * 2 * (3 / 4) / 2e9)
    assert both.block_s == alone.block_s and both.memory_bytes == alone.memory_bytes


# --- parts by hand ----------------------------------------------------------------------------------


def test_one_rank_by_hand():
    found = cost(cluster(1)).predict(ulysses(1, 8, 4))
    # Products: q and output 512 x 512, k and v 512 x 256, three matrices 512 x 2048; two operations per weight.
    weights = 2 * 512 * 512 + 2 * 512 * 256 + 3 * 512 * 2048
    products = 2 * weights * 4096 / 1e12
    # Elements: norms and residuals 10 x 512, rotary 2 x (8 + 4) x 64, gated activation 3 x 2048; 2 bytes, 100 GB/s.
    elements = (10 * 512 + 2 * 12 * 64 + 3 * 2048) * 4096 * 2 / 100e9
    # Attention, causal: half of 4 (forward) and 10 (backward) x 4096^2 x 8 heads x 64.
    attention = 0.5 * 4096**2 * 8 * 64 / 1e12
    assert found.terms.non_attention_s == pytest.approx(3 * (products + elements))
    assert found.terms.all_to_all_s == 0
    assert found.terms.ring_steps_s == pytest.approx(14 * attention)
    assert found.busy_s == (pytest.approx(found.block_s),)
    assert found.bound_s == pytest.approx(found.block_s)
    # The head: 6 x 512 x 1000 operations per token, 8 with a tile computed twice, and six passes over fp32 logits.
    assert found.parts_s["loss_s"] == pytest.approx(4096 * (8 * 512 * 1000 / 1e12 + 6 * 1000 * 4 / 100e9))
    # Adam: 12 bytes of state read and written, 2 of gradient read, 2 of parameter written.
    assert found.parts_s["optimizer_s"] == pytest.approx(MODEL.num_parameters * (28 + 8) / 100e9)  # Adam, copies
    assert found.iteration_s == pytest.approx(
        4 * found.block_s + found.parts_s["loss_s"] + found.parts_s["optimizer_s"]
    )


def test_a_rank_without_tokens_runs_its_layers_as_the_others_do():
    """Its host issues every kernel: a slow one holds all others up at the next exchange."""
    slow = cluster(2, efficiency={"kernel_overhead_s": 1.0, "matmul_half_tokens": 64})
    part = plan(((0, 1), (4096, 0), (4, 4)))
    found, one = cost(slow).predict(part), cost(slow).predict(plan(((0, 1), (4095, 1), (4, 4))))
    assert found.busy_s[1] == pytest.approx(one.busy_s[1], rel=1e-3)
    assert found.busy_s[1] > 3 * 1.0


def test_checkpointing_repeats_the_forward_and_full_attention_doubles_it():
    base = cost(cluster(1)).predict(ulysses(1, 8, 4)).terms
    again = cost(cluster(1), activation_checkpointing=True).predict(ulysses(1, 8, 4)).terms
    last_s = 2 * MODEL.mlp_size * MODEL.hidden_size * 4096 / 1e12  # product, which is not computed again
    assert again.non_attention_s == pytest.approx(base.non_attention_s * 4 / 3 - last_s)
    assert again.ring_steps_s == pytest.approx(base.ring_steps_s * 18 / 14)  # HexiSeq's Eq. 7 counts 16
    full = cost(cluster(1), causal=False).predict(ulysses(1, 8, 4)).terms
    assert full.ring_steps_s == pytest.approx(2 * base.ring_steps_s)


def test_efficiency_curves_lower_the_rate_of_small_shapes():
    shares = {"matmul": 0.5, "attention_forward": 0.5, "attention_backward": 0.5, "memory": 0.5}
    half = cost(cluster(1, efficiency=shares)).predict(ulysses(1, 8, 4))
    whole = cost(cluster(1)).predict(ulysses(1, 8, 4))
    assert half.block_s == pytest.approx(2 * whole.block_s)
    # Half the rate at 4096 x 8 rows, and half again at 4096 keys: four times attention's time.
    curves = {"attention_half_rows": 4096 * 8, "attention_half_kv": 4096}
    slow = cost(cluster(1, efficiency=curves)).predict(ulysses(1, 8, 4))
    assert slow.terms.ring_steps_s == pytest.approx(4 * whole.terms.ring_steps_s)
    assert slow.terms.non_attention_s == whole.terms.non_attention_s
    overhead = cost(cluster(1, efficiency={"kernel_overhead_s": 1.0})).predict(ulysses(1, 8, 4))
    assert overhead.terms.non_attention_s == pytest.approx(whole.terms.non_attention_s + 3)


def test_every_round_of_messages_takes_the_hosts_time():
    """Two exchanges in each pass of a block, and the one hop of a ring of two in each pass; none of a rank alone."""

    def slower(schedule, *sizes):
        host = cluster(*sizes, latency=5.0, efficiency={"message_overhead_s": 1.0})
        return cost(host).predict(schedule).block_s - cost(cluster(*sizes, latency=5.0)).predict(schedule).block_s

    assert slower(ulysses(1, 8, 4), 1) == 0
    assert slower(ulysses(2, 8, 4), 2) == pytest.approx(4)
    ring = plan(((0,), (2048,), (8,)), ((1,), (2048,), (8,)))
    alone = cost(cluster(2, efficiency={"message_overhead_s": 1.0})).predict(ring).block_s
    assert alone - cost(cluster(2)).predict(ring).block_s == pytest.approx(2)


def test_exchange_adds_up_bytes_at_every_port():
    # Ranks 0, 1 on node 0 (10 GB/s inside), rank 2 on node 1 (1 GB/s between); tokens 3, 2, 1 and weights 4, 5, 6.
    one = cluster(2, 1)
    grouping = Grouping(one, [[0, 1, 2]])
    tokens, weights = np.array([[3.0, 2.0, 1.0]]), np.array([[4.0, 5.0, 6.0]])
    # Rank 0 sends 3 x 6 out and receives 4 x 1; rank 1 2 x 6 and 5 x 1; rank 2 sends 1 x 9, receives 6 x 5 = 30, most.
    assert exchange_s(grouping, tokens, weights).item() == pytest.approx(30 / 1e9)
    # Two senders on node 0 share a NIC of 0.5 GB/s: (3 + 2) x 6 through it.
    assert exchange_s(Grouping(cluster(2, 1, nics=0.5), [[0, 1, 2]]), tokens, weights).item() == pytest.approx(60 / 1e9)
    # A switch of 0.1 GB/s inside node 0: 3 x 5 + 2 x 4 bytes pass through it.
    slow = Grouping(cluster(2, 1, total=0.1), [[0, 1, 2]])
    assert exchange_s(slow, tokens, weights).item() == pytest.approx(23 / 0.1e9)
    # The way back trades tokens for weights and takes as long.
    assert exchange_s(grouping, weights, tokens).item() == pytest.approx(30 / 1e9)


def test_two_groups_on_one_nic_share_its_bandwidth():
    # Groups {0, 2} and {1, 3} over two nodes: each rank sends 1 x 1 byte out; the NIC carries two of them.
    one = cluster(2, 2, between=1.0, nics=1.0)
    found = exchange_s(Grouping(one, [[0, 2], [1, 3]]), np.ones((1, 4)), np.ones((1, 4)))
    assert found.tolist() == [[pytest.approx(2e-9), pytest.approx(2e-9)]]
    alone = exchange_s(Grouping(cluster(2, 2), [[0, 2], [1, 3]]), np.ones((1, 4)), np.ones((1, 4)))
    assert alone.tolist() == [[pytest.approx(1e-9), pytest.approx(1e-9)]]
    assert Grouping(cluster(2, 2, latency=7), [[0, 2], [1], [3]]).exchange_latency_s == pytest.approx([7e-6, 0, 0])


def test_ring_transfers_add_up_at_the_receiver():
    # Two groups of two; heads 6 + 2 against 2 + 6: rank 2 receives 2 heads from rank 0, rank 3 four from rank 0 and two
    # from rank 1. With two queries per KV head that is 1, 2 and 1 KV heads, and rank 0 sends three of them.
    edges = ring_edges(Grouping(cluster(2, 2), [[0, 1], [2, 3]]), np.array([[6, 2, 2, 6]]), 2)
    found = list(zip(edges.sender.tolist(), edges.receiver.tolist(), edges.heads.tolist(), strict=True))
    assert found == [(2, 0, 1), (3, 0, 2), (3, 1, 1), (0, 2, 1), (0, 3, 2), (1, 3, 1)]
    # Forward, one KV block of 2048 tokens: 3 KV heads x 2 x 64 x 2 bytes a token at 1 GB/s = 1.57 ms, more than a step.
    one = cost(cluster(2, 2, d0=1e6, d1=1e6, memory=1e6))
    schedule = plan(((0, 1), (1, 1), (6, 2)), ((2, 3), (1, 1), (2, 6)))
    forward = 3 * 2 * 64 * 2 * 2048 / 1e9
    backward = 3 * 2 * 64 * 4 * 2048 / 1e9  # no KV hop with two groups, dK and dV in fp32
    ring_s = one.predict(schedule).terms.ring_steps_s
    assert ring_s == pytest.approx(forward + backward, rel=1e-3)


def test_kv_heads_on_a_cut_travel_twice():
    grouping = Grouping(cluster(2, 1), [[0, 1], [2]])
    heads = np.array([[3, 5, 8]])
    assert kv_heads_of_ranks(grouping, heads, 2).tolist() == [[2, 3, 4]]
    edges = ring_edges(grouping, heads, 2)  # tasks 0-3 and 3-8: KV heads 0-1 and 1-3
    assert edges.heads.tolist() == [2, 3, 2, 3]


def test_contiguous_groups_wait_for_the_last_and_zigzag_shares():
    model = replace(MODEL, num_kv_heads=8)
    work = cost(cluster(4, inside=1e6, memory=1e6), model, seq_len=8192)
    zigzag = work.predict(ring(4, 8, 8)).terms.ring_steps_s
    groups = [((rank,), (1,), (8,)) for rank in range(4)]
    contiguous = work.predict(plan(*groups, layout="contiguous", model=model))
    # The last of four groups sees 3.5 of 4 blocks, zigzag half of each: 2.
    assert contiguous.terms.ring_steps_s == pytest.approx(zigzag * 3.5 / 2, rel=1e-5)
    busy = np.array(contiguous.busy_s) - contiguous.terms.non_attention_s
    assert busy / busy[0] == pytest.approx([1, 3, 5, 7])


@pytest.mark.parametrize("layout", ["zigzag", "contiguous"])
def test_causal_work_is_what_the_chunks_see(layout):
    """Half of L_p x L_s for every pair of zigzag groups; contiguous groups all of what lies before them."""
    seq_len = 256
    schedule = plan(((0,), (3,), (8,)), ((1,), (1,), (8,)), ((2,), (4,), (8,)), layout=layout)
    lengths = schedule.group_tokens(seq_len)
    held = [{x for start, stop in chunks for x in range(start, stop)} for chunks in schedule.chunks(seq_len)]
    for p, queries in enumerate(held):
        for s, keys in enumerate(held):
            pairs = sum(k <= q for q in queries for k in keys)
            share = 0.5 if layout == "zigzag" or p == s else float(s < p)
            assert pairs == pytest.approx(share * lengths[p] * lengths[s], abs=max(lengths))


def test_a_zero_collective_takes_the_slowest_link_of_a_ring_by_hand():
    # Four ranks on two nodes of two: a ring of 4 ranks sends 3/4 of the tensor through every link; the two ranks of a
    # node have a port each, 1 GB/s, or share a NIC of 0.5 GB/s.
    assert RingCollective.over(cluster(2, 2, inside=10, between=1))(1e9) == pytest.approx(0.75 * 0.5)
    assert RingCollective.over(cluster(2, 2, inside=10, between=1, nics=0.5))(1e9) == pytest.approx(0.75 / 0.5)
    assert RingCollective.over(cluster(4, inside=10))(1e9) == pytest.approx(0.75 / 10)
    assert RingCollective.over(cluster(1))(1e9) == 0
    assert RingCollective.over(cluster(2, 2, latency=10))(0) == 0
    # One hop inside each node and one between each pair of neighbours.
    assert RingCollective.over(cluster(2, 2, latency=10)).latency_s == pytest.approx(40e-6)


def test_unequal_partitions_of_zero_3_take_as_many_times_as_long_as_is_measured(monkeypatch):
    """Unequal weights alone; gathers and reductions have a constant each."""
    slow = cluster(1, 1, between=0.001)
    traffic = MODEL.layer_parameters * 2 * 0.5 / 0.001e9

    def block_s(weights):
        return cost(slow, zero_stage=3, zero_weights=weights).predict(ring(2, 8, 4)).block_s

    assert block_s((3.0, 1.0)) == block_s((1.0, 1.0)) == pytest.approx(3 * traffic)  # two gathers, one reduction
    monkeypatch.setattr(calibrated, "UNEVEN_GATHER_SLOWDOWN", 1.5)
    monkeypatch.setattr(calibrated, "UNEVEN_REDUCE_SLOWDOWN", 2.0)
    assert block_s((1.0, 1.0)) == pytest.approx(3 * traffic)
    assert block_s((3.0, 1.0)) == pytest.approx((2 * 1.5 + 2.0) * traffic)


def test_zero_traffic_hides_beside_the_block_as_far_as_it_fits():
    slow = cluster(1, 1, between=0.001)
    stage_1 = cost(slow, zero_stage=1).predict(ring(2, 8, 4))
    stage_3 = cost(slow, zero_stage=3).predict(ring(2, 8, 4))
    traffic = MODEL.layer_parameters * 2 * 0.5 / 0.001e9  # 2 bytes, half of it from the other rank, 1 MB/s
    assert stage_3.block_s == pytest.approx(3 * traffic)
    assert stage_3.bottleneck.cause == "ZeRO traffic"
    # An all-reduce of gradients, twice over the link, and a gather of parameters; stage 2 reduces every micro-batch.
    once = 2 * MODEL.num_parameters * 0.5 / 0.001e9
    assert stage_1.parts_s["zero_s"] == pytest.approx(3 * once)
    stage_2 = cost(slow, zero_stage=2, micro_batches=4).predict(ring(2, 8, 4))
    assert stage_2.parts_s["zero_s"] == pytest.approx((2 * 4 + 1) * once) and stage_2.block_s == stage_1.block_s
    fast = cluster(1, 1, between=1e6)
    assert cost(fast, zero_stage=3).predict(ring(2, 8, 4)).block_s == pytest.approx(
        cost(fast, zero_stage=0).predict(ring(2, 8, 4)).block_s
    )


# --- memory -----------------------------------------------------------------------------------------


def moments(model, cluster, schedule, **work):
    bound = cost(cluster, model, **work)
    return bound.memory_phases(*bound.arrays(schedule))


@pytest.mark.parametrize(("stage", "per_parameter"), [(0, 2 + 2 + 12), (1, 2 + 2 + 6), (2, 2 + 1 + 6), (3, 1 + 1 + 6)])
def test_each_zero_stage_partitions_its_model_states(stage, per_parameter):
    found = _states(cluster(1, 1), zero_stage=stage)
    assert found.tolist() == [pytest.approx(MODEL.num_parameters * per_parameter)] * 2


def test_model_states_follow_weights_and_replicas():
    count, two = MODEL.num_parameters, cluster(1, 1)
    weighted = _states(two, zero_stage=1, zero_weights=(3.0, 1.0))
    assert weighted.tolist() == [pytest.approx(count * (4 + 9)), pytest.approx(count * (4 + 3))]
    replicas = _states(two, zero_stage=3, data_parallel=4)
    assert replicas.tolist() == [pytest.approx(count * 2)] * 2


def _states(two, **work):
    """Weights, gradients and optimizer state of two ranks that train micro-batches, where gradients add up."""
    begun = moments(MODEL, two, ring(2, 8, 4), micro_batches=2, **work)["forward"]
    return begun.weights + begun.gradients + begun.optimizer_state


def test_activations_count_once_per_layer():
    one = cluster(1)
    kept = moments(MODEL, one, ulysses(1, 8, 4))
    # Per token and layer: two norms, each 512 in fp32 and two times in 2 bytes; 4 x 2048, 2 bytes each; q, output, k
    # and v (8 + 8 + 4 + 4) x 64, 2 bytes each, and 8 log-sum-exps in fp32.
    layer = 4096 * (2 * 8 * 512 + 2 * 4 * 2048 + 2 * 24 * 64 + 4 * 8)
    assert kept["loss"].activations.item() == 4 * layer
    assert (
        kept["mlp"].layer.item() == 2 * 4096 * (2 * 2048 + 512) + 2 * 512 * 2048
    )  # gradients of the widest part, and a matrix
    thrifty = moments(MODEL, one, ulysses(1, 8, 4), activation_checkpointing=True)
    assert thrifty["loss"].activations.item() == 4 * 2 * 4096 * 512
    assert thrifty["mlp"].layer.item() == layer + kept["mlp"].layer.item()
    assert kept["attention"].ring_buffers.item() == 0


def test_kept_attention_takes_the_memory_of_its_results_and_saves_its_time():
    """One all-to-all group of two: q, k, v, the output before and after the exchange, and log-sum-exps."""
    two, equal = cluster(1, 1, latency=20.0), ulysses(2, 8, 4)
    again, kept = (
        moments(MODEL, two, equal, activation_checkpointing=True, keep_attention=each) for each in (False, True)
    )
    rows, tokens = 4096 * 4, 2048  # half the heads of all tokens, half the tokens
    of_layer = 2 * 64 * (rows + 2 * rows // 2 + rows + tokens * 8) + 4 * rows
    assert (kept["loss"].activations - again["loss"].activations).tolist() == [4 * of_layer] * 2
    assert (again["mlp"].layer - kept["mlp"].layer).tolist() == [of_layer] * 2  # the layer's are there already
    without = moments(MODEL, two, equal, activation_checkpointing=False, keep_attention=True)
    assert without["loss"].activations.tolist() == moments(MODEL, two, equal)["loss"].activations.tolist()

    def terms(**work):
        return cost(two, zero_stage=1, **work).predict(equal).terms

    whole, again, kept = terms(), terms(activation_checkpointing=True), terms(**_KEPT)
    assert kept.non_attention_s == pytest.approx(again.non_attention_s)
    assert kept.all_to_all_s == pytest.approx(whole.all_to_all_s)
    assert kept.ring_steps_s == pytest.approx(whole.ring_steps_s)
    assert min(again.all_to_all_s / whole.all_to_all_s, again.ring_steps_s / whole.ring_steps_s) > 1.2


def test_gradients_of_a_ring_in_bf16_have_half_the_bytes_in_the_cost_of_a_layer():
    """Compute is free here: the backward of a ring of two is the transfer of KV that was kept, and of gradients."""
    two, schedule = cluster(1, 1, d0=1e6, d1=1e6, memory=1e6), ring(2, 8, 4)
    exact, rounded = (cost(two, ring_gradients=each) for each in ("fp32", "bf16"))
    ring_of = [model._block.rings(model._block.assigned(*_arrays(model, schedule)))[1] for model in (exact, rounded)]
    assert (ring_of[0].gradient_s == 2 * ring_of[1].gradient_s).all() and (ring_of[0].gradient_s > 0).all()
    assert (ring_of[0].kv_s == ring_of[1].kv_s).all()
    # dK and dV of 2,048 tokens, 4 heads of 64 elements, over a link of 1 GB/s.
    saved_s = 2048 * 2 * 4 * 64 * 2 / 1e9
    assert exact.predict(schedule).block_s - rounded.predict(schedule).block_s == pytest.approx(saved_s, rel=0.01)


def _arrays(model, schedule):
    grouping, tokens_D, heads_D = model.arrays(schedule)
    return grouping, tokens_D[None], heads_D[None]


_KEPT = {"activation_checkpointing": True, "keep_attention": True}


def test_kept_attention_of_a_ring_is_output_log_sum_exp_and_the_last_visitor():
    """A zigzag ring of two, tokens 3:1. The first sees all keys of its visitor, the second half of its visitor's."""
    uneven, two = plan(((0,), (3,), (8,)), ((1,), (1,), (8,))), cluster(1, 1)
    again, kept = (
        moments(MODEL, two, uneven, activation_checkpointing=True, keep_attention=each)["loss"].activations
        for each in (False, True)
    )
    output = [tokens * 8 * (2 * 64 + 4) for tokens in (3072, 1024)]
    visitor = [2 * 2 * 64 * 4 * keys for keys in (1024, 3072 // 2)]
    assert (kept - again).tolist() == [4 * (own + other) for own, other in zip(output, visitor, strict=True)]


def test_kept_attention_of_offloaded_checkpoints_is_in_the_hosts_memory():
    two, equal = cluster(1, 1), ulysses(2, 8, 4)
    work = {"activation_checkpointing": True, "offload_activations": True}
    again, kept = (cost(two, **work, keep_attention=each) for each in (False, True))
    on_device = [moments(MODEL, two, equal, **work, keep_attention=each)["mlp"].total for each in (False, True)]
    assert on_device[0].tolist() == on_device[1].tolist()
    on_host = [host_bytes_of_nodes(two, MODEL, each.workload, np.array([2048.0, 2048.0])) for each in (again, kept)]
    of_layer = 2048 * (2 * 64 * (3 * 8 + 4 * 4) + 4 * 8)
    assert (on_host[1] - on_host[0]).tolist() == [4 * of_layer] * 2


def test_logits_take_the_memory_of_a_tile_or_of_all_tokens():
    one = cluster(1)
    final_norm = 4096 * 512 * (4 + 2 + 2)  # fp32, normalized, output
    tiled, whole = (
        moments(MODEL, one, ulysses(1, 8, 4), tiled_logits=each)["loss"].logits.item() for each in (True, False)
    )
    assert tiled == 1024 * 1000 * (2 + 2 + 4) + final_norm + 4096 * 512 * 2  # logits, gradient, fp32; tiles' gradients
    assert whole == 4096 * 1000 * (2 + 2) + 1024 * 1000 * 4 + final_norm  # a chunk in fp32


def test_tiles_have_the_size_that_is_asked_for_and_ranks_have_as_many():
    """3,072 and 1,024 tokens of two sequences: 2 tiles of 1,536 on the first rank, of 512 on the second."""
    uneven, two = plan(((0,), (3,), (8,)), ((1,), (1,), (8,))), cluster(1, 1)
    work = {"micro_batch": 2, "tile_tokens": 1536, "tiled_mlp": True, "activation_checkpointing": True}
    tiled = moments(MODEL, two, uneven, **work)
    assert tiled["loss"].logits.tolist() == [
        2 * at_once * 1000 * 4 + 1024 * 1000 * 4 + 2 * tokens * 512 * 10
        for at_once, tokens in ((1536, 3072), (512, 1024))
    ]
    larger = moments(MODEL, two, uneven, **{**work, "tile_tokens": 3072})
    of_token = 2 * 2 * 3 * MODEL.mlp_size  # bytes of a token: inner activations and their gradients
    more = [2 * tokens * of_token for tokens in (1536, 512)]
    assert (larger["mlp"].layer - tiled["mlp"].layer).tolist() == more
    whole = moments(MODEL, two, uneven, **{**work, "tiled_logits": False})
    assert whole["loss"].logits.max() == 2 * 3072 * 1000 * 4 + 1024 * 1000 * 4 + 2 * 3072 * 512 * 8


def test_ring_buffers_hold_the_longest_visitor():
    found = moments(MODEL, cluster(1, 1), plan(((0,), (3,), (8,)), ((1,), (1,), (8,))))["attention"].ring_buffers
    # Two visiting KV blocks in bf16 and two dK/dV in fp32, 3072 tokens x 4 KV heads x 64; own partial results in fp32.
    visitors = 3072 * 4 * 64 * 2 * (2 * 2 + 2 * 4)
    assert found.tolist() == [visitors + 3072 * 8 * 64 * 4, visitors + 1024 * 8 * 64 * 4]


def test_what_does_not_fit_says_where_and_by_how_much():
    found = cost(cluster(1, 1), seq_len=1 << 20, micro_batch=2).predict(plan(((0,), (3,), (8,)), ((1,), (1,), (8,))))
    assert not found.feasible
    need = found.memory_bytes[0] / 2**30
    # Of 8 GiB an eighth is the reserve of a card that is described by three numbers.
    assert found.reason.startswith(f"rank 0 (d0 on n0) needs {need:.1f} GiB of 7.0: {need - 7:.1f} GiB too much")
    assert "activations" in found.reason and "1 more rank does not fit" in found.reason


# --- what must hold always --------------------------------------------------------------------------


@st.composite
def cases(draw):
    seed = draw(st.integers(0, 10_000))
    rng = random.Random(seed)
    sizes = [rng.randint(1, 3) for _ in range(rng.randint(1, 3))]
    speeds = {f"d{i}": rng.choice([0.5, 1, 3]) for i in range(len(sizes))}
    ports = {"nics": rng.choice([None, 0.5]), "total": rng.choice([None, 5])}
    total = sum(sizes)
    ranks = list(range(total))
    rng.shuffle(ranks)
    groups, heads_left = [], MODEL.num_heads
    while ranks:
        size = rng.randint(1, len(ranks))
        members, ranks = tuple(ranks[:size]), ranks[size:]
        marks = sorted(rng.randint(0, heads_left) for _ in members[1:])
        heads = tuple(b - a for a, b in zip([0, *marks], [*marks, heads_left], strict=True))
        groups.append((members, tuple(rng.randint(1, 4) for _ in members), heads))
    work = {"zero_stage": rng.choice([0, 1, 2, 3]), "activation_checkpointing": rng.random() < 0.5}
    return sizes, speeds, ports, plan(*groups, layout=rng.choice(["zigzag", "contiguous"])), work


@settings(max_examples=60, deadline=None)
@given(cases())
def test_block_time_is_consistent(case):
    sizes, speeds, ports, schedule, work = case
    bound = cost(cluster(*sizes, **speeds, **ports, latency=10), **work)
    found = bound.predict(schedule)
    grouping, tokens, heads = bound.arrays(schedule)
    assert found.terms.block_s == found.block_s
    assert min(found.terms.non_attention_s, found.terms.all_to_all_s) >= 0 and found.terms.ring_steps_s > 0
    assert bound.block_s(grouping, tokens, heads) == pytest.approx(found.block_s, rel=1e-12)
    other = tokens[::-1].copy()
    many = bound.block_s_many(grouping, np.stack([tokens, other]), np.stack([heads, heads]))
    assert many.tolist() == pytest.approx([found.block_s, bound.block_s(grouping, other, heads)], rel=1e-12)
    for limit_B in (many * 1.001, many * 0.999, np.full(2, many.mean())):
        below = bound.block_s_below(grouping, np.stack([tokens, other]), np.stack([heads, heads]), limit_B)
        exact = below == many
        assert (exact | (below >= limit_B)).all() and exact[many < limit_B].all()
    assert found.bound_s <= found.block_s * (1 + 1e-9)
    if schedule.layout == "zigzag":
        length_D = grouping.by_group(np.add, tokens)[grouping.group_of]
        least_D = bound.least_non_attention_s_per_token_D * tokens + bound.least_attention_s_D * heads * length_D * 4096
        assert least_D.max() <= found.block_s * (1 + 1e-9)
    assert max(found.busy_s) <= found.block_s * (1 + 1e-9)
    assert 0 <= found.bottleneck.rank < sum(sizes) and found.bottleneck.text


@settings(max_examples=60, deadline=None)
@given(cases(), st.sampled_from(["inside", "between", "latency", "nics", "total", "d0"]))
def test_nothing_gets_slower_on_better_hardware(case, what):
    sizes, speeds, ports, schedule, work = case
    better = {"inside": 20.0, "between": 2.0, "latency": 1.0, "nics": 4.0, "total": 50.0, "d0": 10.0}[what]
    plain = cost(cluster(*sizes, **(speeds | ports | {"latency": 10.0})), **work).predict(schedule)
    changed = speeds | ports | {"latency": 10.0}
    if changed.get(what, 0.0) is None:
        return
    improved = cost(cluster(*sizes, **(changed | {what: better})), **work).predict(schedule)
    assert improved.block_s <= plain.block_s * (1 + 1e-9)


@settings(max_examples=40, deadline=None)
@given(cases())
def test_timeline_shows_the_predicted_block(case):
    sizes, speeds, ports, schedule, work = case
    bound = cost(cluster(*sizes, **speeds, **ports), **(work | {"zero_stage": 0}))
    spans, found = bound.timeline(schedule), bound.predict(schedule)
    assert all(0 <= span.start_s <= span.stop_s for span in spans)
    assert max(span.stop_s for span in spans) <= found.block_s * (1 + 1e-9)
    for rank, busy_s in enumerate(found.busy_s):
        shown = sum(span.stop_s - span.start_s for span in spans if span.rank == rank and span.stream == "compute")
        assert shown == pytest.approx(busy_s)
        bars = sorted((s.start_s, s.stop_s) for s in spans if s.rank == rank and s.stream == "compute")
        assert all(stop <= start + 1e-12 for (_, stop), (start, _) in pairwise(bars))


def test_evaluation_is_fast_enough_for_a_search():
    big, model = load_cluster("hexiseq-simulation-3"), load_model("gpt-13b")
    bound = make_cost_model("calibrated", big, model, Workload(seq_len=131072))
    grouping, tokens, heads = bound.arrays(usp(128, 40, 40, 8))
    bound.block_s(grouping, tokens, heads)
    assert lines_run(lambda: bound.block_s(grouping, tokens, heads)) < 1_000  # 0.4 ms on an idle machine


def test_a_tiled_mlp_is_computed_again_once_and_takes_the_memory_of_a_tile():
    """Of a checkpointed layer that is what the layer computes again anyway; but weight gradients add up by tiles."""
    one, length, schedule = cluster(1, memory=1e6), 65536, ulysses(1, MODEL.num_heads, MODEL.num_kv_heads)

    def costs(**work):
        whole, tiled = (cost(one, seq_len=length, tiled_mlp=each, **work) for each in (False, True))
        return whole, tiled, tiled.predict(schedule).block_s - whole.predict(schedule).block_s

    sums_s = 2 * 3 * MODEL.mlp_parameters * (length / 4096) / 1e15
    whole, tiled, more_s = costs(activation_checkpointing=True)
    assert more_s == pytest.approx(sums_s, rel=1e-3)
    forward_s = 2 * MODEL.mlp_parameters * length / 1e12
    assert costs(zero_stage=3)[-1] == pytest.approx(sums_s + forward_s, rel=1e-3)
    assert costs()[-1] == pytest.approx(sums_s + forward_s * 2 / 3, rel=1e-3)  # but for its last product
    layers = [each.memory_phases(*each.arrays(schedule))["mlp"].layer for each in (whole, tiled)]
    # What the MLP keeps, its gradients and one of a matrix go; its norm makes its backward's: five fp32 copies,
    # input and gradient, less what the norm had made for the MLP.
    width, norm = 2 * (6 * MODEL.mlp_size + 512), 512 * (5 * 4 + 4 + 2 - 8)
    saved = (width - norm) * length + 2 * 512 * MODEL.mlp_size
    assert float((layers[0] - layers[1])[0]) == pytest.approx(saved)
