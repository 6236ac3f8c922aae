"""Values in ds_config.json, schedules, plans, workloads and caches that used to end in a traceback or were believed."""

from __future__ import annotations

import json
import logging
import os
from pathlib import Path

import pytest

from ds_hetero.cli import main
from ds_hetero.cli.installed.doctor import examine, model_facts
from ds_hetero.cluster import load_cluster
from ds_hetero.cost.workload import Workload
from ds_hetero.engine.ds_config import read_training_facts, section_of
from ds_hetero.errors import ConfigError, PlanError, ScheduleError
from ds_hetero.models import load_model
from ds_hetero.planner.micro_batches import plan_replicas
from ds_hetero.planner.pipelines.planning import check_global_batch
from ds_hetero.profiler import cache
from ds_hetero.values.plans import read_plan
from ds_hetero.values.section import read_section

SCHEDULE = {
    "version": 1,
    "num_heads": 4,
    "num_kv_heads": 4,
    "groups": [{"ranks": [0, 1], "tokens": [1, 1], "heads": [2, 2]}],
}


def problem(ds_config, tmp_path: Path, world_size: int = 2) -> str | None:
    """What doctor says against a configuration."""
    path = tmp_path / "ds_config.json"
    path.write_text(ds_config if isinstance(ds_config, str) else json.dumps(ds_config))
    model = model_facts(None, num_heads=4, num_kv_heads=4, seq_len=None, checkpointing=False)
    return examine(path, model, world_size)["section"]["problem"]


@pytest.mark.parametrize(
    ("ds_config", "message"),
    [
        ({"heterogeneity": {"schedule": {"version": 1, "replicas": []}}}, "replicas is empty"),
        (
            {
                "heterogeneity": {
                    "schedule": {
                        "version": 1,
                        "replicas": [
                            {"schedule": SCHEDULE | {"groups": [{"ranks": [rank], "tokens": [1], "heads": [4]}]}}
                            for rank in (7, 9)
                        ],
                    }
                }
            },
            "hold ranks [[7], [9]], the job has 2 processes",
        ),
        ({"zero_optimization": {"stage": 1}, "heterogeneity": {"zero_partition": [1, 2, 3]}}, "lists 3 weights"),
        ({"zero_optimization": {"stage": 3}, "heterogeneity": {"zero_partition": [0, 2]}}, "rank 0 a weight of 0"),
        ({"heterogeneity": {"zero_partition": [1, 2]}}, '"zero_partition" needs ZeRO, but'),
        ({"heterogenity": {}}, 'did you mean "heterogeneity"?'),
        ({"Heterogeneity": {}}, 'did you mean "heterogeneity"?'),
        ({"heterogeneity": {"cluster": "no-such-cluster"}}, "cannot read cluster 'no-such-cluster'"),
        ({"sequence_parallel_size": 4, "heterogeneity": {}}, "cannot be divided into replicas of 4"),
        ({"tensor_parallel": {"autotp_size": 2}, "heterogeneity": {}}, "parallelism of DeepSpeed cannot be used"),
        ("3", "is a JSON object, got 3"),
        ("[" * 100_000, "nested more than"),
        ('{"heterogeneity": {}, "heterogeneity": {"enabled": false}}', "given twice"),
    ],
)
def test_doctor_refuses_what_training_refuses(ds_config, message, tmp_path):
    assert message in (problem(ds_config, tmp_path) or "")


def test_a_world_of_billions_is_refused(tmp_path):
    assert "--world-size must be" in (problem({"heterogeneity": {}}, tmp_path, world_size=10**10) or "")


def test_settings_of_another_kind_count_as_not_given():
    training = read_training_facts({"bf16": 0, "zero_optimization": None, "optimizer": [], "data_types": 3})
    assert training.zero_stage == 0 and training.mixed_precision is None
    assert section_of({"zero_optimization": {}}) is None


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ({7: True}, "the key 7 must be text"),
        ({"replan": {"interval_steps": 10**18}}, "replan"),
        ({"seq_len": 2**62}, "seq_len"),
        ({"zero_partition": [float("nan"), 1]}, "zero_partition.0 is nan"),
        ({"zero_partition": [0, 0]}, "zero_partition"),
        ({"schedule": {"a": 10**400}}, "schedule.a"),
    ],
)
def test_a_section_is_bounded(section, message):
    with pytest.raises(ConfigError, match=message) as raised:
        read_section(section)
    assert len(str(raised.value)) < 600


def test_a_section_nested_three_thousand_deep_is_refused():
    nested: dict[str, object] = {}
    for _ in range(3_000):
        nested = {"a": nested}
    with pytest.raises(ConfigError, match="nested more than"):
        read_section({"schedule": nested})


@pytest.mark.parametrize("changes", [{"version": True}, {"num_heads": 10**30}, {"groups": "x" * 10**6}, {"ring": None}])
def test_a_schedule_is_bounded(changes):
    with pytest.raises(ScheduleError) as raised:
        read_plan(SCHEDULE | changes)
    assert next(iter(changes)) in str(raised.value) and len(str(raised.value)) < 600


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"seq_len": 2**63}, "seq_len must be a whole number <= 1,099,511,627,776"),
        ({"micro_batches": 10**400}, "micro_batches must be a whole number <= 1,048,576"),
        ({"micro_batch": 2**63 - 1}, "micro_batch must be"),
        ({"zero_stage": True}, "zero_stage must be 0, 1, 2 or 3, got True"),
        ({"zero_weights": (0, 0, 0, 0)}, "zero_weights must be"),
        ({"zero_weights": (float("nan"), 1)}, "zero_weights must be"),
        ({"zero_weights": (-1, 2)}, "zero_weights must be"),
    ],
)
def test_a_workload_is_bounded(changes, message):
    with pytest.raises(PlanError, match=message):
        Workload(**({"seq_len": 8} | changes))


def test_the_cache_folder_follows_the_specification(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    assert cache.cache_folder() == tmp_path / ".cache/ds_hetero"
    monkeypatch.setenv("XDG_CACHE_HOME", "/x")
    assert cache.cache_folder() == Path("/x/ds_hetero")

    def no_home() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr(Path, "home", no_home)
    assert cache.cache_folder() is None
    assert cache._profile_file(None, []) is None


@pytest.mark.parametrize(
    "text", ["[" * 100_000, "[]", '{"profile": 3}', "9" * 5_000, "{", '{"profile": {}, "profile": {}}', "null"]
)
def test_a_damaged_profile_is_ignored(text, tmp_path, caplog):
    path = tmp_path / "p.json"
    path.write_text(text)
    with caplog.at_level(logging.WARNING):
        assert cache.read_profile(path, []) is None
    assert "ignoring the damaged profile" in caplog.text and len(caplog.text) < 2_000


def test_a_failed_write_of_a_profile_leaves_no_file(tmp_path, monkeypatch, caplog):
    def full(source: object, target: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    cache._write(tmp_path / "p.json", {"a": 1})
    assert list(tmp_path.iterdir()) == [] and "cannot keep the profile" in caplog.text


def test_a_global_batch_of_billions_is_refused_at_once():
    with pytest.raises(PlanError, match="global_batch must be a whole number <= 1,048,576"):
        plan_replicas([load_cluster("lab")], load_model("gpt-3b"), Workload(seq_len=4096), 10**12)
    with pytest.raises(PlanError, match="global_batch must be a whole number <= 1,048,576"):
        check_global_batch(10**12, [1])


_JOB = ["--cluster", "hexiseq-setting-1", "--model", "gpt-7b", "--seq-len", "4096"]


@pytest.mark.parametrize(
    ("command", "option"),
    [
        (["plan", *_JOB], "--parallel"),
        (["plan", *_JOB], "--layout"),
        (["plan", *_JOB], "--cost-model"),
        (["plan", *_JOB], "--out"),
        (["plan", *_JOB, "--parallel", "full", "--global-batch", "4"], "--objective"),
        (["plan", *_JOB, "--parallel", "full", "--global-batch", "4"], "--cost-model"),
        (["show", *_JOB], "--out"),
        (["simulate", *_JOB], "--schedule"),
        (["profile", "--out", "x.yaml"], "--dtype"),
        (["profile"], "--out"),
    ],
)
def test_messages_show_long_values_of_options_in_short(command, option, capsys):
    assert main([*command, option, "x" * 5_000 + ".yaml"]) == 2
    message = capsys.readouterr().err
    assert "xxx" in message and len(message) < 600 and message.count("\n") == 1


@pytest.mark.parametrize(
    "arguments",
    [["plan", *_JOB, "--micro-batch", "x" * 5_000], ["plan", "--" + "x" * 5_000], ["--" + "x" * 5_000], ["x" * 5_000]],
)
def test_messages_of_the_command_line_reader_are_short(arguments, capsys):
    with pytest.raises(SystemExit, match="2"):
        main(arguments)
    message = capsys.readouterr().err
    assert "xxx" in message and len(message) < 600
