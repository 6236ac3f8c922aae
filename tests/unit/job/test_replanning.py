"""A resumed job goes on with the changed plan of its checkpoint, if that is for its ranks and its model."""

from __future__ import annotations

from typing import Any

import pytest

from ds_hetero.decision.decide import JobStart
from ds_hetero.decision.facts import JobFacts, ModelFacts, TrainingFacts
from ds_hetero.job.replanning import Replanning, ScheduleSearch
from ds_hetero.job.start import announce_start
from ds_hetero.values.plans import Plan
from ds_hetero.values.schedule import Group, Schedule
from ds_hetero.values.section import read_section


def _plan(*tokens: float, heads: int = 4) -> Plan:
    groups = tuple(Group(ranks=(rank,), tokens=(share,), heads=(heads,)) for rank, share in enumerate(tokens))
    return Plan.of_replicas([Schedule(num_heads=heads, num_kv_heads=2, groups=groups)])


def _replanning(plan: Plan, changed: list[Plan]) -> Replanning:
    return Replanning(plan, ScheduleSearch(_start(plan)), changed.append)


def _start(plan: Plan) -> JobStart:
    section = read_section({"replan": {"enabled": True}})
    assert section is not None
    model = ModelFacts(name="m", num_heads=4, num_kv_heads=2)
    return JobStart(facts=JobFacts(section=section, model=model, training=TrainingFacts()), plan=plan)


def test_a_changed_plan_is_gone_on_with(capsys: pytest.CaptureFixture[str]) -> None:
    changed: list[Plan] = []
    replanning, other = _replanning(_plan(1, 1), changed), _plan(3, 1)
    assert replanning.plan == _plan(1, 1)
    assert replanning.resume(other.to_dict())
    assert changed == [other] and replanning.plan == other
    assert "goes on with the changed plan" in capsys.readouterr().err
    assert not replanning.resume(other.to_dict())


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (_plan(3, 1, 1).to_dict(), "its replicas have the ranks [(0, 1, 2)]; those of this job have [(0, 1)]"),
        (
            _plan(3, 1, heads=2).to_dict(),
            "its model has num_heads=2, num_kv_heads=2; the model of this job has num_heads=4",
        ),
        ({"version": 7}, "version"),
    ],
)
def test_a_plan_for_another_job_is_left(content: Any, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    changed: list[Plan] = []
    replanning = _replanning(_plan(1, 1), changed)
    assert not replanning.resume(content)
    assert not changed and replanning.plan == _plan(1, 1)
    printed = capsys.readouterr().err
    assert "goes on with its own" in printed and said in printed


@pytest.mark.parametrize(("replicas", "is_said"), [([(0,), (1,)], True), ([(0, 1)], False)])
def test_replicas_of_one_rank_are_told_that_nothing_will_change(
    replicas: list[tuple[int, ...]], is_said: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    schedules = [
        Schedule(num_heads=4, num_kv_heads=2, groups=tuple(Group(ranks=(r,), tokens=(1,), heads=(4,)) for r in ranks))
        for ranks in replicas
    ]
    announce_start(_start(Plan.of_replicas(schedules)))
    assert ('"replan" changes nothing here' in capsys.readouterr().err) == is_said
