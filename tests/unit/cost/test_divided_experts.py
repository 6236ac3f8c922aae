"""Seconds, bytes and memory of experts that are divided among ranks; sums worked by hand."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from ds_hetero.cluster import Cluster, load_cluster
from ds_hetero.cost import Workload, make_cost_model
from ds_hetero.cost.model import CostModel
from ds_hetero.cost.terms.expert_shares import divided_of_layer, experts_of_ranks, without_experts
from ds_hetero.cost.terms.model_states import DividedExperts, static_bytes
from ds_hetero.cost.terms.trained import trained_parameters, weight_bytes
from ds_hetero.errors import PlanError
from ds_hetero.models import load_model
from ds_hetero.planner import plan
from ds_hetero.planner.expert_choice import by_speed_within_memory, divisions, gathered_instead
from ds_hetero.planner.memory.zero_weights import weights_by_memory
from ds_hetero.values.baselines import even
from ds_hetero.values.schedule import Group, Schedule

MODEL = load_model("mixtral-8x7b")
EXPERT = 3 * 4096 * 14336  # weights of one expert of a layer


def cluster(count: int = 1, **link: float) -> Cluster:
    """``count`` H100 and ``count`` A100 in two nodes."""
    inside = {"bandwidth_gb_per_s": 300, "latency_us": 5}
    nodes = [
        {"name": "fast", "device": "H100-SXM-80GB", "count": count, "link": inside},
        {"name": "slow", "device": "A100-SXM-80GB", "count": count, "link": inside},
    ]
    network: dict[str, Any] = {"bandwidth_gb_per_s": 25, "latency_us": 10, **link}
    return load_cluster({"nodes": nodes, "network": network})


def cost(workload: Workload, devices: Cluster | None = None) -> CostModel:
    return make_cost_model("calibrated", devices or cluster(), MODEL, workload)


def ring(tokens: tuple[int, ...]) -> Schedule:
    groups = tuple(Group(ranks=(rank,), tokens=(share,), heads=(32,)) for rank, share in enumerate(tokens))
    return Schedule(num_heads=32, num_kv_heads=8, groups=groups, layout="zigzag")


def test_experts_leave_the_weights_that_zero_shares() -> None:
    work = Workload(seq_len=4096, zero_stage=1, experts=(3.0, 1.0))
    assert divided_of_layer(MODEL, work) == 8 * EXPERT
    assert experts_of_ranks(MODEL, work, cluster()) == (6, 2)
    rest = MODEL.num_parameters - 32 * 8 * EXPERT
    assert trained_parameters(MODEL, work) == rest
    assert weight_bytes(MODEL, work) == 2 * rest
    assert without_experts(MODEL).num_parameters == rest


def test_an_expert_takes_its_states_where_it_lives() -> None:
    """16 bits: weights 2, gradients in fp32 4, masters and moments 12. In fp32 an expert is its own master: 4, 4, 8."""
    work = Workload(seq_len=4096, zero_stage=1, experts=(3.0, 1.0))
    experts = DividedExperts.of(MODEL, work, cluster())
    of_rank_1 = 32 * 2 * EXPERT
    assert experts.parameters_D.tolist() == [3 * of_rank_1, of_rank_1]
    held = experts.weights_D + experts.gradients_D + experts.optimizer_D
    assert held.tolist() == [18 * 3 * of_rank_1, 18 * of_rank_1]
    rest = MODEL.num_parameters - 32 * 8 * EXPERT
    np.testing.assert_allclose(static_bytes(MODEL, work, cluster()), held + rest * (2 + 2 + 12 / 2))
    wide = DividedExperts.of(MODEL, replace(work, element_bytes=4, gradient_bytes=4), cluster())
    assert (wide.weights_D + wide.gradients_D + wide.optimizer_D)[1] == 16 * of_rank_1


def test_adapters_on_experts_take_their_states_where_the_experts_live() -> None:
    """Rank 8 on the three matrices of 4,096 x 14,336 of each of the two experts of rank 1, in 32 layers.

    An adapter's weight takes 4 bytes, 4 of its gradient and 12 of masters and moments; in fp32 it is its own master.
    """
    work = Workload(seq_len=4096, zero_stage=1, experts=(3.0, 1.0), adapter_rank=8)
    frozen_bytes, adapters = 2 * 32 * 2 * EXPERT, 32 * 2 * 8 * 3 * (4096 + 14336)
    experts = DividedExperts.of(MODEL, work, cluster())
    held = experts.weights_D + experts.gradients_D + experts.optimizer_D
    assert held.tolist() == [3 * (frozen_bytes + 20 * adapters), frozen_bytes + 20 * adapters]
    wide = DividedExperts.of(MODEL, replace(work, element_bytes=4, gradient_bytes=4), cluster())
    assert (wide.weights_D + wide.gradients_D + wide.optimizer_D)[1] == 2 * frozen_bytes + 16 * adapters
    whole = replace(work, experts=None)
    assert trained_parameters(MODEL, whole) - trained_parameters(MODEL, work) == 4 * adapters
    of_adapters = weight_bytes(MODEL, whole) - weight_bytes(MODEL, work)
    assert of_adapters == 4 * (frozen_bytes + 4 * adapters)
    # All that a rank holds: its experts and their adapters, and its part of the rest.
    rest_bytes = 2 * (MODEL.num_parameters - 32 * 8 * EXPERT)
    rest = trained_parameters(MODEL, work)
    states = static_bytes(MODEL, work, cluster())
    np.testing.assert_allclose(states, held + rest_bytes + rest * (4 + 2 + 12 / 2))


def test_messages_take_the_bytes_of_rows_over_the_link() -> None:
    """Ranks with 1,024 and 3,072 tokens and experts 6 and 2; a row is 4,096 elements of 2 bytes, two for each token.

    Rank 0 sends 1,024 x 2/8 of its rows and receives 3,072 x 6/8 of rank 1's: 2,304 tokens x 2 rows x 8 KiB. Rows and
    results cross the link in turn, forward, again in the recomputation, and backward.
    """
    slow = {"bandwidth_gb_per_s": 0.1}
    schedule = ring((1024, 3072))
    work = Workload(seq_len=4096, zero_stage=0, experts=(3.0, 1.0))

    def block_s(workload: Workload, **link: float) -> float:
        return cost(workload, cluster(**link)).predict(schedule).block_s

    bytes_of_pass = 2 * 2304 * 2 * 4096 * 2
    longer_s = block_s(work, **slow) - block_s(work)
    without_s = block_s(replace(work, experts=None), **slow) - block_s(replace(work, experts=None))
    rate = cluster(**slow).node_all_to_all_s_per_byte[0, 1] - cluster().node_all_to_all_s_per_byte[0, 1]
    assert longer_s - without_s == pytest.approx(3 * bytes_of_pass * rate, rel=1e-6)


def test_the_slowest_rank_of_experts_decides() -> None:
    """An A100 with as many experts as an H100 computes longer; by speed both end together."""
    schedule = ring((3, 1))
    prediction = {
        shares: cost(Workload(seq_len=4096, experts=shares)).predict(schedule) for shares in ("equal", "by_speed")
    }
    assert prediction["by_speed"].block_s < prediction["equal"].block_s
    assert prediction["equal"].bottleneck.text == "non-attention: experts of rank 1 (A100-SXM-80GB on slow)"
    assert prediction["equal"].busy_s[1] > prediction["by_speed"].busy_s[1]


def test_terms_and_bars_add_up_to_the_block() -> None:
    model = cost(Workload(seq_len=4096, experts="by_speed"))
    prediction = model.predict(ring((3, 1)))
    assert prediction.terms.block_s == pytest.approx(prediction.block_s)
    spans = model.timeline(ring((3, 1)))
    assert max(span.stop_s for span in spans) <= prediction.block_s * (1 + 1e-9)
    assert all(span.stop_s >= span.start_s for span in spans)


def test_bounds_hold_for_divided_experts() -> None:
    model = cost(Workload(seq_len=4096, zero_stage=1, experts="by_speed"))
    grouping, tokens_D, heads_D = model.arrays(ring((3, 1)))
    exact_B = model.block_s_many(grouping, tokens_D[None], heads_D[None])
    assert model.floor_s <= model.least_block_s <= exact_B[0]
    below_B = model.block_s_below(grouping, tokens_D[None], heads_D[None], np.array([np.inf]))
    np.testing.assert_allclose(below_B, exact_B)
    assert model.free_ring_s(grouping, tokens_D[None], heads_D[None])[0] <= exact_B[0] * (1 + 1e-9)


def test_activations_move_to_the_experts_rank() -> None:
    """A rank that has all experts keeps the inner activations of all tokens; the other keeps its results alone."""
    schedule = ring((1, 1))
    work = Workload(seq_len=65536, zero_stage=1, activation_checkpointing=False)

    def activations(workload: Workload) -> np.ndarray:
        model = cost(workload)
        return np.array(model.memory_phases(*model.arrays(schedule))["loss"].activations)

    everywhere, on_0 = activations(work), activations(replace(work, experts=(1.0, 0.0)))
    assert on_0[0] > everywhere.max() and on_0[1] < everywhere.min()
    # All rows are somewhere, and the tokens' ranks keep the results of their rows besides: k x H x 2 bytes a token.
    results = 32 * 65536 * 2 * 4096 * 2
    assert on_0.sum() == pytest.approx(everywhere.sum() + results)


def test_few_tokens_travel_cheaper_than_weights_and_many_do_not() -> None:
    devices = cluster(8, bandwidth_gb_per_s=50)
    model = load_model("qwen3-30b-a3b")
    for tokens, is_cheaper in ((8192, True), (131072, False)):
        divided = plan(devices, model, Workload(seq_len=tokens, zero_stage=1, experts="by_speed"))
        gathered = plan(devices, model, Workload(seq_len=tokens, zero_stage=3))
        assert (divided.step_s < gathered.step_s) == is_cheaper


def test_plans_do_not_depend_on_the_order_of_nodes() -> None:
    devices = cluster(2)
    turned = replace(devices, nodes=devices.nodes[::-1])
    work = Workload(seq_len=8192, zero_stage=1, experts=(3.0, 1.0, 0.0, 2.0), adapter_rank=8)
    first = plan(devices, MODEL, work)
    second = plan(turned, MODEL, replace(work, experts=(0.0, 2.0, 3.0, 1.0)))
    assert first.step_s == pytest.approx(second.step_s)
    assert sorted(first.prediction.memory_bytes) == sorted(second.prediction.memory_bytes)


def test_zero_shares_by_memory_leave_room_for_experts() -> None:
    """A rank with three quarters of the experts gets a smaller share of the rest than with half of them."""
    model = cost(Workload(seq_len=4096, zero_stage=1, experts=(3.0, 1.0), adapter_rank=16))
    first, second = weights_by_memory([(model, ring((1, 1)))])
    assert first < second
    equal_first, equal_second = weights_by_memory([(cost(replace(model.workload, experts="equal")), ring((1, 1)))])
    assert first < equal_first and equal_second < second


def test_divisions_respect_memory() -> None:
    """16 experts' worth of Adam states do not fit by speed on small fast ranks, so slow ranks take more."""
    devices = cluster(8)
    model = load_model("qwen3-30b-a3b")
    limited = by_speed_within_memory(model, Workload(seq_len=8192, zero_stage=1), devices)
    assert limited == (11,) * 8 + (5,) * 8  # by speed 12 and 4
    assert [work.experts for work in divisions(model, Workload(seq_len=8192, zero_stage=1), devices)] == [
        "by_speed",
        tuple(limited),
        "by_memory",
    ]
    assert by_speed_within_memory(MODEL, Workload(seq_len=8192, zero_stage=1), cluster()) is None
    assert not list(divisions(load_model("llama-3.1-8b"), Workload(seq_len=8192), devices))
    assert gathered_instead(cost(Workload(seq_len=4096, experts="equal"))).workload == Workload(seq_len=4096)


REFUSED: dict[str, tuple[str, dict[str, Any]]] = {
    "has no experts": ("llama-3.1-8b", {}),
    "has linear-attention or SSM layers": ("qwen3-next-80b-a3b", {}),
    "quantized experts": ("mixtral-8x7b", {"adapter_rank": 8, "quantization": "nf4"}),
    "has 2 replicas": ("mixtral-8x7b", {"data_parallel": 2}),
    "states in the host's memory": ("mixtral-8x7b", {"offload_optimizer": True}),
}


@pytest.mark.parametrize("words", REFUSED)
def test_what_is_not_predicted_is_refused_by_name(words: str) -> None:
    name, changes = REFUSED[words]
    work = Workload(seq_len=4096, experts="equal", **changes)
    with pytest.raises(PlanError, match=words):
        make_cost_model("calibrated", cluster(), load_model(name), work)


def test_wrong_weights_are_refused() -> None:
    with pytest.raises(PlanError, match="experts has 3 weights, the cluster 2 ranks"):
        plan(cluster(), MODEL, Workload(seq_len=4096, experts=(1.0, 1.0, 1.0)))
    with pytest.raises(PlanError, match="experts must be one of equal, by_memory, by_speed"):
        Workload(seq_len=4096, experts="even")
    with pytest.raises(PlanError, match="not all 0"):
        Workload(seq_len=4096, experts=(0.0, 0.0))
    with pytest.raises(PlanError, match="published cost model"):
        make_cost_model("published", cluster(), MODEL, Workload(seq_len=4096, experts="equal"))


def test_one_rank_alone_sends_nothing() -> None:
    alone = load_cluster(
        {"nodes": [{"name": "one", "device": "H100-SXM-80GB", "count": 1}], "network": {"bandwidth_gb_per_s": 25}}
    )
    schedule = even(1, 32, 8)
    work = Workload(seq_len=4096, zero_stage=0)
    divided = make_cost_model("calibrated", alone, MODEL, replace(work, experts="equal")).predict(schedule)
    assert divided.block_s >= make_cost_model("calibrated", alone, MODEL, work).predict(schedule).block_s
