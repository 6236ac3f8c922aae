"""Advice of a plan's page: what the search over jobs finds, who was left out, and what idle ranks hold."""

from __future__ import annotations

import html
import json
from pathlib import Path
from typing import Any

import pytest

from ds_hetero.common.text import bytes_text, time_text
from ds_hetero.errors import PlanError
from ds_hetero.planner.jobs.titles import job_title
from ds_hetero.planner.results.sentences import idle_ranks
from ds_hetero.reporting.advice import advice_lines, find_faster_jobs, idle_line
from ds_hetero.reporting.plan_page import plan_page
from ds_hetero.reporting.scenario import read_scenario
from ds_hetero.reporting.timelines import MAX_STEP_BARS, predicted_block, predicted_step
from tests.reported import command, described, plan_file

SLOW_NETWORK = ("--gpus", "4x4090 | 2x3090", "--network", "10GbE")
JOB = ("--model", "llama-3.1-8b", "--seq-len", "32K", "--train", "lora")


def _plan(capsys: Any, out: Path, *options: object) -> Path:
    code, _, err = command(capsys, "plan", *SLOW_NETWORK, *JOB, *options, "--out", out)
    assert code == 0, err
    return out


def test_a_plan_on_too_many_ranks_is_advised_to_leave_some_out(capsys: Any, tmp_path: Path) -> None:
    path = _plan(capsys, tmp_path / "plan.json", "--parallel", "sequence", "--zero-stage", 3)
    plan = described(path)
    found = find_faster_jobs(plan)
    now_s = plan.cost_of(0).predict(plan.schedule_of(0)).iteration_s
    assert found is not None and found.best.step_s < 0.5 * now_s
    (line,) = advice_lines(found, now_s, plan.scenario)
    assert job_title(found.best) in line
    assert f"{time_text(found.best.step_s)} a step, {1 - found.best.step_s / now_s:.0%} less" in line
    page = html.unescape(plan_page(plan, sliders=False))
    assert line in page and "Other kinds of jobs" in page
    assert "sequence parallelism over 4 of 6 GPUs, without ranks 4-5 (2 RTX-3090)" in page
    assert found.refused and all(refused.reason in page for refused in found.refused)


def test_the_page_of_the_best_job_says_who_was_left_out_and_to_keep_it(capsys: Any, tmp_path: Path) -> None:
    plan = described(_plan(capsys, tmp_path / "plan.json", "--parallel", "sequence"))
    assert plan.scenario.left_out == (("RTX-3090", (4, 5)),)
    page = html.unescape(plan_page(plan, sliders=False))
    assert "Left out: ranks 4-5 (2 RTX-3090) of the whole rig." in page
    assert "Advice: keep this plan." in page


@pytest.mark.parametrize("wrong", [3, {"RTX-3090": 4}, {"RTX-3090": [-1]}, [[4, 5]]])
def test_wrong_left_out_ranks_are_refused_by_their_key(wrong: Any, capsys: Any, tmp_path: Path) -> None:
    content = json.loads(plan_file(capsys, tmp_path).read_text())["scenario"]
    with pytest.raises(PlanError, match=r"scenario\.left_out must have lists of ranks by device"):
        read_scenario({**content, "left_out": wrong})


def test_idle_ranks_say_what_they_hold(capsys: Any, tmp_path: Path) -> None:
    path = plan_file(capsys, tmp_path)
    content = json.loads(path.read_text())
    whole = content["num_heads"]
    content["ring"] = [0, 1]
    content["groups"] = [
        {"ranks": [0, 1], "tokens": [1, 1], "heads": [whole // 2, whole // 2]},
        {"ranks": [2, 3], "tokens": [1, 0], "heads": [whole, 0]},
    ]
    path.write_text(json.dumps(content))
    plan = described(path)
    cost, schedule = plan.cost_of(0), plan.schedule_of(0)
    assert idle_ranks(schedule) == (3,)
    memory = cost.predict(schedule).memory_bytes
    line = idle_line((3,), memory, [device.name for device in cost.cluster.devices])
    assert line == (
        f"Idle: ranks 3 (1 RTX-3090) compute nothing in this plan; each holds up to {bytes_text(memory[3])} GiB of "
        "model states."
    )
    assert line in plan_page(plan, sliders=False)
    assert idle_line((0,), [0], ["L40S"]).endswith("they hold nothing.")


@pytest.mark.parametrize("micro_batches", [1, 40])
def test_a_step_waits_in_every_layer_as_its_block_does(micro_batches: int, capsys: Any, tmp_path: Path) -> None:
    path = plan_file(
        capsys, tmp_path, "--micro-batches", micro_batches, "--token-unit", 4096
    )  # so ranks are unbalanced
    plan = described(path)
    cost, schedule = plan.cost_of(0), plan.schedule_of(0)
    prediction = cost.predict(schedule)
    blocks, steps = predicted_block(cost, schedule, prediction), predicted_step(cost, schedule, prediction)
    num_blocks = cost.model.num_layers * micro_batches
    num_waiting = 0
    for block, step in zip(blocks, steps, strict=True):
        assert [bar[2] for bar in step[:-1]] == [bar[1] for bar in step[1:]]  # no gap and no overlap
        assert step[0][1] == 0 and step[-1][2] == pytest.approx(prediction.iteration_s)
        waits_s = [stop - start for kind, start, stop in block if kind == "wait"]
        drawn_s = [stop - start for kind, start, stop in step if kind == "wait"]
        assert sum(drawn_s) == pytest.approx(num_blocks * sum(waits_s), rel=1e-6, abs=1e-9)
        num_waiting += bool(waits_s)
        if micro_batches == 1 and waits_s:
            assert len(drawn_s) >= cost.model.num_layers
    assert num_waiting > 0
    assert sum(map(len, steps)) <= 2 * MAX_STEP_BARS
