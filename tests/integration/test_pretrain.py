"""examples/pretrain trains in its loop and under the Trainer, on unequal ranks and after a restart, as in one process.

Budget: 40 s; the slow ones start launchers.
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
import time
from pathlib import Path

import pytest

from tests.support import ROOT, run_deepspeed

sys.path.insert(0, str(ROOT / "examples" / "pretrain"))

import history

PRETRAIN = ROOT / "examples" / "pretrain"

# 12 rows are less than two epochs; a loss is noted every ten steps.
SHORT = ("--size", "tiny", "--row-tokens", "128", "--rows", "12", "--steps", "20")
NOTED = ("--eval-every", "10", "--eval-rows", "3", "--save-every", "10")
ROUNDING = 2e-5  # relative, of fp32 sums in another order, after twenty steps


@pytest.fixture(scope="module")
def one_process(tmp_path_factory):
    """Losses of loop.py on one rank."""
    return _run(tmp_path_factory.mktemp("one"), "loop", "1")


@pytest.mark.parametrize(("script", "speeds"), [("loop", "2,1,1"), ("trainer", "2,1,1"), ("trainer", "1")])
def test_both_scripts_train_on_any_ranks_as_the_loop_in_one_process(script, speeds, one_process, tmp_path):
    numbers = _run(tmp_path, script, speeds)
    for name in ("loss", "eval_loss", "grad_norm", "learning_rate"):
        assert numbers[name] == pytest.approx(one_process[name], rel=ROUNDING), name
    assert sorted(numbers["loss"]) == sorted(numbers["eval_loss"]) == [10, 20]
    assert numbers["loss"][20] < numbers["loss"][10]
    assert json.loads((tmp_path / "run.json").read_text())["steps"] >= 1


@pytest.mark.parametrize("script", ["loop", "trainer"])
def test_a_run_that_was_stopped_resumes_on_other_ranks_amid_an_epoch(script, one_process, tmp_path):
    _run(tmp_path, script, "2,1,1", stop_after=10)
    assert sorted(history.read(tmp_path)["loss"]) == [10]
    numbers = _run(tmp_path, script, "3,2", "--resume")
    for name in ("loss", "eval_loss", "learning_rate"):
        assert numbers[name] == pytest.approx(one_process[name], rel=ROUNDING), name


@pytest.mark.slow  # launchers start processes from nothing
@pytest.mark.alone
@pytest.mark.sweep(keep=1)
@pytest.mark.parametrize(
    ("script", "launcher"), [("loop", "torchrun"), ("loop", "deepspeed"), ("trainer", "accelerate")]
)
def test_the_quick_run_trains_under_every_launcher_and_shows_losses_and_samples(script, launcher, tmp_path):
    out = tmp_path / "run"
    with _quick_run("--script", script, "--launcher", launcher, "--out", str(out), "--steps", "20", *NOTED) as job:
        output, _ = job.communicate(timeout=380)
    assert job.returncode == 0, output
    assert "----\ndef read_" in output and "----\nclass " in output
    assert f"losses drawn to {tmp_path}/losses.png" in output
    assert sorted(history.read(out)["loss"]) == [10, 20]
    assert json.loads((out / "run.json").read_text())["ended"] == "normally"


@pytest.mark.slow  # three nodes start from nothing, and again
@pytest.mark.alone
def test_an_elastic_run_goes_on_when_a_node_leaves(tmp_path):
    out = tmp_path / "run"
    with _quick_run("--launcher", "elastic", "--out", str(out), "--steps", "200") as job:
        printed = job.stdout.readline()
        nodes = [int(pid) for pid in re.findall(r"\d+", printed)]
        assert len(nodes) == 3, printed
        while not (out / history.FILE).exists():
            assert job.poll() is None, job.communicate()[0]
            time.sleep(0.2)
        os.kill(nodes[2], signal.SIGTERM)
        output, _ = job.communicate(timeout=380)
    assert job.returncode == 0, output
    assert re.search(r"elastic: resume, .*ranks 3 -> 2", output), output
    assert sorted(history.read(out)["loss"]) == list(range(10, 201, 10))


def _run(
    out: Path, script: str, speeds: str, *options: str, stop_after: int | None = None
) -> dict[str, dict[int, float]]:
    """Train on as many ranks as there are speeds; numbers by name and step."""
    command = [str(PRETRAIN / f"{script}.py"), *SHORT, *NOTED, "--out", str(out), "--speeds", speeds, *options]
    run_deepspeed(_trained, len(speeds.split(",")), command, stop_after, env={"ACCELERATE_USE_CPU": "false"})
    return history.read(out)


def _trained(rank: int, command: list[str], stop_after: int | None) -> None:
    """Run a script as ``python`` would; end it behind its save of a step, as if it was killed there."""
    sys.argv = command
    sys.path.insert(0, str(PRETRAIN))
    import history

    def step(self: object, number: int, *arguments: float) -> None:
        if stop_after is not None and number > stop_after:
            raise SystemExit
        noted(self, number, *arguments)

    noted, history.History.step = history.History.step, step
    with contextlib.redirect_stdout(io.StringIO()), contextlib.suppress(SystemExit):
        runpy.run_path(command[0], run_name="__main__")


@contextlib.contextmanager
def _quick_run(*options: str):
    """examples/pretrain/run.sh --quick; none of its processes outlives the test."""
    command = ["bash", str(PRETRAIN / "run.sh"), "--quick", *options]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    both = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    with subprocess.Popen(command, cwd=ROOT, env=environment, text=True, start_new_session=True, **both) as job:
        try:
            yield job
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(job.pid, signal.SIGKILL)
