"""What is decided of pipelines before any rank runs: the global batch, keys that pipelines follow, what a model can."""

from dataclasses import replace

import pytest

from ds_hetero.cluster import load_cluster
from ds_hetero.config import read_section
from ds_hetero.cost import Workload
from ds_hetero.cost.stages.calibrated import CalibratedStageCosts
from ds_hetero.errors import ConfigError
from ds_hetero.job.decide_pipelines import PipelineFacts, check_pipeline_section, global_batch_of, wants_search
from ds_hetero.job.facts import JobFacts, ModelFacts, TrainingFacts
from ds_hetero.job.pipeline_report import pipelines_text
from ds_hetero.job.plan_files import pipelines_in_file
from ds_hetero.models import load_model
from ds_hetero.plans import Plan

CLUSTER, MODEL = load_cluster("hexiscale-case-study"), load_model("llama-3.1-8b")


@pytest.mark.parametrize("given", [{"train_batch_size": 8}, {"micro_batch_size": 8}, {"micro_batch_size": 8}])
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
        ({"train_batch_size": 8, "accumulation_steps": 4}, '"gradient_accumulation_steps" is 4'),
    ],
)
def test_a_batch_that_is_unclear_is_refused(given, expected):
    with pytest.raises(ConfigError, match=expected):
        global_batch_of(TrainingFacts(**given))


@pytest.mark.parametrize(
    "key",
    [{"layout": "zigzag"}, {"loss": "local_sum"}, {"zero_partition": "memory"}, {"placement": "documents"}],
    ids=lambda key: next(iter(key)),
)
def test_a_key_that_pipelines_do_not_follow_is_refused(key):
    check_pipeline_section(read_section({"parallel": "full"}))
    with pytest.raises(ConfigError, match=f"heterogeneity.{next(iter(key))}"):
        check_pipeline_section(read_section({"parallel": "full", **key}))


def test_full_parallelism_searches_unless_a_plan_is_given():
    assert wants_search(read_section({"parallel": "full"}))
    assert not wants_search(read_section({"parallel": "full", "schedule": "plan.json"}))
    assert not wants_search(read_section({}))
    with pytest.raises(ConfigError, match='"schedule" is "ring"'):
        read_section({"parallel": "full", "schedule": "ring"})


def test_stages_are_planned_in_the_ways_that_a_model_can_run_and_its_kv_heads_allow():
    work = Workload(seq_len=4096)
    for size, inner in ((2, "tensor"), (2, "sequence")):
        others = tuple({"tensor", "sequence"} - {inner})
        assert CalibratedStageCosts(CLUSTER, MODEL, work).stage(0, size, inner, 1, 1) is not None
        assert CalibratedStageCosts(CLUSTER, MODEL, work, others).stage(0, size, inner, 1, 1) is None
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
    assert pipelines_in_file(read_section({"schedule": plan}), 2) is None
    pipelines = pipelines_in_file(read_section({"schedule": plan, "parallel": "full"}), 2)
    assert isinstance(pipelines, Plan) and pipelines.pipelines[0].stages[0].layers == (0, 6)
    assert pipelines_text(pipelines).splitlines() == [
        "2 ranks in 1 pipeline",
        "  4 x 1 samples: ranks 0, 1 (sequence) layers 0-5",
    ]


def test_what_a_model_cannot_run_is_left_out():
    job = JobFacts(
        section=read_section({}), model=ModelFacts(name="m", num_heads=4, num_kv_heads=4), training=TrainingFacts()
    )
    assert PipelineFacts(job=job, no_inners={"tensor": "adapters"}).inners == ("sequence",)


def test_layers_of_plans_that_are_searched_for_can_move_where_that_is_asked_for():
    facts = ModelFacts(name="m", num_heads=4, num_kv_heads=4)
    section = read_section({"parallel": "full", "replan": {"enabled": True}})
    moving = PipelineFacts(job=JobFacts(section=section, model=facts, training=TrainingFacts()), no_inners={})
    assert moving.inners == ("sequence",)
    assert "shards of tensor parallelism stay" in moving.left_out["tensor"]
