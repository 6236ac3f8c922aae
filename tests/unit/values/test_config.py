"""The "heterogeneity" section: what is accepted, what each mistake is told, and which schedules it stands for."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ds_hetero.cluster import cluster_from_dict, load_cluster
from ds_hetero.cost import Workload
from ds_hetero.decision.decide import decide
from ds_hetero.decision.facts import JobFacts, ModelFacts, TrainingFacts
from ds_hetero.decision.forecast import forecast
from ds_hetero.decision.resolve import given_plan, is_of_pipelines, needs_measuring, needs_planner, resolve, sp_size_of
from ds_hetero.decision.searcher import Searcher
from ds_hetero.decision.start_text import forecast_text
from ds_hetero.engine.ds_config import section_of
from ds_hetero.errors import ClusterError, ConfigError, HeteroError, PlanError, ScheduleError
from ds_hetero.models.shapes import ModelSpec
from ds_hetero.planner import plan
from ds_hetero.values.baselines import ring, ulysses
from ds_hetero.values.section import read_section

INLINE = {
    "version": 1,
    "num_heads": 8,
    "num_kv_heads": 4,
    "groups": [{"ranks": [0, 1], "tokens": [3, 1], "heads": [6, 2]}],
}
LINK = {"bandwidth_gb_per_s": 10, "latency_us": 10}
CLUSTER = {
    "nodes": [
        {"name": "a", "device": "fast", "count": 1, "link": LINK},
        {"name": "b", "device": "slow", "count": 1, "link": LINK},
    ],
    "network": LINK,
    "devices": {
        "fast": {"peak_tflops": 300, "memory_gib": 80, "memory_bandwidth_gb_per_s": 2000},
        "slow": {"peak_tflops": 100, "memory_gib": 40, "memory_bandwidth_gb_per_s": 1000},
    },
}


def read(**section: Any) -> Any:
    return read_section(section)


def cluster_of(section: dict[str, Any]) -> Any:
    return load_cluster(section["cluster"]) if "cluster" in section else None


def schedules(section: dict[str, Any], world_size: int = 2, **sizes: int | None) -> Any:
    plan = resolve(
        read(**section),
        heads=(8, 4),
        world_size=world_size,
        sp_sizes=sizes,
        cluster=cluster_of(section),
        plan=given_plan(read(**section), world_size),
    )
    return plan.schedules


# --- reading ----------------------------------------------------------------------------------------


def test_no_section_or_a_disabled_one_is_none() -> None:
    assert section_of({"train_batch_size": 8}) is None
    assert section_of({"train_batch_size": 8, "heterogeneity": {"schedule": "ring"}}) == read(schedule="ring")
    assert read(enabled=False, schedule="ring") is None


def test_defaults_are_those_of_the_manual() -> None:
    section = read()
    assert (section.cluster, section.schedule, section.zero_partition) == ("measure", "plan", "uniform")
    assert section.layout is section.attention is None
    assert (section.replan.enabled, section.replan.interval_steps, section.replan.min_gain) == (False, 5, 0.05)


@pytest.mark.parametrize(
    ("section", "says"),
    [
        (
            {"schdule": "ring"},
            r'"heterogeneity.schdule" is unknown \(did you mean "schedule"\?\). The keys are enabled,',
        ),
        ({"enabled": "yes"}, r'"heterogeneity.enabled": "yes". It takes true or false.'),
        ({"layout": "zig"}, r'"heterogeneity.layout": "zig". It takes "contiguous" or "zigzag".'),
        (
            {"attention": "sdpa"},
            r'"heterogeneity.attention": "sdpa". It takes one of "flash_attn", "torch", "triton", "cudnn";',
        ),
        ({"attention": ["torch", "sdpa"]}, r'"heterogeneity.attention": \["torch", "sdpa"\]. It takes one of'),
        ({"schedule": 3}, r'"heterogeneity.schedule": 3. It takes the path of a schedule file'),
        ({"cluster": ["a"]}, r'"heterogeneity.cluster": \["a"\]. It takes "measure", the path of a cluster file'),
        ({"seq_len": 0}, r'"heterogeneity.seq_len": 0. It takes a whole number >= 1, the tokens of a sequence'),
        ({"ring_gradients": "fp16"}, r'"heterogeneity.ring_gradients": "fp16". It takes "fp32", or "bf16" \(half the'),
        (
            {"ring_gradients": "bf16", "schedule": "ulysses"},
            r'"ring_gradients" is "bf16", .*"schedule": "ulysses" makes one group of all ranks',
        ),
        ({"token_unit": 0}, r'"heterogeneity.token_unit": 0. It takes a whole number >= 1'),
        (
            {"token_unit": 128, "schedule": "ring"},
            r'"token_unit" is 128, of which a schedule that the job searches .* "schedule" is "ring"',
        ),
        ({"token_unit": 128, "planner": "hexiseq"}, r'"planner" is "hexiseq", whose tokens are others'),
        ({"token_unit": 128, "parallel": "best", "seq_len": 256}, r'"parallel" is "best", whose tokens are others'),
        ({"token_unit": 128, "placement": "documents"}, r'"placement" is "documents", whose tokens are others'),
        ({"ring_gradients": "bf16", "batch": [2, 1]}, r'"ring_gradients" says how sequences or layers are split'),
        ({"zero_partition": [1, -1]}, r'"heterogeneity.zero_partition": \[1, -1\] must hold one finite weight >= 0'),
        ({"zero_partition": [0, 0]}, r"and not only zeros"),
        (
            {"replan": {"enabled": True, "report_only": True}},
            r'"heterogeneity.replan": .*cannot be enabled and report_only',
        ),
        ({"report": ""}, r'"heterogeneity.report": "". It takes the path of a folder'),
        ({"replan": {"enabled": 1}}, r'"heterogeneity.replan.enabled": 1. It takes true or false'),
        (
            {"replan": {"intervall_steps": 1}},
            r'"heterogeneity.replan.intervall_steps" is unknown \(did you mean "interval',
        ),
        ({"replan": {"min_gain": 2}}, r'"heterogeneity.replan.min_gain": 2. It takes a share'),
        ({"cluster": "auto"}, r'"heterogeneity.cluster" is "auto", which accelerate refuses'),
        ({"cluster": {"nodes": [{"device": "auto"}]}}, r'"heterogeneity.cluster.nodes\[0\].device" is "auto"'),
    ],
)
def test_a_mistake_is_named_with_what_would_be_accepted(section: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        read(**section)


def test_all_mistakes_are_named_in_one_message() -> None:
    with pytest.raises(ConfigError) as caught:
        read(layout="zig", enabled=1, nodes=2)
    assert [line.split('"')[1] for line in str(caught.value).splitlines()] == [
        "heterogeneity.enabled",
        "heterogeneity.layout",
        "heterogeneity.nodes",
    ]


def test_a_section_that_is_no_object_is_refused() -> None:
    with pytest.raises(ConfigError, match='"heterogeneity" must be an object with keys enabled, cluster'):
        read_section(True)


# --- sizes ------------------------------------------------------------------------------------------


def test_sources_of_the_size_must_agree() -> None:
    assert sp_size_of({}) is None
    assert sp_size_of({"a": None, "b": 4, "c": 4}) == 4
    with pytest.raises(ConfigError, match="sequence-parallel size is given twice: a=2, b=4"):
        sp_size_of({"a": 2, "b": 4})
    with pytest.raises(ConfigError, match="a is 0; it must be a whole number >= 1"):
        sp_size_of({"a": 0})


def test_a_strategy_spans_the_given_size_or_else_the_world() -> None:
    assert schedules({"schedule": "ulysses"}, 4) == (ulysses(4, 8, 4),)
    assert schedules({"schedule": "ring"}, 4, sp_size=2) == (ring(2, 8, 4), ring(2, 8, 4).shifted(2))
    with pytest.raises(ConfigError, match="4 processes cannot be divided into replicas of 3"):
        schedules({"schedule": "ring"}, 4, sp_size=3)


# --- schedules --------------------------------------------------------------------------------------


def test_a_file_and_the_same_inline_are_one_schedule(tmp_path: Path) -> None:
    path = tmp_path / "schedule.json"
    path.write_text(json.dumps(INLINE))
    (inline,) = schedules({"schedule": INLINE})
    assert schedules({"schedule": str(path)}) == (inline,)
    assert inline.tokens(8) == {0: 6, 1: 2}
    assert [s.ranks for s in schedules({"schedule": INLINE}, 4)] == [(0, 1), (2, 3)]


def test_layout_overrides_the_file() -> None:
    assert [schedules({"schedule": INLINE, "layout": layout})[0].layout for layout in ("zigzag", "contiguous")] == [
        "zigzag",
        "contiguous",
    ]


def test_replicas_of_different_sizes_come_from_a_file() -> None:
    alone = {**INLINE, "groups": [{"ranks": [2], "tokens": [1], "heads": [8]}]}
    batches = [{"micro_batch_size": 2, "micro_batches": 3}, {"micro_batch_size": 1, "micro_batches": 2}]
    listed = [{"schedule": schedule, **batch} for schedule, batch in zip([INLINE, alone], batches, strict=True)]
    both = {"version": 1, "replicas": listed}
    assert [s.sp_size for s in schedules({"schedule": both}, 3)] == [2, 1]
    assert [s.sp_size for s in schedules({"schedule": both}, 3, sp_size=3)] == [2, 1]  # one worker on all ranks
    with pytest.raises(ConfigError, match=r"has replicas of \[2, 1\] ranks, but sp_size is 2. Set it to 3, all ranks"):
        schedules({"schedule": both}, 3, sp_size=2)
    plan = given_plan(read(schedule=both), 3)
    assert plan is not None and str(plan.batch_split) == "2 x 3 + 1 x 2 = 8 samples"
    alike = given_plan(read(schedule=INLINE), 2)
    assert alike is not None and alike.batch_split is given_plan(read(schedule="ring"), 2) is None


def plan_of_version_2(*stages: dict[str, Any]) -> dict[str, Any]:
    model = {"num_layers": 4, "num_heads": 8, "num_kv_heads": 4}
    return {"version": 2, "model": model, "pipelines": [{"stages": list(stages)}]}


def test_a_plan_of_replicas_is_a_schedule_too(tmp_path: Path) -> None:
    stage = {"ranks": [0, 1], "layers": [0, 4], "inner": "sequence", "schedule": INLINE}
    path = tmp_path / "plan.json"
    path.write_text(json.dumps(plan_of_version_2(stage)))
    assert schedules({"schedule": str(path)}) == schedules({"schedule": INLINE})
    with pytest.raises(ScheduleError, match=r"hold ranks \[\[0, 1\]\], the job has 4 processes"):
        schedules({"schedule": str(path)}, 4)
    with pytest.raises(PlanError, match=r"inline schedule: pipelines\[0\]: the stages hold layers \[\[0, 3\]\]"):
        schedules({"schedule": plan_of_version_2({**stage, "layers": [0, 3]})})


TWO_STAGES = [{"ranks": [0], "layers": [0, 3]}, {"ranks": [1], "layers": [3, 4]}]


def test_a_plan_of_pipelines_is_read() -> None:
    plan = plan_of_version_2(*TWO_STAGES)
    plan["pipelines"][0] |= {"micro_batch_size": 1, "micro_batches": 4}
    section = read(schedule=plan)
    found = given_plan(section, 2)
    assert found is not None and found.ranks == (0, 1) and is_of_pipelines(found, section)
    replicas, strategy = read(schedule=INLINE), read(schedule="ring")
    assert not is_of_pipelines(given_plan(replicas, 2), replicas)
    assert given_plan(strategy, 2) is None and not is_of_pipelines(None, strategy)


def test_a_plan_of_pipelines_that_cannot_run_is_refused_by_name() -> None:
    with pytest.raises(PlanError, match="needs micro_batch_size, micro_batches and the layers of every stage"):
        given_plan(read(schedule=plan_of_version_2(*TWO_STAGES)), 2)
    with pytest.raises(PlanError, match="the plan has ranks up to 1, the job has 1 processes"):
        given_plan(read(schedule=plan_of_version_2(*TWO_STAGES)), 1)


def test_zero_of_a_plan_is_refused_by_name() -> None:
    stage = {"ranks": [0, 1], "layers": [0, 4], "inner": "sequence", "schedule": INLINE}
    with pytest.raises(PlanError, match='"zero" of a plan is not used yet'):
        schedules({"schedule": {**plan_of_version_2(stage), "zero": {"stage": 1}}})


def test_proportional_follows_the_devices() -> None:
    section = {"schedule": "proportional", "cluster": CLUSTER}
    assert schedules(section)[0].tokens(40) == {0: 30, 1: 10}
    assert [s.tokens(40) for s in schedules(section, 4, sp_size=2)] == [{0: 30, 1: 10}, {2: 30, 3: 10}]
    with pytest.raises(ConfigError, match="describes 2 devices, the job has 3 processes in replicas of 3"):
        schedules(section, 3)


def test_measured_speeds_take_the_place_of_measure() -> None:
    section = read(schedule="proportional")
    assert needs_measuring(section) and not needs_measuring(read(schedule="ring"))
    (schedule,) = resolve(section, heads=(8, 4), world_size=2, sp_sizes={}, cluster=load_cluster(CLUSTER)).schedules
    assert schedule.tokens(40) == {0: 30, 1: 10}


# --- schedules that are searched for -----------------------------------------------------------------

MODEL = ModelSpec(
    name="small",
    num_layers=4,
    hidden_size=512,
    num_heads=8,
    num_kv_heads=4,
    head_dim=64,
    mlp_size=2048,
    vocab_size=1000,
)
MODEL_FACTS = ModelFacts(name="small", num_heads=8, num_kv_heads=4, spec=MODEL, max_seq_len=16384)
WORKLOAD = Workload(seq_len=16384, tiled_logits=False)
FOUR = {**CLUSTER, "nodes": [{**node, "count": 2} for node in CLUSTER["nodes"]]}


def searched(
    section: dict[str, Any], world_size: int = 2, *, workload: Workload = WORKLOAD, **sizes: int | None
) -> Any:
    searcher = Searcher(MODEL, workload, section.get("layout"))
    plan = resolve(
        read(**section),
        heads=(8, 4),
        world_size=world_size,
        sp_sizes=sizes,
        cluster=cluster_of(section),
        search=searcher,
    )
    return plan.schedules, searcher


def test_the_default_is_the_planners_schedule() -> None:
    (schedule,), searcher = searched({"cluster": CLUSTER})
    expected = plan(cluster_from_dict(CLUSTER), MODEL, WORKLOAD)
    assert schedule == expected.schedule
    assert searcher.planned[cluster_from_dict(CLUSTER)].prediction == expected.prediction
    (again,), _ = searched({"cluster": CLUSTER, "schedule": "plan"})
    assert again == schedule
    (contiguous,), _ = searched({"cluster": CLUSTER, "layout": "contiguous"})
    assert contiguous.layout == "contiguous"


@pytest.mark.parametrize("name", ["lut", "formula"])
def test_tables_and_formulas_follow_the_devices(name: str) -> None:
    (schedule,), _ = searched({"cluster": CLUSTER, "schedule": name})
    fast, slow = schedule.tokens(4000).values()
    assert 2.7 < fast / slow < 3.3  # peaks of 300 and 100


def test_every_replica_is_planned_on_its_own_devices() -> None:
    one = searched({"cluster": CLUSTER})[0]
    assert searched({"cluster": CLUSTER}, 4, sp_size=2)[0] == (one[0], one[0].shifted(2))
    section = {"cluster": FOUR, "schedule": "lut"}
    alike = searched(section, 4, sp_size=2)[0]
    assert [s.tokens(100) for s in alike] == [{0: 50, 1: 50}, {2: 50, 3: 50}]
    (whole,), _ = searched(section, 4)
    assert whole.tokens(100)[0] > 30
    with pytest.raises(ConfigError, match="describes 4 devices, the job has 6 processes in replicas of 3"):
        searched(section, 6, sp_size=3)


def test_the_cluster_of_the_job_is_known_if_all_ranks_are_described() -> None:
    facts = JobFacts(section=read(cluster=FOUR, schedule="ring"), model=MODEL_FACTS, training=TrainingFacts())
    sizes = {"sp_size": 2}
    (first, _) = decide(replace(facts, sp_sizes=sizes), 4, measured=None, on_host=False).forecasts
    assert first.cost.workload.zero_cluster == cluster_from_dict(FOUR)
    measured = replace(facts, section=read(schedule="ring"), sp_sizes=sizes)
    (first, _) = decide(measured, 4, measured=load_cluster(FOUR), on_host=False).forecasts
    assert first.cost.workload.zero_cluster == cluster_from_dict(FOUR)
    described = replace(facts, section=read(cluster=CLUSTER, schedule="ring"), sp_sizes=sizes)  # one replica
    (first, _) = decide(described, 4, measured=None, on_host=False).forecasts
    assert first.cost.workload.zero_cluster is None
    assert not decide(measured, 4, measured=None, on_host=False).forecasts


def test_one_rank_needs_neither_devices_nor_a_search() -> None:
    assert schedules({}, 1) == (ulysses(1, 8, 4),)
    assert schedules({}, 2, sp_size=1) == (ulysses(1, 8, 4), ulysses(1, 8, 4).shifted(1))


@pytest.mark.parametrize(
    ("section", "measures", "searches"),
    [
        ({}, True, True),
        ({"schedule": "lut"}, True, True),
        ({"schedule": "proportional"}, True, False),
        ({"schedule": "ring"}, False, False),
        ({"schedule": INLINE}, False, False),
        ({"schedule": INLINE, "cluster": "measure"}, True, False),  # in so many words: for a prediction
        ({"cluster": CLUSTER}, False, True),
    ],
)
def test_only_what_is_not_given_is_measured_and_searched(
    section: dict[str, Any], measures: bool, searches: bool
) -> None:
    assert (needs_measuring(read(**section)), needs_planner(read(**section))) == (measures, searches)


def test_what_fits_nowhere_names_the_key_to_change() -> None:
    small = {name: {**device, "memory_gib": 0.01} for name, device in CLUSTER["devices"].items()}
    with pytest.raises(
        PlanError, match=r'(?s)GiB too much.*planned for sequences of 16384 tokens; set "heterogeneity.s'
    ):
        searched({"cluster": {**CLUSTER, "devices": small}})


def test_a_forecast_lists_equal_replicas_once() -> None:
    (schedule,), searcher = searched({"cluster": CLUSTER})
    cluster = cluster_from_dict(CLUSTER)
    found = [forecast(s, cluster, MODEL, WORKLOAD, searcher.planned[cluster]) for s in (schedule, schedule.shifted(2))]
    assert found[0].prediction == found[1].prediction == searcher.planned[cluster].prediction
    text = forecast_text(found)
    assert text.count("replica 0, 1:") == text.count("predicted:") == text.count("bottleneck:") == 1
    assert f"{found[0].prediction.tokens_per_s:,.0f} tokens/s" in text and "fast" in text
    shorter = found[1].iteration_s(schedule.shifted(2), 8192, 1, 1)
    assert shorter < found[1].iteration_s(schedule.shifted(2), 16384, 1, 1) == found[0].prediction.iteration_s


@pytest.mark.parametrize(
    ("section", "kind", "says"),
    [
        (
            {"schedule": "ulyses"},
            ConfigError,
            r'"ulyses" is neither a file nor a strategy \(did you mean "ulysses"\?\). It takes the path',
        ),
        (
            {"schedule": {**INLINE, "num_heads": 12}},
            ScheduleError,
            r"inline schedule: groups\[0\].heads \[6, 2\] sum to 8",
        ),
        ({"schedule": {"version": 1}}, ScheduleError, "missing keys"),
        ({"schedule": "proportional"}, ConfigError, "nothing was measured here"),
        ({}, ConfigError, '"plan" takes the devices from "cluster": "measure", but nothing was measured here'),
        ({"schedule": "proportional", "cluster": "nowhere.yaml"}, ClusterError, "nowhere.yaml"),
    ],
)
def test_a_schedule_that_cannot_be_is_refused(section: dict[str, Any], kind: type[HeteroError], says: str) -> None:
    with pytest.raises(kind, match=says):
        schedules(section)


def test_a_schedule_for_another_model_or_world_is_refused() -> None:
    other = {**INLINE, "num_kv_heads": 8}
    with pytest.raises(ScheduleError, match=re.escape("is for num_heads=8, num_kv_heads=8; the model has 8 and 4")):
        schedules({"schedule": other})
    with pytest.raises(ScheduleError, match="the schedule has 2 ranks, the job has 3"):
        schedules({"schedule": INLINE}, 3)
    with pytest.raises(ConfigError, match=r"has replicas of \[2, 2\] ranks, but sp_size is 4"):
        schedules({"schedule": INLINE}, 4, sp_size=4)


def test_reading_a_section_needs_no_torch() -> None:
    code = "import sys, ds_hetero.values.section, ds_hetero.decision.decide; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
