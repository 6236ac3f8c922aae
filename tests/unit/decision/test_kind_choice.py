"""``"parallel": "best"``: the faster kind that the configuration leaves open, and what would be faster elsewhere."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from ds_hetero.cluster.notation import read_notation
from ds_hetero.decision.facts import JobFacts, ModelFacts, TrainingFacts
from ds_hetero.decision.kind_choice import KindChoice, choose_kind, section_of_kind
from ds_hetero.errors import ConfigError, ModelError, PlanError
from ds_hetero.models import load_model
from ds_hetero.planner.jobs.kinds import PIPELINES, SEQUENCE
from ds_hetero.values.section import read_section

SPEC = load_model("qwen3-0.6b")
MODEL = ModelFacts(
    name="Qwen3ForCausalLM", num_heads=SPEC.num_heads, num_kv_heads=SPEC.num_kv_heads, spec=SPEC, checkpointing=True
)
SLOW = read_notation("5090 | 3090", "1GbE").content  # weights over this network take longer than activations
FAST = read_notation("8xH100", None).content


def facts_of(cluster: Any, training: TrainingFacts | None = None, **section: Any) -> JobFacts:
    read = read_section({"parallel": "best", "cluster": cluster, "seq_len": 4096, **section})
    assert read is not None
    return JobFacts(section=read, model=MODEL, training=training or TrainingFacts(zero_stage=1, train_batch_size=8))


def choice_of(
    facts: JobFacts, num_ranks: int, closed: dict[str, str] | None = None, stage_kinds: tuple[str, ...] | None = None
) -> KindChoice:
    return choose_kind(facts, num_ranks, measured=None, on_host=False, closed=closed or {}, stage_kinds=stage_kinds)


def test_pipelines_are_chosen_where_the_network_is_slow_and_sequences_are_told_with_their_factor() -> None:
    choice = choice_of(facts_of(SLOW), 2)
    assert choice.kind == PIPELINES
    assert choice.lines[0].startswith('"parallel": "best" is pipelines (sequence parallelism: ')
    assert "times as long" in choice.lines[0] or "slower" in choice.lines[0]


def test_one_long_sequence_is_shared() -> None:
    """Stages of one rank would run it one after the other."""
    facts = facts_of(FAST, TrainingFacts(zero_stage=1, train_batch_size=1), seq_len=131072)
    assert choice_of(facts, 8, stage_kinds=()).kind == SEQUENCE


def test_a_kind_that_the_call_rules_out_is_named_and_the_other_is_taken() -> None:
    choice = choice_of(facts_of(SLOW), 2, {PIPELINES: "the call has no optimizer"})
    assert choice.kind == SEQUENCE and "pipelines: no, the call has no optimizer" in choice.lines[0]
    # What is ruled out may be better all the same; then that is said, with the factor.
    assert any("times as fast, were it open" in line for line in choice.lines[1:])
    with pytest.raises(PlanError, match="no weights"):
        choice_of(facts_of(SLOW), 2, {PIPELINES: "no optimizer", SEQUENCE: "no weights"})


def test_the_best_job_outside_of_the_configuration_is_told_with_what_would_change() -> None:
    """ZeRO-3 over a slow network; its job keeps the stage, and says what another stage would gain."""
    facts = facts_of(SLOW, TrainingFacts(zero_stage=3, micro_batch_size=8), seq_len=2048)
    choice = choice_of(facts, 2, {PIPELINES: "ZeRO-3"})
    (told,) = choice.lines[1:]
    gain = float(told.partition(" ")[0])
    assert gain >= 1.05 and 'pipelines, which take the batch of a step at once; "zero_optimization.stage": 2' in told


def test_ranks_of_another_number_and_a_length_that_is_missing_are_refused() -> None:
    with pytest.raises(ConfigError, match="describes 2 devices, the job has 3"):
        choice_of(facts_of(SLOW), 3)
    with pytest.raises(ConfigError, match='Set "seq_len"'):
        choice_of(facts_of(SLOW, seq_len=None), 2)
    unknown = replace(facts_of(SLOW), model=replace(MODEL, spec=None, no_spec_reason="it is new."))
    with pytest.raises(ModelError, match="it is new"):
        choice_of(unknown, 2)


@pytest.mark.parametrize("key", [{"schedule": "ring"}, {"planner": "hexiseq"}, {"batch": [2, 1]}])
def test_keys_that_fix_the_kind_contradict(key: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match='"parallel": "best" chooses the kind of job'):
        read_section({"parallel": "best", **key})


def test_sequences_keep_attention_where_it_fits_unless_the_user_says_otherwise() -> None:
    section = facts_of(SLOW).section
    assert section_of_kind(section, SEQUENCE).keep_attention == "where_it_fits"
    assert section_of_kind(section, SEQUENCE).parallel == "sequence"
    assert section_of_kind(section, PIPELINES).parallel == "full"
    assert "keep_attention" not in section_of_kind(section, PIPELINES).model_fields_set
    fixed = facts_of(SLOW, keep_attention=False).section
    assert section_of_kind(fixed, SEQUENCE).keep_attention is False
