"""Every example runs, and trains on four uneven ranks as it does in one process; ds_configs/ is valid.

Budget: 90 s.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import runpy
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from ds_hetero.decision.decide_pipelines import global_batch_of
from ds_hetero.decision.resolve import given_plan
from ds_hetero.engine.ds_config import read_training_facts, section_of
from ds_hetero.frameworks.deepspeed.keys import expect_supported_keys
from ds_hetero.values.schedule import Schedule
from ds_hetero.values.section import read_section
from tests.support import ROOT, free_port, run_deepspeed

EXAMPLES, CONFIGS = ROOT / "examples", ROOT / "ds_configs"
SHORT = ("--steps", "2", "--tokens", "256")
NUMBER = re.compile(r"\b(?:loss|(?:grad_)?norm)\W+(\d+\.\d+)")  # as our loops print them, and as the Trainer logs them


@pytest.mark.parametrize(
    ("example", "stage", "command"),
    [
        ("hf_trainer.py", 3, ()),
        ("accelerate_loop.py", 2, ()),
        ("deepspeed_loop.py", 1, ()),
        ("ulysses_loop.py", 3, ("ds_hetero.run",)),
    ],
)
def test_example_trains_alike_on_uneven_ranks_and_in_one_process(example, stage, command, tmp_path):
    config = json.loads((CONFIGS / f"zero{stage}.json").read_text())
    script = str(EXAMPLES / example)
    uneven = _run(4, *command, script, *SHORT, "--ds-config", _written(config, tmp_path / "uneven.json"))
    del config["heterogeneity"]
    plain = _written(config, tmp_path / "plain.json")
    reference = "deepspeed_loop.py" if example == "ulysses_loop.py" else example  # stock Ulysses refuses one rank
    expected = _run(1, str(EXAMPLES / reference), *SHORT, "--ds-config", plain)
    assert len(expected) == 4
    assert uneven == pytest.approx(expected, abs=2e-3)  # the Trainer logs four digits


def test_unequal_replicas_train_as_one_rank():
    script = str(EXAMPLES / "unequal_replicas.py")
    expected = _run(1, script, *SHORT, "--degrees", "1")
    assert len(expected) == 4
    assert _run(3, script, *SHORT, "--degrees", "1", "2") == pytest.approx(expected, abs=2e-4)


def test_unequal_pipelines_train_as_one_process():
    script = str(EXAMPLES / "unequal_pipelines.py")
    expected = _run(1, script, *SHORT, "--plan", "")
    assert len(expected) == 4
    assert _run(4, script, *SHORT) == pytest.approx(expected, abs=2e-4)


def test_prefill_equals_that_of_one_process():
    assert _run(4, str(EXAMPLES / "prefill.py"), "--tokens", "256") == []


@pytest.mark.slow  # DeepSpeed's launcher starts five processes from nothing, and steps take emulated time
@pytest.mark.alone
def test_quickstart_under_the_launcher(tmp_path):
    reference = tmp_path / "reference.json"
    options = ["--steps", "2", "--min-tokens", "256", "--max-tokens", "512", "--reference", str(reference)]
    for num_processes in (1, 4):
        launcher = [Path(sys.executable).with_name("deepspeed"), "--quiet", "--num_gpus", str(num_processes)]
        rendezvous = ["--no_local_rank", "--master_port", str(free_port())]
        command = [*launcher, *rendezvous, str(EXAMPLES / "quickstart.py"), *options]
        output = _launch(command)
    assert "PASS: uneven ranks train as one process" in output


@pytest.mark.sweep(keep=0)
@pytest.mark.slow  # as above
@pytest.mark.alone
def test_pipelines_under_the_launcher(tmp_path):
    options = ["--steps", "2", "--tokens", "64", "--batch-size", "8", "--reference", str(tmp_path / "reference.json")]
    for num_processes in (1, 4):
        launcher = [Path(sys.executable).with_name("deepspeed"), "--quiet", "--num_gpus", str(num_processes)]
        rendezvous = ["--no_local_rank", "--master_port", str(free_port())]
        output = _launch([*launcher, *rendezvous, str(EXAMPLES / "pipelines.py"), *options])
    assert "PASS: unequal pipelines train as one process" in output


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_ready_configuration_is_valid(stage):
    config = json.loads((CONFIGS / f"zero{stage}.json").read_text())
    assert config["zero_optimization"]["stage"] == stage
    section = section_of(config)
    (schedule,) = given_plan(section, 4).schedules
    assert schedule == Schedule.from_dict(json.loads((CONFIGS / "schedules/four_ranks_4_3_2_1.json").read_text()))


def test_the_ready_configuration_that_plans_spells_out_the_defaults():
    section = section_of(json.loads((CONFIGS / "plan.json").read_text()))
    assert section.model_copy(update={"seq_len": None}) == read_section({})


READY = {  # what a file says beside the defaults
    "pipelines": {"parallel": "full"},
    "documents": {"placement": {"mode": "documents"}},
    "weights": {"zero_partition": "memory"},
    "replan": {"replan": {"enabled": True}},
}


@pytest.mark.parametrize("name", READY)
def test_a_ready_configuration_says_what_it_is_named_for(name):
    config = json.loads((CONFIGS / f"{name}.json").read_text())
    expect_supported_keys(config, pipelines=name == "pipelines")
    section = section_of(config).model_dump(exclude_defaults=True)
    assert section.pop("seq_len") and section == READY[name]
    if name == "pipelines":
        assert global_batch_of(read_training_facts(config)) == 64


def test_every_ready_configuration_is_read_by_a_test():
    assert {path.stem for path in CONFIGS.glob("*.json")} == {"zero1", "zero2", "zero3", "plan", *READY}


@pytest.mark.parametrize("path", sorted((CONFIGS / "schedules").glob("*.json")), ids=lambda path: path.stem)
def test_ready_schedule_is_valid(path):
    schedule = Schedule.from_dict(json.loads(path.read_text()))
    assert schedule.ranks == (0, 1, 2, 3)


def _run(num_ranks: int, *command: str) -> list[float]:
    """Losses and gradient norms that rank 0 of an example prints."""
    text = run_deepspeed(_example, num_ranks, command, env={"ACCELERATE_USE_CPU": "false"})[0]
    return [float(number) for number in NUMBER.findall(text)]


def _written(config: dict, path: Path) -> str:
    path.write_text(json.dumps(config))
    return str(path)


def _launch(command: list[str]) -> str:
    """What a launcher and its ranks print; none of them outlives the test."""
    pipe, both = subprocess.PIPE, subprocess.STDOUT
    with subprocess.Popen(command, cwd=ROOT, text=True, stdout=pipe, stderr=both, start_new_session=True) as launcher:
        try:
            output, _ = launcher.communicate(timeout=300)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(launcher.pid, signal.SIGKILL)
    assert launcher.returncode == 0, output
    return output


def _example(rank: int, command: tuple[str, ...]) -> str:
    """Run a script, or a module with a script as its argument, as ``python`` would; what it printed."""
    first = command[0]
    sys.argv = list(command)
    sys.path.insert(0, str(EXAMPLES))
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        try:
            if first.endswith(".py"):
                runpy.run_path(first, run_name="__main__")
            else:
                runpy.run_module(first, run_name="__main__", alter_sys=False)
        except SystemExit as end:
            assert not end.code, printed.getvalue()
    return printed.getvalue()
