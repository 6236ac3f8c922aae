"""Shares of experts by rank, and the settings that cannot go with them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from ds_hetero.cluster import load_cluster
from ds_hetero.common.text import time_text
from ds_hetero.cost.terms.expert_traffic import token_bytes, weight_bytes_of_experts
from ds_hetero.decision.decide import JobStart, decide, depends_on_measuring
from ds_hetero.decision.expert_weights import check_experts, experts_text
from ds_hetero.decision.facts import JobFacts, ModelFacts, TrainingFacts
from ds_hetero.errors import ConfigError
from ds_hetero.models import load_model
from ds_hetero.models.trained_weights import adapter_parameters
from ds_hetero.values.section import read_section

LINK = {"bandwidth_gb_per_s": 300, "latency_us": 5}
CLUSTER: dict[str, Any] = {
    "nodes": [
        {"name": "fast", "device": "H100-SXM-80GB", "count": 1, "link": LINK},
        {"name": "slow", "device": "A100-SXM-40GB", "count": 1, "link": LINK},
    ],
    "network": {"bandwidth_gb_per_s": 25, "latency_us": 10},
}
SPEC = replace(load_model("llama-3.1-8b"), num_experts=8, experts_per_token=2)
MODEL = ModelFacts(name="m", num_heads=32, num_kv_heads=8, spec=SPEC, max_seq_len=4096)


def facts_of(**section: Any) -> JobFacts:
    read = read_section({"schedule": "ring", **section})
    assert read is not None
    return JobFacts(section=read, model=MODEL, training=TrainingFacts(zero_stage=1))


def test_shares_follow_the_devices_or_the_list() -> None:
    fast, slow = load_cluster(CLUSTER).devices
    by_speed = decide(facts_of(experts="by_speed", cluster=CLUSTER), 2, measured=None, on_host=False)
    assert by_speed.expert_weights == (
        fast.peak_flops_per_s * fast.efficiency.matmul,
        slow.peak_flops_per_s * slow.efficiency.matmul,
    )
    by_memory = decide(facts_of(experts="by_memory", cluster=CLUSTER), 2, measured=None, on_host=False)
    assert by_memory.expert_weights == (fast.usable_bytes, slow.usable_bytes)
    for wish, weights in (("equal", (1.0, 1.0)), ([3, 0], (3, 0)), (None, None)):
        start = decide(facts_of(experts=wish), 2, measured=None, on_host=False)
        assert start.expert_weights == weights


def test_the_start_says_which_is_cheaper_to_send() -> None:
    """4,096 tokens on two equal ranks: 2,048 of 8 KiB, both ways, in both passes; experts 3 * 8 * 2 * 176 MB / 2."""
    start = decide(facts_of(experts=[3, 1]), 2, measured=None, on_host=False)
    text = experts_text((3, 1), facts_of(experts=[3, 1]), start.plan)
    assert text == (
        "experts of a layer by rank: 6 | 2; with 4,096 tokens in a micro-batch, a rank sends up to 67 MB of tokens per "
        "layer, and would send 4,228 MB of experts under ZeRO-3"
    )
    unknown = replace(facts_of(experts=[3, 1]), model=replace(MODEL, spec=None))
    assert experts_text((3, 1), unknown, start.plan) == "experts by rank in proportion to 3 : 1"


def test_each_replica_divides_all_experts_among_its_ranks() -> None:
    """Eight experts on ranks 0 and 1 by 3 : 1, and again on ranks 2 and 3 by 0 : 1."""
    facts = replace(facts_of(experts=[3, 1, 0, 1]), sp_sizes={"the schedule": 2})
    start = decide(facts, 4, measured=None, on_host=False)
    assert len(start.plan.pipelines) == 2 and start.expert_weights == (3, 1, 0, 1)
    assert experts_text(start.expert_weights, facts, start.plan) == (
        "experts of a layer by rank of each replica: 6 | 2; 0 | 8; replicas add up their gradients"
    )
    empty = replace(facts_of(experts=[3, 1, 0, 0]), sp_sizes={"the schedule": 2})
    with pytest.raises(ConfigError, match="replica 1, ranks 2, 3, has no experts"):
        decide(empty, 4, measured=None, on_host=False)


def test_the_planner_says_that_experts_of_several_replicas_are_not_predicted() -> None:
    cluster = {**CLUSTER, "nodes": [{**node, "count": 2} for node in CLUSTER["nodes"]]}
    facts = replace(facts_of(experts="best", cluster=cluster), sp_sizes={"the schedule": 2})
    start = decide(facts, 4, measured=None, on_host=False)
    assert start.expert_weights is None and "several replicas are not predicted" in start.experts_choice


def test_tokens_are_counted_by_hand() -> None:
    """Tokens 6 and 2, experts 3 and 1: rank 0 sends 6 * 1/4 tokens out and 2 * 3/4 back, for 2 experts in 2 passes."""
    model = replace(SPEC, num_experts=4, hidden_size=10)
    assert token_bytes(model, (6, 2), (3, 1), element_bytes=2) == (2 * 2 * 3 * 20, 2 * 2 * 3 * 20)
    assert token_bytes(model, (6, 2), (4, 0), element_bytes=2) == (2 * 2 * 2 * 20, 2 * 2 * 2 * 20)
    # Tokens of Mixtral 8x7B's size cost as much as its weights on two equal ranks where the module's docstring says.
    mixtral = replace(SPEC, hidden_size=4096, mlp_size=14336)
    (sent, _) = token_bytes(mixtral, (129_024, 129_024), (4, 4), element_bytes=2)
    assert sent == weight_bytes_of_experts(mixtral, 2, element_bytes=2)


def test_live_ranks_are_measured_for_shares_by_speed() -> None:
    assert depends_on_measuring(facts_of(experts="by_speed"), 2)
    assert not depends_on_measuring(facts_of(experts="equal"), 2)
    with pytest.raises(ConfigError, match=r'"by_memory" needs the devices of all 2 ranks'):
        decide(facts_of(experts="by_memory"), 2, measured=None, on_host=False)


def best_of(tokens: int, network_gb_per_s: float, **training: Any) -> JobStart:
    """The start of a job of twelve layers of Qwen3-30B-A3B on two nodes of four H100."""
    link = {"bandwidth_gb_per_s": 300, "latency_us": 5}
    nodes = [{"name": name, "device": "H100-SXM-80GB", "count": 4, "link": link} for name in ("a", "b")]
    cluster = {"nodes": nodes, "network": {"bandwidth_gb_per_s": network_gb_per_s, "latency_us": 10}}
    spec = replace(load_model("qwen3-30b-a3b"), num_layers=12)
    model = replace(MODEL, num_kv_heads=4, spec=spec, max_seq_len=tokens, checkpointing=True)
    section = read_section({"schedule": "ring", "experts": "best", "cluster": cluster})
    assert section is not None
    facts = TrainingFacts(**{"zero_stage": 1, "mixed_precision": "bfloat16", **training})
    return decide(JobFacts(section=section, model=model, training=facts), 8, measured=None, on_host=False)


def test_the_planner_divides_experts_where_that_fits_and_is_faster() -> None:
    """Few tokens are sent sooner than ZeRO-1 gathers new weights of all experts; many tokens are not."""
    whole = best_of(65536, 5)
    assert whole.expert_weights is None and whole.forecasts[0].cost.workload.experts is None
    assert "experts are not divided: a step is predicted to take" in whole.experts_choice
    divided = best_of(8192, 5)
    assert divided.expert_weights is not None and divided.forecasts[0].prediction.feasible
    assert divided.forecasts[0].cost.workload.experts is not None
    assert divided.section.experts == "best"


def test_the_planner_says_why_experts_are_not_divided() -> None:
    refused = facts_of(experts="best", cluster=CLUSTER)
    start = decide(replace(refused, no_experts_reason="ZeRO-3."), 2, measured=None, on_host=False)
    assert start.expert_weights is None and start.experts_choice == "experts are not divided: ZeRO-3."
    unknown = decide(facts_of(experts="best"), 2, measured=None, on_host=False)
    assert unknown.experts_choice == "experts are not divided: the devices of all ranks are not known."
    assert depends_on_measuring(facts_of(experts="best"), 2)


def test_the_start_says_what_a_step_takes_either_way() -> None:
    facts = facts_of(experts="by_speed", cluster=CLUSTER)
    start = decide(facts, 2, measured=None, on_host=False)
    assert start.expert_weights is not None
    text = experts_text(start.expert_weights, facts, start.plan, start.forecasts)
    seconds = time_text(start.forecasts[0].prediction.iteration_s)
    assert f". A step is predicted to take {seconds}, and " in text and text.endswith(" if weights travelled")


def test_a_job_with_adapters_is_predicted_with_states_of_these_alone() -> None:
    """A parameter of an adapter has 12 bytes of optimizer state; a rank has those of its experts, and of the rest."""
    facts = facts_of(experts=[3, 1], cluster=CLUSTER)
    model = replace(MODEL, adapter_rank=8, trained_share=0.01)
    start = decide(replace(facts, model=model), 2, measured=None, on_host=False)
    work = start.forecasts[0].cost.workload
    assert (work.adapter_rank, work.gradient_bytes, work.optimizer_bytes) == (8, 2, 12)
    cost = start.forecasts[0].cost
    step = cost.memory_phases(*cost.arrays(start.forecasts[0].schedule.shifted(0)))["step"]
    adapters = SPEC.num_layers * adapter_parameters(SPEC, 8)
    assert (step.optimizer_state <= 12 * adapters).all() and (step.step <= 16 * adapters).all()


@pytest.mark.parametrize(
    ("training", "options", "words"),
    [
        ({"offloads_parameters": True, "zero_stage": 3}, {}, "weights are not offloaded"),
        ({"mixed_precision": "float16"}, {}, "training in 16 bits"),
        ({"mixed_precision": "bfloat16", "zero_stage": 0}, {}, "a norm that lacks the experts"),
        ({"mixed_precision": "bfloat16", "autocast": "bfloat16"}, {}, "training in 16 bits"),
        ({"autocast": "bfloat16"}, {}, "training in 16 bits"),
        ({}, {"element_bytes": 2}, "training in 16 bits"),
        ({"offloads_optimizer": True}, {}, "not offloaded"),
        ({}, {"is_split": False}, "sequences are not split"),
        ({}, {"is_elastic": True}, "elastic jobs"),
    ],
)
def test_settings_that_cannot_go_with_it_are_named(training: Any, options: Any, words: str) -> None:
    section = facts_of(experts=[3, 1]).section
    facts = TrainingFacts(**{"zero_stage": 1, **training})
    options = {"is_split": True, "is_elastic": False, "element_bytes": 4, **options}
    check_experts(section, TrainingFacts(zero_stage=1), is_split=True, is_elastic=False, element_bytes=4)
    with pytest.raises(ConfigError, match=f'"heterogeneity.experts" is .3.*{words}'):
        check_experts(section, facts, **options)
