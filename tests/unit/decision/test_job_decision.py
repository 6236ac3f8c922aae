"""The start of a job without any framework: what ds_config.json says is read once, and rank 0 decides from values."""

from __future__ import annotations

import re
import subprocess
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from ds_hetero.cost.workload import Buffers
from ds_hetero.decision.chosen_text import kept_attention_lines, ring_gradient_lines
from ds_hetero.decision.decide import decide, depends_on_measuring
from ds_hetero.decision.facts import JobFacts, ModelFacts, TrainingFacts, workload_of
from ds_hetero.decision.resolve import given_plan
from ds_hetero.engine.ds_config import has_active_section, read_training_facts, section_of
from ds_hetero.engine.registry import Registry
from ds_hetero.errors import ConfigError, ModelError, PlanError
from ds_hetero.job.start import ClusterCache, Request, World, agree_on_facts, agree_on_request, start_job
from ds_hetero.models import load_model
from ds_hetero.values.baselines import ring
from ds_hetero.values.section import read_section

LINK = {"bandwidth_gb_per_s": 300, "latency_us": 5}


def cluster(count: int) -> dict[str, Any]:
    return {"nodes": [{"name": "n", "device": "A100-SXM-80GB", "count": count, "link": LINK}]}


MODEL = ModelFacts(name="m", num_heads=32, num_kv_heads=8, spec=load_model("llama-3.1-8b"), max_seq_len=16384)


def facts_of(training: TrainingFacts | None = None, **section: Any) -> JobFacts:
    read = read_section(section)
    assert read is not None
    return JobFacts(section=read, model=MODEL, training=training or TrainingFacts(zero_stage=3))


# What ds_config.json says.


def test_a_configuration_is_read_into_values() -> None:
    facts = read_training_facts(
        {
            "train_batch_size": 16,
            "train_micro_batch_size_per_gpu": 2,
            "gradient_accumulation_steps": 4,
            "bf16": {"enabled": True},
            "data_types": {"grad_accum_dtype": "fp32"},
            "zero_optimization": {
                "stage": 3,
                "offload_param": {"device": "cpu"},
                "zenflow": {"topk_ratio": 0.1},
                "reduce_bucket_size": 5e7,
                "stage3_max_live_parameters": 10**8,
            },
            "sequence_parallel_size": 2,
            "tensor_parallel": {"autotp_size": 4},
            "optimizer": {"type": "Muon"},
        }
    )
    assert facts == TrainingFacts(
        zero_stage=3,
        train_batch_size=16,
        micro_batch_size=2,
        accumulation_steps=4,
        mixed_precision="bfloat16",
        accumulates_in_fp32=True,
        offloads_parameters=True,
        sp_size=2,
        optimizer="Muon",
        buffers=Buffers(reduce_bucket=50_000_000, live_parameters=10**8),
    )
    assert workload_of(facts_of(facts), 1, on_host=False).buffers == facts.buffers


def test_what_is_left_out_or_auto_has_its_default() -> None:
    auto = {
        "train_batch_size": "auto",
        "gradient_accumulation_steps": "auto",
        "bf16": {"enabled": "auto"},
        "zero_optimization": {"stage": "auto", "offload_optimizer": {"device": "none"}, "reduce_bucket_size": "auto"},
    }
    assert read_training_facts(auto) == read_training_facts({}) == TrainingFacts()


@pytest.mark.parametrize(
    ("ds_config", "asks", "reads"),
    [
        (None, False, None),
        ({}, False, None),
        ({"heterogeneity": {"enabled": False}}, False, None),
        ({"heterogeneity": {"schedule": "ring"}}, True, "ring"),
    ],
    ids=["none", "no section", "disabled", "section"],
)
def test_the_section_says_whether_this_engine_runs(ds_config: Any, asks: bool, reads: str | None) -> None:
    assert has_active_section(ds_config) is asks
    section = None if ds_config is None else section_of(ds_config)
    assert (None if section is None else section.schedule) == reads


def test_a_section_that_is_wrong_asks_for_this_engine_and_is_then_refused() -> None:
    assert has_active_section({"heterogeneity": True})
    with pytest.raises(ConfigError, match="must be an object"):
        section_of({"heterogeneity": True})


# What rank 0 decides.


def test_the_missing_batch_size_follows_from_the_others() -> None:
    training = TrainingFacts(train_batch_size=16, accumulation_steps=2)
    workload = workload_of(facts_of(training, schedule="ring"), 2, on_host=False)
    assert (workload.micro_batch, workload.micro_batches, workload.seq_len) == (4, 2, 16384)
    with pytest.raises(PlanError, match=r'"heterogeneity.seq_len" is missing, and m has no max_position_embeddings'):
        unknown = replace(facts_of(training, schedule="ring"), model=replace(MODEL, max_seq_len=None))
        workload_of(unknown, 2, on_host=False)


def test_a_decision_has_the_plan_and_a_forecast_per_replica() -> None:
    decision = decide(facts_of(cluster=cluster(4)), 4, measured=None, on_host=False)
    (forecast,) = decision.forecasts
    assert decision.plan.schedules == (forecast.schedule,)
    assert forecast.planned is not None and forecast.planned.prediction == forecast.prediction
    assert decision.zero_weights is None and decision.no_forecast_reason is None


def test_a_job_that_names_no_tokens_is_planned_for_those_that_fit(caplog: pytest.LogCaptureFixture) -> None:
    """Models name 131,072 and more, of which a job of 1,024 needs few: it was refused with advice that it had taken."""
    model = replace(MODEL, max_seq_len=1 << 22)
    decision = decide(replace(facts_of(cluster=cluster(4)), model=model), 4, measured=None, on_host=False)
    (forecast,) = decision.forecasts
    assert forecast.prediction.feasible
    (record,) = caplog.records
    assert re.match(
        r"planned for sequences of \d+ tokens, since the 4194304 of the model's max_position_embeddings do not fit\. "
        r'Set "seq_len"',
        record.getMessage(),
    )
    with pytest.raises(PlanError, match="no schedule of"):  # what the section names is not changed
        decide(facts_of(cluster=cluster(4), seq_len=1 << 22), 4, measured=None, on_host=False)


def test_shares_of_the_optimizer_state_follow_the_memory_that_is_left() -> None:
    section: dict[str, Any] = {"cluster": cluster(4), "schedule": "ulysses", "seq_len": 8192}
    weights = decide(facts_of(**section, zero_partition="memory"), 4, measured=None, on_host=False).zero_weights
    assert weights is not None and len(weights) == 4 and len(set(weights)) == 1


def test_shares_by_memory_of_a_model_that_no_cost_model_describes_are_refused_as_such() -> None:
    unknown = replace(MODEL, spec=None, no_spec_reason="it is no transformers model.")
    alone = replace(
        facts_of(cluster=cluster(2), zero_partition="memory"),
        model=unknown,
        sp_sizes={"sequence_parallel_size of ds_config": 1},
    )
    with pytest.raises(ModelError, match=r'free memory .* a list of weights, one per rank, or "uniform"'):
        decide(alone, 2, measured=None, on_host=False)


def test_a_job_that_no_cost_model_describes_is_started_without_a_forecast() -> None:
    model = replace(MODEL, spec=None, no_spec_reason="it has a window.")
    facts = replace(facts_of(cluster=cluster(2), schedule="ring"), model=model)
    decision = decide(facts, 2, measured=None, on_host=False)
    assert not decision.forecasts and decision.no_forecast_reason is not None
    assert decision.no_forecast_reason.startswith("it has a window. So no schedule can be searched for")
    with pytest.raises(ModelError, match="it has a window"):
        decide(replace(facts, section=facts_of(cluster=cluster(2)).section), 2, measured=None, on_host=False)


@pytest.mark.parametrize(
    ("section", "world_size", "depends"),
    [
        ({}, 2, True),
        ({}, 1, False),
        ({"schedule": "ring"}, 2, False),
        ({"schedule": "ring", "zero_partition": "memory"}, 1, True),
        ({"cluster": cluster(2)}, 2, False),
    ],
    ids=["plan", "alone", "ring", "by memory", "described"],
)
def test_ranks_are_measured_where_the_plan_depends_on_it(
    section: dict[str, Any], world_size: int, depends: bool
) -> None:
    assert depends_on_measuring(facts_of(**section), world_size) is depends


def test_a_decision_is_made_without_torch() -> None:
    code = "import sys, ds_hetero.decision.decide, ds_hetero.engine.ds_config; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


# What the ranks agree on; here one rank.


class OneRankOf(World):
    """Rank 0 of a job whose other ranks have read and decided the same."""

    def on_all_ranks(self, compute: Any) -> list[Any]:
        return [compute()] * self.size


def test_a_job_is_started_again_for_another_world() -> None:
    clusters = ClusterCache()
    facts = {size: facts_of(cluster=cluster(size), seq_len=8192) for size in (3, 4)}
    starts = []
    for size in (4, 3, 4):
        world = OneRankOf(rank=0, size=size)
        starts.append(start_job(world, agree_on_facts(world, lambda size=size: facts[size]), clusters))
    first, smaller, again = starts
    assert [len(start.plan.ranks) for start in starts] == [4, 3, 4]
    assert first.plan == again.plan and first.plan.fingerprint != smaller.plan.fingerprint
    assert len(smaller.forecasts) == 1


def test_a_second_start_keeps_the_plan_as_long_as_the_section_stays() -> None:
    world, clusters = OneRankOf(rank=0, size=4), ClusterCache()
    before = start_job(world, facts_of(cluster=cluster(4)), clusters)
    later = facts_of(TrainingFacts(zero_stage=2, micro_batch_size=8), cluster=cluster(4))
    after = start_job(world, later, clusters, before)
    assert after.plan is before.plan and after.forecasts is before.forecasts
    assert after.facts.training.zero_stage == 2
    other = start_job(world, facts_of(cluster=cluster(4), schedule="ring"), clusters, before)
    assert other.plan != before.plan


@dataclass(frozen=True)
class ThreeRanks(World):
    """The ranks of a job whose second one has read something else.

    Args:
        other: takes what this rank has read; returns what the second one has.
    """

    other: Any = None

    def on_all_ranks(self, compute: Any) -> list[Any]:
        own = compute()
        return [own, self.other(own), own]


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ({"schedule": "ring"}, "heterogeneity.schedule is 'ulysses' on ranks 0, 2; 'ring' on rank 1"),
        ({"schedule": "ulysses", "seq_len": 64}, "heterogeneity.seq_len is 'missing' on ranks 0, 2; 64 on rank 1"),
    ],
    ids=["another value", "another key"],
)
def test_sections_that_differ_between_ranks_are_refused_by_key_and_rank(section: Any, message: str) -> None:
    world = ThreeRanks(rank=0, size=3, other=lambda own: Request(read_section(section), None))
    with pytest.raises(ConfigError, match=f"the ranks must agree, but {re.escape(message)}"):
        agree_on_request(world, lambda: read_section({"schedule": "ulysses"}))


def test_models_that_differ_between_ranks_are_refused_by_name_and_rank() -> None:
    facts = facts_of(schedule="ulysses")
    other = replace(facts, model=replace(facts.model, num_heads=64))
    world = ThreeRanks(rank=0, size=3, other=lambda own: (other, *own[1:]))
    with pytest.raises(ConfigError, match="the ranks must agree, but num_heads is 32 on ranks 0, 2; 64 on rank 1"):
        agree_on_facts(world, lambda: facts)


def test_section_and_plan_file_are_read_once_for_a_job(tmp_path: Path) -> None:
    file = tmp_path / "plan.json"
    file.write_text(ring(1, 8, 8).to_json())
    registry, ds_config = Registry(None, None), {"heterogeneity": {"schedule": str(file)}}
    request = registry.request_of(ds_config)
    assert request.plan is not None and not request.is_of_pipelines
    file.unlink()
    assert registry.request_of({**ds_config, "bf16": {"enabled": True}}) is request
    registry.forget_request()
    with pytest.raises(ConfigError, match="is neither a file nor a strategy"):
        registry.request_of(ds_config)


def test_shares_by_memory_let_the_search_find_what_equal_shares_do_not_fit() -> None:
    small = {"small": {"peak_tflops": 300, "memory_gib": 24, "memory_bandwidth_gb_per_s": 2000}}
    nodes = [{"name": "n", "devices": ["A100-SXM-80GB", "A100-SXM-80GB", "small"], "link": LINK}]
    section: dict[str, Any] = {"cluster": {"nodes": nodes, "devices": small}, "schedule": "plan", "seq_len": 4096}
    with pytest.raises(PlanError, match=r"no schedule of llama-3\.1-8b with 4096 tokens fits on 3 devices"):
        decide(facts_of(**section), 3, measured=None, on_host=False)
    decision = decide(facts_of(**section, zero_partition="memory"), 3, measured=None, on_host=False)
    (forecast,) = decision.forecasts
    assert forecast.prediction.feasible and decision.zero_weights is not None
    assert decision.zero_weights[2] < 0.5 * decision.zero_weights[0]


@pytest.mark.parametrize(
    ("wish", "seq_len", "checkpointing", "keeps"),
    [
        ("where_it_fits", 65_536, True, True),
        ("where_it_fits", 327_680, True, False),
        (True, 327_680, True, True),
        ("where_it_fits", 65_536, False, False),
        (False, 65_536, True, False),
    ],
    ids=["fits", "does not fit", "does not fit, but is wanted", "no checkpoints", "is not wanted"],
)
def test_attention_is_kept_where_it_fits(wish: Any, seq_len: int, checkpointing: bool, keeps: bool) -> None:
    section = {"schedule": "ring", "cluster": cluster(4), "seq_len": seq_len, "tile_tokens": 4096}
    facts = facts_of(**section, keep_attention=wish)
    facts = replace(facts, model=replace(MODEL, checkpointing=checkpointing))
    start = decide(facts, 4, measured=None, on_host=False)
    assert start.keeps_attention is keeps
    (forecast,) = start.forecasts
    assert forecast.cost.workload.keep_attention is keeps
    assert forecast.prediction.feasible is (wish is not True and checkpointing)


UNLIKE = {
    "nodes": [
        {"name": "a", "device": "H100-SXM-80GB", "count": 2, "link": LINK},
        {"name": "b", "device": "A100-SXM-80GB", "count": 1, "link": LINK},
    ],
    "network": LINK,
}


@pytest.mark.parametrize("unit", [128, 256])
def test_a_searched_schedule_keeps_the_token_unit_of_the_section(unit: int) -> None:
    section = {"cluster": UNLIKE, "seq_len": 16_384, "tile_tokens": 4096}
    checkpointed = replace(MODEL, checkpointing=True)
    plain = decide(replace(facts_of(**section), model=checkpointed), 3, measured=None, on_host=False)
    assert any(tokens % unit for tokens in plain.plan.schedules[0].tokens(16_384).values())
    facts = replace(facts_of(**section, token_unit=unit), model=checkpointed)
    start = decide(facts, 3, measured=None, on_host=False)
    tokens = start.plan.schedules[0].tokens(16_384)
    assert sum(tokens.values()) == 16_384 and not any(count % unit for count in tokens.values())
    assert len(set(tokens.values())) > 1  # the slower device still gets fewer
    slower = start.forecasts[0].prediction.iteration_s / plain.forecasts[0].prediction.iteration_s
    assert slower < 1.03
    assert plain.places_by_default and not start.places_by_default


@pytest.mark.parametrize(
    ("section", "sizes", "says"),
    [
        (
            {"seq_len": 10_000},
            {},
            r'the 10,000 tokens of a sequence are no multiple of it. Set "seq_len" to 9,984 or 10,112',
        ),
        ({"seq_len": 100}, {}, r'Set "seq_len" to 128, and pad'),
        ({"seq_len": 256}, {}, r"3 ranks with so many tokens each need 384, but a sequence has 256"),
        ({"seq_len": 16_384}, {"sequence_parallel_size": 1}, r"but every sequence is on one rank"),
    ],
)
def test_a_token_unit_that_cannot_be_kept_is_refused(section: dict[str, Any], sizes: dict[str, int], says: str) -> None:
    facts = replace(facts_of(cluster=UNLIKE, token_unit=128, **section), sp_sizes=sizes)
    with pytest.raises(ConfigError, match=says):
        decide(facts, 3, measured=None, on_host=False)


def test_rounded_gradients_of_a_ring_are_counted_and_named_with_their_error() -> None:
    facts = facts_of(schedule="ring", cluster=cluster(4), ring_gradients="bf16")
    start = decide(facts, 4, measured=None, on_host=False)
    (forecast,) = start.forecasts
    assert forecast.cost.workload.ring_gradients == "bf16"
    (line,) = ring_gradient_lines(start)
    assert (
        'on each of 3 hops of a ring: an error of at most 1.2 % of the sum of their parts\' magnitudes. "fp32"' in line
    )
    exact = decide(facts_of(schedule="ring", cluster=cluster(4)), 4, measured=None, on_host=False)
    assert exact.forecasts[0].cost.workload.ring_gradients == "fp32" and not list(ring_gradient_lines(exact))


@pytest.mark.parametrize("schedule", ["usp", {"version": 1, "num_heads": 32, "num_kv_heads": 8}])
def test_rounded_gradients_without_a_ring_are_refused(schedule: Any) -> None:
    if isinstance(schedule, dict):
        schedule["groups"] = [{"ranks": [0, 1], "tokens": [1, 1], "heads": [16, 16]}]
    facts = facts_of(schedule=schedule, cluster=cluster(2), ring_gradients="bf16")
    plan = None if isinstance(schedule, str) else given_plan(facts.section, 2)
    with pytest.raises(ConfigError, match=r'"heterogeneity.ring_gradients" is "bf16", the type of messages in a ring'):
        decide(facts, 2, measured=None, on_host=False, plan=plan)


def test_rounded_gradients_have_no_effect_where_a_search_finds_no_ring() -> None:
    facts = facts_of(cluster=cluster(2), ring_gradients="bf16")
    start = decide(facts, 2, measured=None, on_host=False)
    assert [schedule.ring_size for schedule in start.plan.schedules] == [1]
    assert list(ring_gradient_lines(start)) == [
        '"ring_gradients": "bf16" has no effect: the schedule has no ring. Leave the key out'
    ]


def test_what_kept_attention_does_not_do_is_said() -> None:
    facts = facts_of(schedule="ring", cluster=cluster(4), keep_attention=True)
    (line,) = kept_attention_lines(decide(facts, 4, measured=None, on_host=False))
    assert "no layer of m is checkpointed" in line
    checkpointed = replace(facts, model=replace(MODEL, checkpointing=True))
    assert not list(kept_attention_lines(decide(checkpointed, 4, measured=None, on_host=False)))
    hybrid = replace(checkpointed.model, spec=load_model("qwen3-next-80b-a3b"), num_heads=16, num_kv_heads=2)
    (line,) = kept_attention_lines(decide(replace(checkpointed, model=hybrid), 4, measured=None, on_host=False))
    assert "keeps the 12 attention layers of m" in line
