"""A plan is a value: it says what every rank does, reads every file format, and refuses what cannot be."""

from __future__ import annotations

import copy
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import ds_hetero
from ds_hetero.decision.resolve import given_plan
from ds_hetero.errors import PlanError, ScheduleError
from ds_hetero.models import load_model
from ds_hetero.values.baselines import ring
from ds_hetero.values.plans import BatchSplit, Pipeline, Plan, PlannedModel, Stage, read_plan
from ds_hetero.values.section import read_section

MODEL = {"num_layers": 40, "num_heads": 40, "num_kv_heads": 8}
FILE: dict[str, Any] = {
    "version": 2,
    "model": MODEL,
    "seq_len": 4096,
    "pipelines": [
        {
            "micro_batch_size": 1,
            "micro_batches": 14,
            "stages": [
                {"ranks": [0, 1], "layers": [0, 30], "inner": "tensor", "in_flight": 3},
                {"ranks": [4], "layers": [30, 40]},
            ],
        },
        {
            "micro_batch_size": 2,
            "micro_batches": 5,
            "stages": [
                {
                    "ranks": [2, 3],
                    "layers": [0, 40],
                    "inner": "sequence",
                    "schedule": ring(2, 40, 8).shifted(2).to_dict(),
                },
            ],
        },
    ],
    "zero": {"stage": 1, "owner_weights": {"0": 4.0, "4": 1.0}},
    "predicted": {"step_s": 20.9},
}


def changed(path: str, value: Any) -> dict[str, Any]:
    """Return the file with one value replaced, or removed where it is None."""
    data = copy.deepcopy(FILE)
    *parents, last = [int(key) if key.isdecimal() else key for key in path.split(".")]
    place: Any = data
    for key in parents:
        place = place[key]
    if value is None:
        del place[last]
    else:
        place[last] = value
    return data


def test_a_plan_file_says_what_every_rank_does() -> None:
    plan = read_plan(FILE)
    assert plan.ranks == (0, 1, 2, 3, 4)
    assert [plan.place_of(rank) for rank in range(6)] == [(0, 0), (0, 0), (1, 0), (1, 0), (0, 1), None]
    assert plan.model == PlannedModel(**MODEL)
    assert plan.pipelines[0].ranks == (0, 1, 4)
    assert [plan.pipelines[0].in_flight(stage) for stage in (0, 1)] == [3, 1]
    assert plan.pipelines[0].stages[0].num_layers == 30
    assert plan.batch_split == BatchSplit(micro_batch_sizes=(1, 2), micro_batches=(14, 5))
    assert plan.batch_split is not None and plan.batch_split.samples == 24


def test_reading_what_was_written_gives_the_same_plan() -> None:
    plan = read_plan(FILE)
    assert plan.to_dict() == FILE
    assert read_plan(plan.to_dict()) == plan
    assert read_plan(plan.to_dict()).fingerprint == plan.fingerprint


def test_a_prediction_is_no_part_of_a_plan_s_identity() -> None:
    plan, other = read_plan(FILE), read_plan(changed("predicted", None))
    assert plan == other and hash(plan) == hash(other) and plan.fingerprint == other.fingerprint
    assert read_plan(changed("seq_len", 8192)).fingerprint != plan.fingerprint


@given(st.integers(1, 4), st.integers(1, 3), st.booleans())
def test_files_of_version_1_are_plans_of_one_stage_pipelines(sp_size: int, replicas: int, batches: bool) -> None:
    schedules = tuple(ring(sp_size, 4, 2).shifted(sp_size * i) for i in range(replicas))
    assert read_plan(schedules[0].to_dict(), sp_size * replicas).schedules == schedules
    own = {"micro_batch_size": 2, "micro_batches": 3} if batches else {}
    data = {"version": 1, "replicas": [{"schedule": schedule.to_dict(), **own} for schedule in schedules]}
    plan = read_plan(data)
    assert plan.is_replicas and plan.schedules == schedules
    assert (plan.batch_split is not None) == batches
    assert plan.to_replicas_dict() == data
    assert read_plan(plan.to_dict()) == plan
    slower = tuple(ring(sp_size, 4, 2).shifted(sp_size * i) for i in range(replicas))
    assert plan.with_schedules(slower) == plan


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        ("version", 3, "version 3 is unknown"),
        ("seq_len", 0, "seq_len must be a whole number"),
        ("pipelines", [], "pipelines is empty"),
        ("pipelines", {}, "pipelines must be a list"),
        ("model.num_kv_heads", 7, "not a multiple"),
        ("model", None, "must have model.num_layers"),
        ("pipelines.0.stages", [], r"pipelines\[0\].stages is empty"),
        ("pipelines.0.stages.0.layers", [0, 29], "cover"),
        ("pipelines.0.stages.1.layers", [30, 39], r"cover .0, 40. once|cover \[0, 40\) once"),
        ("pipelines.0.stages.1.layers", [30, 30], "at least one layer"),
        ("pipelines.0.stages.1.layers", [30], r"must be \[from, to\)"),
        ("pipelines.0.stages.1.ranks", [1], r"ranks \[1\] are in more than one stage"),
        ("pipelines.0.stages.1.ranks", [4, 4], "each once"),
        ("pipelines.0.stages.1.ranks", [4, 5], 'but "inner" is "one"'),
        ("pipelines.0.stages.0.inner", "data", "'data' is unknown"),
        ("pipelines.0.stages.0.inner", "sequence", "has a schedule"),
        ("pipelines.0.stages.0.ranks", [0, 1, 5], "splits 40 heads over 3 ranks"),
        ("pipelines.0.stages.0.in_flight", 0, "in_flight must be"),
        ("pipelines.0.micro_batches", 0, "micro_batches must be"),
        ("pipelines.0.micro_batches", None, "for every pipeline, or for none"),
        ("pipelines.1.stages.0.ranks", [2, 5], "schedule has ranks"),
        ("pipelines.1.stages.0.schedule", ring(2, 8, 8).shifted(2).to_dict(), "for 8 heads and 8 KV heads"),
        ("pipelines.1.stages.0.schedule", {"version": 1}, r"stages\[0\].schedule: schedule: unknown keys"),
        ("pipelines.1.stages.0.colour", "red", "unknown keys"),
        ("zero.stage", 3, "does not work with pipelines of several stages"),
        ("zero.stage", True, "must be 0, 1, 2 or 3"),
        ("zero.owner_weights", {"9": 1.0}, "rank 9"),
        ("zero.owner_weights", {"0": float("nan")}, "finite weights"),
        ("zero.owner_weights", {"0": 0}, "all zero"),
        ("predicted", [1], "predicted must be an object"),
    ],
)
def test_what_no_job_can_do_is_refused_by_name(path: str, value: Any, message: str) -> None:
    with pytest.raises(PlanError, match=message):
        read_plan(changed(path, value))


def grouped(size: Any = 2, inner: str = "sequence", **changes: Any) -> dict[str, Any]:
    """A plan whose only stage has tensor groups, of 40 heads and 8 KV heads."""
    group = {"ranks": [0, 2, 4], "tokens": [3, 1, 1], "heads": [20, 12, 8], **changes}
    schedule = {"version": 1, "num_heads": 40, "num_kv_heads": 8, "layout": "zigzag", "ring": [0], "groups": [group]}
    stage = {"ranks": list(range(6)), "inner": inner, "schedule": schedule, "tensor_size": size}
    return {"version": 2, "model": MODEL, "pipelines": [{"stages": [stage]}]}


def test_ranks_of_a_tensor_group_hold_the_same_tokens_and_each_a_part_of_the_heads() -> None:
    plan = read_plan(grouped())
    assert plan.to_dict() == grouped()
    assert not plan.is_replicas
    (stage,) = plan.pipelines[0].stages
    assert stage.is_tensor_parallel
    assert stage.token_holders == ((0, 1), (2, 3), (4, 5))
    assert stage.holders_with(3) == (2, 3)
    column = stage.schedule_of(3)
    assert column is not None and (column.num_heads, column.num_kv_heads) == (20, 4)
    assert column.ranks == (1, 3, 5) and column == stage.schedule_of(1) != stage.schedule_of(2)
    assert column.groups[0].heads == (10, 6, 4)
    assert stage.schedule is not None
    assert list(column.tokens(11).values()) == list(stage.schedule.tokens(11).values())


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (grouped(3), "ranks 3 apart, the first of each tensor group"),
        (grouped(0), "tensor_size must be a whole number"),
        (grouped("2"), "tensor_size must be a whole number"),
        (grouped([2, 1]), r"tensor_size is \[2, 1\], but all tensor groups of a stage have one size"),
        (grouped(heads=[21, 11, 8]), "21 heads of rank 0 cannot be shared by the 2 ranks"),
        (grouped(16, ranks=[0, 16, 32]), "40 heads cannot be shared by the 16 ranks"),
        (grouped(20, ranks=[0, 20, 40], heads=[40, 0, 0]), "8 KV heads cannot be shared by the 20 ranks"),
        (grouped(ranks=[0, 2, 6]), "ranks 2 apart"),
        (grouped(ranks=[1, 3, 5]), "schedule has ranks"),
        (grouped(6, ranks=[0], tokens=[1], heads=[40]), "is one tensor group, which shares no sequence"),
        (changed("pipelines.0.stages.0.tensor_size", 2), "tensor groups share sequences"),
    ],
)
def test_tensor_groups_that_cannot_share_heads_are_refused_by_name(data: dict[str, Any], message: str) -> None:
    with pytest.raises(PlanError, match=message):
        read_plan(data)


def test_replicas_that_share_a_rank_are_refused() -> None:
    twice = {"version": 1, "replicas": [{"schedule": ring(2, 4, 2).to_dict()}] * 2}
    with pytest.raises(ScheduleError, match="in one replica only"):
        read_plan(twice)
    with pytest.raises(ScheduleError, match="replicas is empty"):
        read_plan({"version": 1, "replicas": []})


def test_only_plans_of_replicas_have_one_schedule_per_pipeline() -> None:
    with pytest.raises(PlanError, match="several stages"):
        _ = read_plan(FILE).schedules
    one = Plan(pipelines=(Pipeline(stages=(Stage(ranks=(0,)),)),))
    assert not one.is_replicas


def test_the_planner_returns_a_plan_that_a_job_runs():
    cluster = ds_hetero.load_cluster("lab")
    planned = ds_hetero.plan(cluster, load_model("llama-3.2-1b"), 4096)
    assert isinstance(planned.plan, ds_hetero.Plan)
    assert planned.plan.schedules == (planned.schedule,)
    content = json.loads(json.dumps(planned.plan.to_dict()))
    assert given_plan(read_section({"schedule": content}), cluster.num_ranks) == planned.plan
