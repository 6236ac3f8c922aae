"""Train by other frameworks on two unequal CPU ranks, compare with one process, and write docs/frameworks.md.

    .ci/frameworks                  # every framework, and the table
    .ci/frameworks axolotl          # some; the results of the others stay as they are
    .ci/frameworks --write          # the table alone, from tests/beside/losses.json

Each framework gets an environment in .cache/frameworks, which is kept. The recipe is trained three times: by the
framework alone on one process, and with this engine on two ranks that share the tokens of each row 3:1, or the rows of
each batch. Losses and gradient norms of every step and the saved weights are compared.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from tests.beside.frameworks import FRAMEWORKS, ONE_PROCESS, SHARINGS, STEPS, Framework, Job
from tests.generated_places import with_generated
from tests.support import ROOT

RESULTS = Path(__file__).with_name("losses.json")
PAGE = ROOT / "docs" / "frameworks.md"
FOLDER = ROOT / ".cache" / "frameworks"
TOLERANCE = 1e-5
"""Of losses, gradient norms and weights in fp32; that of the other tests of parity."""

_SHOWN = ("transformers", "accelerate", "deepspeed", "trl", "peft", "torch")
_TIMEOUT_S = 600  # of one training; it takes 15 to 40 s on two idle cores


class Trained(NamedTuple):
    """Results of one training.

    Args:
        losses: of each step.
        norms: of the gradient of each step.
        weights: after the last step, by name.
    """

    losses: list[float]
    norms: list[float]
    weights: dict[str, np.ndarray]


def run_framework(name: str, framework: Framework) -> dict[str, Any]:
    """Install a framework unless it is, train its recipe in all three ways, and return what to keep of it."""
    folder = FOLDER / name
    python = make_environment(folder, framework.torch, framework.installs)
    _run([python, "-m", "tests.beside.inputs", folder / "inputs"], folder, "inputs")
    runs = {sharing: train(framework, folder, sharing) for sharing in (ONE_PROCESS, *SHARINGS)}
    return summarize(framework, python, runs)


def summarize(framework: Framework, python: Path, runs: Mapping[str, Trained | str]) -> dict[str, Any]:
    """Print the steps of all runs, and return versions, losses, norms and differences from one process.

    Args:
        runs: by sharing, what was trained, or why ds_hetero refuses it.
    """
    trained = {sharing: run for sharing, run in runs.items() if isinstance(run, Trained)}
    refused = {sharing: run for sharing, run in runs.items() if isinstance(run, str)}
    expected = trained[ONE_PROCESS]
    differences = {sharing: compare(run, expected) for sharing, run in trained.items() if run is not expected}
    print(framework.title, _steps(trained), f"differences: {differences}", f"refused: {refused}", sep="\n", flush=True)
    return {
        "installs": framework.installs,
        "versions": versions(python, (framework.distribution, *_SHOWN)),
        "losses": {sharing: run.losses for sharing, run in trained.items()},
        "norms": {sharing: run.norms for sharing, run in trained.items()},
        "differences": differences,
        "refused": refused,
    }


def compare(trained: Trained, expected: Trained) -> dict[str, float]:
    """Return the largest relative difference from one process in losses, gradient norms and weights.

    A weight tensor counts by the norm of its difference, relative to the norm of the tensor.
    """
    assert len(trained.losses) == len(expected.losses) == STEPS
    assert trained.weights.keys() == expected.weights.keys()
    weights = [
        float(np.linalg.norm(trained.weights[name] - value) / np.linalg.norm(value))
        for name, value in expected.weights.items()
    ]
    return {
        "loss": _largest_difference(trained.losses, expected.losses),
        "norm": _largest_difference(trained.norms, expected.norms),
        "weights": max(weights),
    }


def _largest_difference(values: list[float], expected: list[float]) -> float:
    return max(abs(value - right) / abs(right) for value, right in zip(values, expected, strict=True))


def _steps(runs: Mapping[str, Trained]) -> str:
    """Return a table of losses and gradient norms, a line for each step."""
    lines = ["  ".join(["step", *(f"{f'{run}: loss, norm':>26}" for run in runs)])]
    for step in range(STEPS):
        cells = [f"{f'{run.losses[step]:.8g}  {run.norms[step]:.8g}':>26}" for run in runs.values()]
        lines.append("  ".join([f"{step + 1:4}", *cells]))
    return "\n".join(lines)


def make_environment(folder: Path, torch: str, installs: tuple[str, ...]) -> Path:
    """Make an environment with a framework and this engine, unless it was made; return its Python."""
    python = folder / "bin" / "python"
    mark = folder / "installed"
    packages = (torch, *installs)
    if mark.exists() and mark.read_text() == "\n".join(packages):
        return python
    started = time.monotonic()
    shutil.rmtree(folder, ignore_errors=True)
    interpreter = shutil.which("python3.11")
    assert interpreter, "python3.11 is not on the path"
    subprocess.run([interpreter, "-m", "venv", folder], check=True)
    pins = folder / "pins.txt"
    pins.write_text(torch)
    for call in (*packages, f"--editable {ROOT}"):
        print(f"{folder.name}: pip install {call}", flush=True)
        subprocess.run([python, "-m", "pip", "-qq", "install", "--no-compile", "-c", pins, *call.split()], check=True)
    mark.write_text("\n".join(packages))
    print(f"{folder.name}: installed in {time.monotonic() - started:.0f} s", flush=True)
    return python


def train(framework: Framework, environment: Path, sharing: str) -> Trained | str:
    """Train a recipe by the framework; return what it logged and saved, or the message with which ds_hetero refuses."""
    folder = environment / "jobs" / sharing.replace(" ", "-")
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    job = Job(folder=folder, inputs=environment / "inputs", sharing=sharing, zero_stage=framework.zero_stage)
    if sharing == ONE_PROCESS:
        start = framework.command
    else:
        start = ("torchrun", "--standalone", "--nproc-per-node", "2", "-m", "ds_hetero.run", "-m", framework.module)
    command = [environment / "bin" / start[0], *start[1:], *framework.arguments(job)]
    try:
        output = _run(command, folder, "output")
    except AssertionError:
        message = r"ds_hetero\.errors\.(?!PeerError)\w+: (.*)$"
        refusal = re.search(message, (folder / "output.txt").read_text(), re.MULTILINE)
        if refusal is None:
            raise
        return refusal[1]
    assert sharing == ONE_PROCESS or "ds_hetero: on, 2 ranks" in output, f"ds_hetero is off: {folder / 'output.txt'}"
    return _read(folder)


def _run(command: list[Any], folder: Path, name: str) -> str:
    """Run a command in a folder and return what it printed, which is kept there."""
    path = folder / f"{name}.txt"
    with path.open("w") as output:
        ended = subprocess.run(
            command,
            cwd=folder,
            env=_environment(Path(command[0]).parents[1]),
            stdout=output,
            stderr=output,
            timeout=_TIMEOUT_S,
            check=False,
        )
    assert ended.returncode == 0, f"{' '.join(map(str, command))} failed, see {path}:\n{path.read_text()[-3000:]}"
    return path.read_text()


def _environment(folder: Path) -> dict[str, str]:
    """CPUs, nothing from the internet, and caches in the folder of the environment."""
    kept = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
    cache = str(folder / "cache")
    return {
        **kept,
        "PATH": f"{folder / 'bin'}:{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT),
        "DS_ACCELERATOR": "cpu",
        "OMP_NUM_THREADS": "1",
        "TORCH_EXTENSIONS_DIR": str(folder / "extensions"),  # DeepSpeed compiles one at its first start, in a minute
        "HF_HOME": cache,
        "HF_HUB_OFFLINE": "1",
        "MODELSCOPE_CACHE": cache,
        "AXOLOTL_DO_NOT_TRACK": "1",
        "DO_NOT_TRACK": "1",
    }


def _read(folder: Path) -> Trained:
    """Read losses, gradient norms and weights from the checkpoint of the last step."""
    from safetensors.numpy import load_file

    (state,) = folder.glob("output/**/checkpoint-*/trainer_state.json")
    logs = [entry for entry in json.loads(state.read_text())["log_history"] if "loss" in entry]
    losses, norms = ([float(entry[key]) for entry in logs] for key in ("loss", "grad_norm"))
    return Trained(losses, norms, load_file(state.with_name("model.safetensors")))


def versions(python: Path, packages: tuple[str, ...]) -> dict[str, str]:
    """Return the installed releases in an environment."""
    code = "import sys; from importlib.metadata import version; print(*map(version, sys.argv[1:]))"
    found = subprocess.run([python, "-c", code, *packages], capture_output=True, text=True, check=True).stdout
    return dict(zip(packages, found.split(), strict=True))


def render(results: Mapping[str, Mapping[str, Any]]) -> str:
    """Return a table of what was installed, and by how much two ranks differ from one process."""
    lines = [f"| framework | {' | '.join(_SHOWN)} | {' | '.join(f'{sharing} 3:1' for sharing in SHARINGS)} |"]
    lines.append("|---" * (1 + len(_SHOWN) + len(SHARINGS)) + "|")
    for name, result in results.items():
        framework, installed = FRAMEWORKS[name], result["versions"]
        cells = [installed[package] for package in _SHOWN]
        cells += [_cell(result, sharing) for sharing in SHARINGS]
        lines.append(f"| {framework.title} {installed[framework.distribution]} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _cell(result: Mapping[str, Any], sharing: str) -> str:
    """Return the differences of a run in loss, norm and weights, or why there are none."""
    if sharing in result["differences"]:
        return ", ".join(f"{error:.0e}" for error in result["differences"][sharing].values())
    return "refused" if sharing in result["refused"] else "not run"


def largest_difference(result: Mapping[str, Any]) -> float:
    """Return the largest difference from one process of all runs and kinds."""
    return max(error for by_kind in result["differences"].values() for error in by_kind.values())


def with_table(page: str, results: Mapping[str, Mapping[str, Any]]) -> str:
    """Return the page with the table replaced."""
    return with_generated(page, "losses", render(results))


def read_results() -> dict[str, dict[str, Any]]:
    """Return the results on record, in the order of `FRAMEWORKS`."""
    found: dict[str, dict[str, Any]] = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    return {name: found[name] for name in FRAMEWORKS if name in found}


def main() -> int:
    """Run the command, see the module's docstring; return 1 if something differs from one process."""
    parser = argparse.ArgumentParser(
        prog=".ci/frameworks", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("names", nargs="*", metavar="FRAMEWORK", help=f"{', '.join(FRAMEWORKS)}; all without any")
    parser.add_argument("--write", action="store_true", help="write the table from the results on record")
    options = parser.parse_args()
    if unknown := [name for name in options.names if name not in FRAMEWORKS]:
        parser.error(f"no framework {', '.join(unknown)}; frameworks: {', '.join(FRAMEWORKS)}")
    is_equal = True
    for name in () if options.write else options.names or FRAMEWORKS:
        result = run_framework(name, FRAMEWORKS[name])
        is_equal &= largest_difference(result) <= TOLERANCE
        RESULTS.write_text(json.dumps({**read_results(), name: result}, indent=1) + "\n")
    PAGE.write_text(with_table(PAGE.read_text(), read_results()))
    return int(not is_equal)


if __name__ == "__main__":
    sys.exit(main())
