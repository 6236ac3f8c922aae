"""A job with "report" leaves run.json, however it ends; report_only names a slow rank and changes nothing.

Budget: 25 s.
"""

from __future__ import annotations

import json
import logging
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from ds_hetero.reporting.run_file import plan_digest, read_run
from ds_hetero.values.plans import read_plan
from tests.integration.job.test_replan import EVEN, LENGTH, TWO_CPUS, EmulatedDevice
from tests.integration.tiny import batches, ds_config, llama
from tests.support import run_deepspeed
from tests.work import lines_run

pytestmark = pytest.mark.alone  # it waits in real time for what other work on the cores would delay

STEPS = 14
PHASES = ("step_s", "attention_s", "model_s", "all_to_all_s", "ring_wait_s", "idle_s")


def _train(
    rank: int,
    config: dict[str, Any],
    steps: int,
    fails_at: int | None = None,
    speeds: tuple[float, float] | None = None,
) -> list[str]:
    """Train ``steps`` steps and return what rank 0 said, as log records."""
    import deepspeed

    import ds_hetero

    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("ds_hetero").addHandler(handler)
    logging.getLogger("ds_hetero").setLevel(logging.INFO)
    handle = ds_hetero.register()
    model = llama()
    if speeds is not None:
        EmulatedDevice(model, 0.05, rank).speed = speeds[rank]
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    try:
        for number, batch in enumerate(handle.dataloader(batches(steps, length=LENGTH), batches="same")):
            if number == fails_at:
                raise ArithmeticError("loss is not finite")
            loss = handle.loss(engine(**batch), batch)
            engine.backward(loss)
            engine.step()
    except ArithmeticError:
        handle.undo()
        return said
    engine.destroy()
    assert not handle.schedule_changes
    return said


def _config(folder: Path | None, **section: Any) -> dict[str, Any]:
    config = ds_config(2, EVEN)
    config["heterogeneity"] |= {"cluster": TWO_CPUS, "seq_len": LENGTH, **section}
    if folder is not None:
        config["heterogeneity"]["report"] = str(folder)
    return config


def test_a_job_writes_what_it_measured(tmp_path):
    folder = tmp_path / "new" / "folder"
    said, _ = run_deepspeed(_train, 2, _config(folder), STEPS)
    assert any(f"the measurements are in {folder}" in line for line in said)
    assert [path.name for path in folder.iterdir()] == ["run.json"]  # nothing half-written is left
    run = read_run(folder / "run.json")
    assert run.ended == "normally" and {"torch", "deepspeed", "ds-hetero", "python"} <= set(run.versions)
    assert run.plan == read_plan(EVEN)
    assert json.loads((folder / "run.json").read_text())["digest"] == plan_digest(read_plan(EVEN))
    assert run.steps == 8 and [one["step"] for one in run.observations] == [3, 10]  # from the third to the tenth
    assert run.scenario is not None and run.predicted_s is not None and run.predicted_s > 0
    assert run.scenario.workload.seq_len == LENGTH and run.scenario.clusters[0].num_ranks == 2
    for rank in run.ranks:
        assert all(getattr(rank, name) >= 0 for name in PHASES) and rank.rest_s > 0
        assert rank.tokens == 2 * LENGTH / 2 and rank.memory_bytes > 2**20
        assert 0 < rank.own_min_s <= rank.own_median_s <= rank.own_max_s
    for ranges in run.trace:
        names = {name for name, _, _ in ranges}
        assert {"ds_hetero.forward", "ds_hetero.backward", "ds_hetero.step", "ds_hetero.attention"} <= names
        assert all(0 <= start <= stop for _, start, stop in ranges)


def test_a_job_that_fails_writes_too(tmp_path):
    run_deepspeed(_train, 2, _config(tmp_path), STEPS, 5)
    run = read_run(tmp_path / "run.json")
    assert run.steps == 1 and run.ended == "ArithmeticError: loss is not finite"


def test_a_folder_that_cannot_be_written_is_refused_on_every_rank(tmp_path):
    (tmp_path / "file").write_text("")
    messages = run_deepspeed(_refused, 2, _config(tmp_path / "file" / "folder"))
    assert messages[0] == messages[1]
    assert messages[0].startswith('ConfigError: "heterogeneity.report": ') and "cannot be written to" in messages[0]


def _refused(rank: int, config: dict[str, Any]) -> str:
    try:
        _train(rank, config, 1)
    except ValueError as error:
        return f"{type(error).__name__}: {error}"
    return ""


@pytest.mark.parametrize("schedule", ["ulysses", pytest.param("plan", marks=pytest.mark.slow)])
def test_a_slow_rank_is_named_and_nothing_changes(schedule):
    """Stock's shares, or the planner's; rank 1 at 70 %, noise of 5 %; within 20 steps."""
    config = _config(None, replan={"report_only": True}, schedule=schedule)
    said, other = run_deepspeed(_train, 2, config, 20, None, (1.0, 0.7))
    named = [line for line in said if "straggler" in line]
    assert len(named) == 1 and "rank 1 is a straggler" in named[0] and "predicted to save" in named[0]
    assert not any("straggler" in line for line in other)


@pytest.mark.slow
def test_looking_for_stragglers_is_little_work_for_a_step():
    config = _config(None, replan={"report_only": True}, schedule="ulysses")
    for lines_of_steps in run_deepspeed(_lines_of_monitor, 2, config):
        assert len(lines_of_steps) == 25
        assert sum(lines_of_steps) / 25 < 1_000  # 0.1 ms


def _lines_of_monitor(rank: int, config: dict[str, Any]) -> list[int]:
    """Lines of Python that the monitor runs after each step."""
    from ds_hetero.job.monitor import StepMonitor

    stock, lines_of_steps = StepMonitor.record_step, []

    def counted(monitor: StepMonitor, samples: int) -> None:
        lines_of_steps.append(lines_run(partial(stock, monitor, samples)))

    StepMonitor.record_step = counted  # type: ignore[method-assign]
    _train(rank, config, 25, None, (1.0, 1.0))
    return lines_of_steps
