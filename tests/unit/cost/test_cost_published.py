"""`published` against HexiSeq's Eqs. 2-12: worked out by hand, case by case, and written as plain loops."""

from __future__ import annotations

import itertools
import random

import pytest

from ds_hetero.cluster import cluster_from_dict, load_cluster
from ds_hetero.cost import Grouping, Workload, make_cost_model
from ds_hetero.errors import PlanError
from ds_hetero.models import load_model
from ds_hetero.values.baselines import ring, ulysses, usp_meshes
from ds_hetero.values.schedule import Group, Schedule

C_H100, C_A100 = 989.5e12, 312e12


def exact(value):
    return pytest.approx(value, rel=1e-9, abs=0)


def two_nodes(h100: int, a100: int):
    """H100 with 450 GB/s and A100 with 300 GB/s inside, 5 us; 25 GB/s and 10 us between."""
    return cluster_from_dict(
        {
            "nodes": [
                {
                    "name": "h",
                    "device": "H100-SXM-80GB",
                    "count": h100,
                    "link": {"bandwidth_gb_per_s": 450, "latency_us": 5},
                },
                {
                    "name": "a",
                    "device": "A100-SXM-80GB",
                    "count": a100,
                    "link": {"bandwidth_gb_per_s": 300, "latency_us": 5},
                },
            ],
            "network": {"bandwidth_gb_per_s": 25, "latency_us": 10},
        }
    )


def schedule(groups, heads, layout="zigzag", order=()):
    return Schedule(
        num_heads=heads,
        num_kv_heads=heads,
        layout=layout,
        ring=order,
        groups=tuple(Group(ranks=r, tokens=t, heads=h) for r, t, h in groups),
    )


def predict(cluster, model, plan, seq_len, **work):
    return make_cost_model("published", cluster, load_model(model), Workload(seq_len=seq_len, **work)).predict(plan)


def test_one_device_computes_everything():
    cluster = cluster_from_dict({"nodes": [{"name": "h", "device": "H100-SXM-80GB"}]})
    found = predict(cluster, "gpt-7b", ulysses(1, 32, 32), 8192, micro_batch=2, micro_batches=4)
    # Eq. 5: 72 x B 2 x s 8192 x H^2 4096^2 = 1.97912e13 operations over 989.5e12 = 20.0 ms, far above Eq. 4's
    # 40 x 2 x 8192 x 4096 x 2 bytes over 3.35e12 = 1.6 ms.
    non_attention = 72 * 2 * 8192 * 4096**2 / C_H100
    # Eq. 11, t = 0: 16 x B 2 x 8192 x 8192 x (32 heads x 128).
    attention = 16 * 2 * 8192 * 8192 * 32 * 128 / C_H100
    assert found.terms.non_attention_s == exact(non_attention)
    assert found.terms.all_to_all_s == 0
    assert found.terms.ring_steps_s == exact(attention)
    assert found.block_s == exact(non_attention + attention)
    # 32 layers, 4 micro-batches; 2 sequences of 8192 tokens each.
    assert found.iteration_s == exact(32 * 4 * (non_attention + attention))
    assert found.tokens_per_s == exact(4 * 2 * 8192 / (128 * (non_attention + attention)))
    assert found.bound_s == exact(non_attention + attention)


def test_uneven_all_to_all_takes_the_slowest_pair():
    # Rank 0 (H100): 6144 tokens, 24 heads; rank 1 (H100): 1024, 6; rank 2 (A100): 1024, 2. L = 8192, d_h = 128.
    plan = schedule([((0, 1, 2), (6, 1, 1), (24, 6, 2))], 32)
    found = predict(two_nodes(2, 1), "gpt-7b", plan, 8192)
    # Eq. 6: the H100 has 6144 tokens, 7.5 ms; the A100 1024 tokens at 312 TFLOPS, 4.0 ms.
    assert found.terms.non_attention_s == exact(72 * 6144 * 4096**2 / C_H100)
    # Eq. 8: V(0 -> 1) = 3 x 6144 x 6 x 128 x 2 B at 450 GB/s:  5 us +  62.9 us
    #        V(0 -> 2) = 3 x 6144 x 2 x 128 x 2 B at  25 GB/s: 10 us + 377.5 us
    #        V(2 -> 0) = 3 x 1024 x 24 x 128 x 2 B at 25 GB/s: 10 us + 755.0 us, the slowest
    assert found.terms.all_to_all_s == exact(4 * (10e-6 + 3 * 1024 * 24 * 128 * 2 / 25e9))
    # One group: Eq. 11 with L_G = L, slowest of 24 heads on an H100 and 2 on an A100.
    assert found.terms.ring_steps_s == exact(16 * 8192 * 8192 * 24 * 128 / C_H100)


def test_ring_of_two_waits_for_the_longer_of_compute_and_transfer():
    # One H100 with 3072 tokens, one A100 with 1024, 40 heads of 128, no all-to-all; K = 2.
    plan = schedule([((0,), (3,), (40,)), ((1,), (1,), (40,))], 40)
    found = predict(two_nodes(1, 1), "gpt-13b", plan, 4096)
    unit = 16 * 40 * 128
    # t = 0: local blocks, 3072^2 on the H100 (0.781 ms) against 1024^2 on the A100 (0.275 ms).
    step_0 = max(unit * 3072 * 3072 / C_H100, unit * 1024 * 1024 / C_A100)
    assert step_0 == unit * 3072 * 3072 / C_H100
    # t = 1: both compute 3072 x 1024 (0.260 and 0.826 ms) and receive 4 x L_src x 40 x 128 x 2 B over 25 GB/s:
    # the H100 the A100's 1024 tokens (1.69 ms), the A100 the H100's 3072 (5.04 ms), the longest.
    step_1 = 10e-6 + 4 * 3072 * 40 * 128 * 2 / 25e9
    assert found.terms.all_to_all_s == 0
    assert found.terms.ring_steps_s == exact(step_0 + step_1)
    assert found.terms.non_attention_s == exact(max(72 * 3072 * 5120**2 / C_H100, 72 * 1024 * 5120**2 / C_A100))


def test_sub_rings_from_different_sources_run_side_by_side():
    # Group 0 on H100s cuts 32 heads as 20 + 12, group 1 on A100s as 16 + 16; 4096 tokens each, K = 2.
    plan = schedule([((0, 1), (1, 1), (20, 12)), ((2, 3), (1, 1), (16, 16))], 32)
    found = predict(two_nodes(2, 2), "gpt-7b", plan, 8192)
    # Heads 0-16 belong to (0, 2), 16-20 to (0, 3), 20-32 to (1, 3): rank 3 receives 4 heads from rank 0 and, beside
    # them, 12 from rank 1; the longest message carries 16 heads: 4 x 4096 x 16 x 128 x 2 B at 25 GB/s = 2.69 ms.
    message = 10e-6 + 4 * 4096 * 16 * 128 * 2 / 25e9
    compute = 16 * 4096 * 4096 * 16 * 128 / C_A100  # 1.76 ms, more than 20 heads on an H100
    assert compute > 16 * 4096 * 4096 * 20 * 128 / C_H100
    assert found.terms.ring_steps_s == exact(compute + max(compute, message))
    # Eq. 9 inside the groups: H100s send 3 x 2048 x 20 x 128 x 2 B at 450 GB/s (70 us), A100s 3 x 2048 x 16 x ... at
    # 300 GB/s (84 us, plus 5 us).
    assert found.terms.all_to_all_s == exact(4 * (5e-6 + 3 * 2048 * 16 * 128 * 2 / 300e9))


def test_tasks_from_one_source_add_up():
    # As above with a third group that cuts at 8: tasks 0-8, 8-16, 16-20, 20-32. Between groups 0 and 1 heads 0-8 and
    # 8-16 go from rank 0 to rank 2 in two tasks, one message of 16 heads for the model.
    cluster = cluster_from_dict(
        {
            "nodes": [{"name": "a", "device": "A100-SXM-80GB", "count": 6, "link": {"bandwidth_gb_per_s": 2}}],
        }
    )
    plan = schedule([((0, 1), (1, 1), (20, 12)), ((2, 3), (1, 1), (16, 16)), ((4, 5), (1, 1), (8, 24))], 32)
    found = predict(cluster, "gpt-7b", plan, 6144)
    # Group 2 receives from group 1: heads 0-8 from 2 to 4, 8-16 from 2 to 5, 16-32 from 3 to 5 (16).
    # Group 0 receives from group 2: 0-8 from 4 to 0, 8-20 from 5 to 0 (12), 20-32 from 5 to 1 (12).
    # Group 1 receives from group 0: 0-16 from 0 to 2 (16), 16-20 from 0 to 3, 20-32 from 1 to 3 (12).
    # The longest message carries 16 heads x 2048 tokens: 4 x 2048 x 16 x 128 x 2 B at 2 GB/s = 16.8 ms.
    message = 5e-6 + 4 * 2048 * 16 * 128 * 2 / 2e9
    local = 16 * 2048 * 2048 * 24 * 128 / C_A100
    assert message > local
    assert found.terms.ring_steps_s == exact(local + 2 * message)


def test_ring_order_decides_whose_block_arrives_when():
    # Groups of 1024, 2048 and 5120 tokens on an H100 and two A100s, ring order 0, 2, 1.
    cluster = two_nodes(1, 2)
    groups = [((0,), (1,), (32,)), ((1,), (2,), (32,)), ((2,), (5,), (32,))]
    found = predict(cluster, "gpt-7b", schedule(groups, 32, order=(0, 2, 1)), 8192)
    unit, size = 16 * 32 * 128, 4 * 32 * 128 * 2
    slow, fast, between, inside = 1 / C_A100, 1 / C_H100, 1 / 25e9, 1 / 300e9
    # Positions 0: 1024 (H100), 1: 5120 (rank 2), 2: 2048 (rank 1).
    # Rank 2 receives from rank 0, rank 1 from rank 2, rank 0 from rank 1.
    step_0 = max(unit * 1024**2 * fast, unit * 5120**2 * slow, unit * 2048**2 * slow)
    # t = 1: rank 0 has the block of rank 1 (2048), rank 2 that of rank 0 (1024), rank 1 that of rank 2 (5120).
    step_1 = max(
        unit * 1024 * 2048 * fast,
        10e-6 + size * 2048 * between,
        unit * 5120 * 1024 * slow,
        10e-6 + size * 1024 * between,
        unit * 2048 * 5120 * slow,
        5e-6 + size * 5120 * inside,
    )
    # t = 2: rank 0 has that of rank 2 (5120), rank 2 that of rank 1 (2048), rank 1 that of rank 0 (1024).
    step_2 = max(
        unit * 1024 * 5120 * fast,
        10e-6 + size * 5120 * between,
        unit * 5120 * 2048 * slow,
        10e-6 + size * 2048 * between,
        unit * 2048 * 1024 * slow,
        5e-6 + size * 1024 * inside,
    )
    assert found.terms.ring_steps_s == exact(step_0 + step_1 + step_2)
    # H100 first, then the A100s as listed: the 5120 tokens then leave over the network only once.
    listed = predict(cluster, "gpt-7b", schedule(groups, 32), 8192)
    assert listed.terms.ring_steps_s != found.terms.ring_steps_s


def test_roofline_is_bound_by_memory_where_peaks_are_high():
    cluster = cluster_from_dict(
        {
            "nodes": [{"name": "x", "device": "x", "link": {"bandwidth_gb_per_s": 1}}],
            "devices": {"x": {"peak_tflops": 1000, "memory_gib": 24, "memory_bandwidth_gb_per_s": 10}},
        }
    )
    found = predict(cluster, "gpt-3b", ulysses(1, 32, 32), 1000)
    # Eq. 4: 40 x 1000 x 2560 x 2 bytes at 10 GB/s = 20.48 ms; Eq. 5: 72 x 1000 x 2560^2 at 1e15 = 0.47 ms.
    assert found.terms.non_attention_s == exact(0.02048)
    assert found.bottleneck.cause == "memory bandwidth"


def test_memory_is_eq_3_and_static_states():
    # gpt-13b, 12.84e9 parameters; ZeRO-3 over 2 ranks: (2 + 2 + 12) bytes each, halved.
    model = load_model("gpt-13b")
    plan = schedule([((0,), (3,), (40,)), ((1,), (1,), (40,))], 40)
    found = predict(two_nodes(1, 1), "gpt-13b", plan, 4096, micro_batch=2, zero_stage=3)
    static = 16 * model.num_parameters / 2
    # Eq. 3: B 2 x P 2 x (gamma 2 x s x 5120 + 2 x L_G x 40 x 128), s = L_G = 3072 and 1024.
    assert found.memory_bytes[0] == pytest.approx(static + 4 * (2 * 3072 * 5120 + 2 * 3072 * 5120), abs=1)
    assert found.memory_bytes[1] == pytest.approx(static + 4 * (2 * 1024 * 5120 + 2 * 1024 * 5120), abs=1)
    assert not found.feasible and "rank 0 (H100-SXM-80GB on h)" in found.reason  # 95.7 GiB of states alone
    stage_0 = predict(two_nodes(1, 1), "gpt-13b", plan, 4096, micro_batch=2, zero_stage=0)
    assert stage_0.memory_bytes[0] - found.memory_bytes[0] == pytest.approx(static, abs=1)


@pytest.mark.parametrize("seed", range(40))
def test_equals_the_equations_written_as_loops(seed):
    rng = random.Random(seed)
    cluster = load_cluster(rng.choice(["hexiseq-setting-2", "hexiseq-setting-3", "hexiscale-case-study", "lab"]))
    model, seq_len = load_model("gpt-3b"), 4096 * rng.randint(1, 8)
    plan = _random_schedule(rng, cluster.num_ranks, model.num_heads)
    cost = make_cost_model("published", cluster, model, Workload(seq_len=seq_len, micro_batch=2))
    expected = _loops(cluster, model, plan, seq_len, 2)
    found = cost.predict(plan)
    parts = (found.terms.non_attention_s, found.terms.all_to_all_s, found.terms.ring_steps_s)
    assert parts == exact(expected)
    grouping, tokens, heads = cost.arrays(plan)
    assert cost.block_s(grouping, tokens, heads) == found.block_s
    both = cost.block_s_many(grouping, tokens[None].repeat(2, axis=0), heads[None].repeat(2, axis=0))
    assert both.tolist() == [found.block_s, found.block_s]


def test_baselines_of_the_published_cluster_are_bound_by_the_slowest_device():
    cluster, model = load_cluster("hexiseq-simulation-1"), load_model("gpt-70b")
    cost = make_cost_model("published", cluster, model, Workload(seq_len=1 << 20))
    for mesh in usp_meshes(32, 64, 64):
        found = cost.predict(mesh)
        # 1M tokens over 32 equal shares: an A100 computes 1/32 of everything at 312 TFLOPS.
        least = (72 * 2**20 * 8192**2 + 16 * 2**40 * 8192) / 32 / C_A100
        assert least <= found.block_s <= 1.01 * least
        assert found.bottleneck.rank >= 8 and found.bottleneck.cause == "compute"


def test_schedules_of_other_clusters_and_models_are_refused():
    cluster, model = two_nodes(2, 2), load_model("gpt-7b")
    cost = make_cost_model("published", cluster, model, Workload(seq_len=4096))
    with pytest.raises(PlanError, match="ranks 0 to 2, the cluster has ranks 0 to 3"):
        cost.predict(ring(3, 32, 32))
    with pytest.raises(PlanError, match=r"\(num_heads, num_kv_heads\) = \(40, 40\)"):
        cost.predict(ring(4, 40, 40))
    with pytest.raises(PlanError, match="it is one of calibrated, published"):
        make_cost_model("exact", cluster, model, Workload(seq_len=4096))


def _random_schedule(rng, num_ranks, num_heads):
    ranks = list(range(num_ranks))
    rng.shuffle(ranks)
    cuts = sorted(rng.sample(range(1, num_ranks), rng.randint(0, min(5, num_ranks - 1))))
    groups = []
    for start, stop in itertools.pairwise([0, *cuts, num_ranks]):
        members = tuple(ranks[start:stop])
        marks = sorted(rng.randint(0, num_heads) for _ in members[1:])
        heads = tuple(b - a for a, b in itertools.pairwise([0, *marks, num_heads]))
        groups.append((members, tuple(rng.randint(0, 5) for _ in members[1:]) + (rng.randint(1, 5),), heads))
    order = list(range(len(groups)))
    rng.shuffle(order)
    return schedule(groups, num_heads, order=tuple(order))


def _loops(cluster, model, plan, seq_len, batch):
    """Eqs. 2-12 with one loop per max and per sum."""
    hidden, head_dim, size = model.hidden_size, model.head_dim, 2
    tokens, groups, lengths = plan.tokens(seq_len), plan.ring_groups, plan.group_tokens(seq_len)
    c = [device.peak_flops_per_s for device in cluster.devices]
    b = [device.memory_bytes_per_s for device in cluster.devices]
    heads = {r: set(range(*g.head_range(r))) for g in groups for r in g.ranks}
    non_attention = max(
        max(72 * batch * tokens[d] * hidden**2 / c[d], 40 * batch * tokens[d] * hidden * size / b[d]) for d in tokens
    )
    exchange = 0.0
    for group in groups:
        for d, j in itertools.permutations(group.ranks, 2):
            link = cluster.link(d, j)
            volume = 3 * batch * tokens[d] * len(heads[j]) * head_dim * size
            exchange = max(exchange, 4 * (link.latency_s + volume / link.bytes_per_s))
    steps = 0.0
    for t in range(len(groups)):
        slowest = 0.0
        for p, group in enumerate(groups):
            source = lengths[p - t]
            for d in group.ranks:
                work = 16 * batch * lengths[p] * source * len(heads[d]) * head_dim
                slowest = max(slowest, work / c[d])
                for u in groups[p - 1].ranks if t else ():
                    if common := heads[u] & heads[d]:
                        message = 4 * batch * source * len(common) * head_dim * size
                        slowest = max(slowest, cluster.link(u, d).latency_s + message / cluster.link(u, d).bytes_per_s)
        steps += slowest
    return non_attention, exchange, steps


def test_grouping_is_made_once_and_used_for_many():
    cluster, model = two_nodes(2, 2), load_model("gpt-7b")
    cost = make_cost_model("published", cluster, model, Workload(seq_len=4096))
    plan = schedule([((1, 0), (1, 3), (8, 24)), ((3, 2), (2, 2), (16, 16))], 32)
    grouping, tokens, heads = cost.arrays(plan)
    assert tokens.tolist() == [1536, 512, 1024, 1024] and heads.tolist() == [24, 8, 16, 16]
    by_hand = Grouping(cluster, [[1, 0], [3, 2]])
    assert cost.block_s(by_hand, tokens, heads) == cost.predict(plan).block_s == cost.block_s(grouping, tokens, heads)
