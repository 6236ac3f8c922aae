"""What is decided of pipelines before any rank runs: the global batch, keys that pipelines follow, what a model can."""

import json
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from ds_hetero.cluster import load_cluster
from ds_hetero.cost import Workload
from ds_hetero.cost.stages.calibrated import CalibratedStageCosts
from ds_hetero.decision.decide import wants_search
from ds_hetero.decision.decide_pipelines import (
    PipelineFacts,
    check_pipeline_section,
    global_batch_of,
    idle_keys,
    pipelines_workload,
    search_pipelines,
)
from ds_hetero.decision.facts import JobFacts, ModelFacts, TrainingFacts, workload_of
from ds_hetero.decision.resolve import given_plan, is_of_pipelines
from ds_hetero.decision.start_text import pipelines_text
from ds_hetero.errors import ConfigError
from ds_hetero.models import load_model
from ds_hetero.models.shapes import ModelSpec
from ds_hetero.values.plans import INNER, Plan, read_plan
from ds_hetero.values.plans.section_keys import SECTION_KEYS
from ds_hetero.values.section import HeterogeneitySection, read_section

CLUSTER, MODEL = load_cluster("hexiscale-case-study"), load_model("llama-3.1-8b")


@pytest.mark.parametrize("given", [{"train_batch_size": 8}, {"micro_batch_size": 8}], ids=["step", "micro-batch"])
def test_the_global_batch_is_what_ds_config_says_of_one_worker(given):
    assert global_batch_of(TrainingFacts(**given, accumulation_steps=1)) == 8


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, 'Set "train_batch_size"'),
        (
            {"train_batch_size": 8, "micro_batch_size": 2},
            '"train_batch_size" is 8 and "train_micro_batch_size_per_gpu"',
        ),
        (
            {"train_batch_size": 8, "accumulation_steps": 4},
            '"gradient_accumulation_steps" is 4; .* Set it to 1, or leave it out',
        ),
    ],
)
def test_a_batch_that_is_unclear_is_refused(given, expected):
    with pytest.raises(ConfigError, match=expected):
        global_batch_of(TrainingFacts(**given))


def test_a_plan_says_the_batch_and_ds_config_may_not_contradict():
    stage = {"ranks": [0], "layers": [0, 1], "inner": "one"}
    pipeline = {"stages": [stage], "micro_batch_size": 2, "micro_batches": 3}
    model = {"num_layers": 1, "num_heads": 8, "num_kv_heads": 4}
    plan = read_plan({"version": 2, "model": model, "pipelines": [pipeline]})
    assert global_batch_of(TrainingFacts(), plan) == global_batch_of(TrainingFacts(train_batch_size=6), plan) == 6
    with pytest.raises(ConfigError, match='"train_batch_size" is 4, but the pipelines of the plan take 6 sequences'):
        global_batch_of(TrainingFacts(train_batch_size=4), plan)


ASKED = {
    "layout": {"layout": "zigzag"},
    "token_unit": {"token_unit": 128},
    "loss": {"loss": "local_sum"},
    "zero_partition": {"zero_partition": "memory"},
    "zero_within": {"zero_within": "node"},
    "experts": {"experts": [1]},
    "batch": {"batch": [1]},
    "placement.mode": {"placement": "documents"},
    "checks.compare_every": {"checks": {"compare_every": 5}},
    "verify": {"verify": "always"},
    "evaluation": {"evaluation": "whole"},
    "keep_attention": {"keep_attention": "where_it_fits"},
}


def test_every_key_of_the_section_has_a_row():
    nested = {path.partition(".")[0] for path in SECTION_KEYS}
    assert nested == set(HeterogeneitySection.model_fields)
    assert set(ASKED) == {path for path, key in SECTION_KEYS.items() if key.refused}


@pytest.mark.parametrize("path", ASKED)
def test_a_key_that_stages_do_not_follow_is_refused(path):
    taken = {"tile_tokens": 1024, "attention": "torch", "elastic": {}, "replan": {"enabled": True}}
    check_pipeline_section(read_section({"parallel": "full", **taken}))
    section = read_section({"parallel": "full", **ASKED[path]})
    with pytest.raises(ConfigError, match=f'"heterogeneity.{path}".*{SECTION_KEYS[path].refused}'):
        check_pipeline_section(section)


def test_what_says_that_nothing_is_wanted_is_no_fault():
    off = {"layout": None, "placement": "stream", "zero_partition": "uniform", "verify": "off", "replan": {}}
    check_pipeline_section(read_section({"parallel": "full", **off}))


def test_a_key_that_has_nothing_to_say_in_some_stages_is_named():
    stages = [{"ranks": [0], "layers": [0, 1]}, {"ranks": [1], "layers": [1, 2]}]
    plan = {"version": 2, "model": {"num_layers": 2, "num_heads": 4, "num_kv_heads": 4}}
    plan["pipelines"] = [{"micro_batch_size": 1, "micro_batches": 4, "stages": stages}]
    (line,) = idle_keys(read_section({"attention": "torch"}), read_plan(plan))
    assert '"heterogeneity.attention" has no effect in stages with "inner": "one"' in line
    assert not idle_keys(read_section({"tile_tokens": 8}), read_plan(plan))


def test_the_docs_have_the_table_of_keys():
    text = Path("docs/pipeline-details.md").read_text(encoding="utf-8")
    for row in key_rows():
        assert row in text, row


def key_rows():
    """The rows of docs/pipeline-details.md."""
    for path, key in SECTION_KEYS.items():
        cells = ["refused" if key.refused else "no effect" if inner in key.idle else "yes" for inner in INNER]
        why = key.refused or next(iter(key.idle.values()), "")
        yield f"| `{path}` | {' | '.join(cells)} | {why} |"


def test_full_parallelism_searches_unless_a_plan_is_given():
    assert wants_search(read_section({"parallel": "full"}))
    assert not wants_search(read_section({"parallel": "full", "schedule": "plan.json"}))
    assert not wants_search(read_section({}))
    with pytest.raises(ConfigError, match='"schedule" is "ring"'):
        read_section({"parallel": "full", "schedule": "ring"})


def test_a_plan_that_fits_only_with_weighted_owners_is_run_and_kept_with_them(tmp_path):
    """Two ranks with 0.22 and 0.16 GiB that hold the same layers: the second one owns less of the optimizer state."""
    sizes = {"num_layers": 1, "hidden_size": 512, "num_heads": 8, "num_kv_heads": 1, "head_dim": 64, "mlp_size": 1408}
    spec = ModelSpec(name="m", vocab_size=8000, **sizes)
    link = {"bandwidth_gb_per_s": 10, "latency_us": 10}
    device = {"peak_tflops": 0.05, "memory_bandwidth_gb_per_s": 20, "reserved_gib": 0}
    cluster = {
        "nodes": [{"name": name, "device": name, "count": 1, "link": link} for name in ("big", "small")],
        "network": link,
        "devices": {"big": {**device, "memory_gib": 0.22}, "small": {**device, "memory_gib": 0.16}},
    }
    job = JobFacts(
        section=read_section({"parallel": "full", "cluster": cluster, "seq_len": 128}),
        model=ModelFacts(name="m", num_heads=8, num_kv_heads=1, spec=spec, dtype="float32", element_bytes=4),
        training=TrainingFacts(train_batch_size=8),
    )
    facts = PipelineFacts(job=job, impossible_stage_kinds={"sequence": "left out"})
    searched = search_pipelines(facts, 2, measured=None, on_host=True)
    (big, one), (small, less) = searched.plan.zero.owner_weights
    assert (big, one, small) == (0, 1.0, 1) and 0 < less < 0.5
    assert searched.plan.zero == searched.planned.plan.zero
    kept = tmp_path / "plan.json"
    kept.write_text(json.dumps(searched.plan.to_dict()))
    again = given_plan(read_section({"parallel": "full", "schedule": str(kept)}), 2)
    assert again == searched.plan


@pytest.mark.parametrize(("inner", "other"), [("tensor", "sequence"), ("sequence", "tensor")])
def test_stages_are_planned_in_the_ways_that_a_model_can_run(inner, other):
    work = Workload(seq_len=4096)
    assert CalibratedStageCosts(CLUSTER, MODEL, work).stage(0, 2, inner, 1, 1) is not None
    assert CalibratedStageCosts(CLUSTER, MODEL, work, (other,)).stage(0, 2, inner, 1, 1) is None


def test_tensor_parallel_stages_have_at_most_a_rank_for_a_kv_head():
    work = Workload(seq_len=4096)
    assert CalibratedStageCosts(CLUSTER, MODEL, work, ()).stage(0, 1, "one", 1, 1) is not None
    eight = load_cluster("hexiseq-setting-1")
    assert CalibratedStageCosts(eight, MODEL, work).stage(0, 8, "tensor", 1, 1) is not None
    assert CalibratedStageCosts(eight, replace(MODEL, num_kv_heads=2), work).stage(0, 4, "tensor", 1, 1) is None


def test_a_plan_of_one_sequence_stage_is_one_of_pipelines_where_full_is_asked_for():
    schedule = {
        "version": 1,
        "num_heads": 4,
        "num_kv_heads": 4,
        "groups": [{"ranks": [0, 1], "tokens": [1, 1], "heads": [2, 2]}],
    }
    stage = {"ranks": [0, 1], "inner": "sequence", "schedule": schedule}
    plan = {"version": 2, "model": {"num_layers": 6, "num_heads": 4, "num_kv_heads": 4}}
    plan["pipelines"] = [{"micro_batch_size": 1, "micro_batches": 4, "stages": [stage]}]
    section = read_section({"schedule": plan})
    assert not is_of_pipelines(given_plan(section, 2), section)
    pipelines = given_plan(read_section({"schedule": plan, "parallel": "full"}), 2)
    assert isinstance(pipelines, Plan) and pipelines.pipelines[0].stages[0].layers == (0, 6)
    assert pipelines_text(pipelines).splitlines() == [
        "2 ranks in 1 pipeline",
        "  4 x 1 samples: ranks 0, 1 (sequence) layers 0-5",
    ]


@pytest.mark.parametrize("read", [partial(workload_of, num_replicas=1), pipelines_workload], ids=["rows", "pipelines"])
def test_the_size_of_a_tile_reaches_the_prediction(read):
    job = JobFacts(
        section=read_section({"seq_len": 4096, "tile_tokens": 512}),
        model=ModelFacts(name="m", num_heads=4, num_kv_heads=4),
        training=TrainingFacts(),
    )
    work = read(job, on_host=True)
    assert (work.tiled_logits, work.tiled_mlp, work.tile_tokens) == (True, True, 512)


def test_what_a_model_cannot_run_is_left_out():
    job = JobFacts(
        section=read_section({}), model=ModelFacts(name="m", num_heads=4, num_kv_heads=4), training=TrainingFacts()
    )
    assert PipelineFacts(job=job, impossible_stage_kinds={"tensor": "adapters"}).stage_kinds == ("sequence",)


def test_layers_of_plans_that_are_searched_for_can_move_where_that_is_asked_for():
    facts = ModelFacts(name="m", num_heads=4, num_kv_heads=4)
    section = read_section({"parallel": "full", "replan": {"enabled": True}})
    moving = PipelineFacts(
        job=JobFacts(section=section, model=facts, training=TrainingFacts()), impossible_stage_kinds={}
    )
    assert moving.stage_kinds == ("tensor", "sequence")
