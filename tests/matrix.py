"""Train with other releases of Python, torch and the frameworks, and write what came of it into docs/frameworks.md.

    .ci/matrix                              # every row, and the table
    .ci/matrix oldest newest                # some rows; the results of the others stay as they are
    .ci/matrix --failed                     # of all rows or some, the tests alone that failed or were skipped on record
    .ci/matrix --oldest                     # the oldest frameworks beside this torch, as CI does; not on record
    .ci/matrix --single torch-2.9.1         # the newest with one other release, which is printed and not on record
    .ci/matrix --list                       # the rows
    .ci/matrix --write                      # the table alone, from tests/matrix.json

A row is an environment of its own in .cache/matrix, which is kept, and a suite that stands for all tests: sequence
parallelism, weighted ZeRO 1 to 3, a pipeline, checkpoints, the Trainer, TRL, accelerate, own loops. A row with this
command's Python holds the packages that differ from this command's environment, and whatever these require of others;
all others are imported from that environment. A row with another Python holds everything (``python -m venv``).
Interpreters are looked up as ``python3.12``. The installer of whole environments is uv if the path has one, which
shares files between them, and pip otherwise.
"""

from __future__ import annotations

import argparse
import configparser
import dataclasses
import hashlib
import json
import os
import shutil
import subprocess
import sys
import sysconfig
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from tests.generated_places import with_generated
from tests.release import find_pythons
from tests.support import ROOT

RESULTS = Path(__file__).with_name("matrix.json")
PAGE = ROOT / "docs" / "frameworks.md"
FOLDER = ROOT / ".cache" / "matrix"
_TIMEOUT_S = 1200  # of a row; it takes one to three minutes on two idle cores


@dataclass(frozen=True, kw_only=True)
class Row:
    """Releases of one environment; the defaults are the newest that ds_hetero admits and CI runs all tests with."""

    python: str = "3.11"
    torch: str = "2.13.0"
    deepspeed: str = "0.19.8"
    transformers: str = "5.23.0"
    accelerate: str = "1.15.0"
    trl: str = "1.16.0"
    peft: str = "0.21.2"

    def requirements(self) -> list[str]:
        """What the environment is made of, beside what these require."""
        pins = [f"{name}=={release}" for name, release in vars(self).items() if name != "python"]
        return [*pins, *_FOR_TESTS]


_FOR_TESTS = ("datasets", "hypothesis", "pytest>=8.3", "pytest-timeout", "scipy", "setuptools", "torchdata", "wheel")

_OF_PYTHON_3_10 = {"python": "3.10", "trl": "1.14.2"}  # newer releases of TRL, and of transformers than 5.20, need 3.11
ROWS: dict[str, Row] = {
    "newest": Row(),
    "oldest": Row(
        torch="2.9.1", deepspeed="0.18.4", transformers="5.6.0", accelerate="1.12.0", peft="0.19.1", **_OF_PYTHON_3_10
    ),
    "deepspeed-0.18.6": Row(deepspeed="0.18.6"),
    "deepspeed-0.18.8": Row(deepspeed="0.18.8", transformers="5.20.2"),
    "axolotl-0.18": Row(
        torch="2.12.1", deepspeed="0.18.9", transformers="5.14.1", accelerate="1.13.0", trl="1.8.0", peft="0.19.1"
    ),
    "deepspeed-0.19.0": Row(deepspeed="0.19.0"),
    "deepspeed-0.19.2": Row(deepspeed="0.19.2", torch="2.14.1"),
    "deepspeed-0.19.4": Row(deepspeed="0.19.4", python="3.12", torch="2.11.0"),
    "deepspeed-0.19.5": Row(deepspeed="0.19.5", python="3.13", torch="2.10.0"),
    "deepspeed-0.19.7": Row(deepspeed="0.19.7", transformers="5.24.0"),
}
"""Combinations in which every release of the range that frameworks pin, and both ends of it, occur at least once. What
fails in one is looked for with `single`."""


def single(name: str) -> Row:
    """Return the newest with one package in another release, such as ``torch-2.9.1`` or ``python-3.12``."""
    package, _, release = name.rpartition("-")
    return dataclasses.replace(Row(), **{package: release})


SUITE = tuple(
    f"tests/integration/{test}"
    for test in (
        "loops/test_plain_loop.py::test_training_equals_one_process[stage 0, 2 ranks]",
        "loops/test_plain_loop.py::test_training_equals_one_process[stage 2, one group, all-reduce]",
        "loops/test_plain_loop.py::test_training_equals_one_process[stage 3, 2 ranks, all-reduce]",
        "models/test_features.py::test_lora_adapters_train_as_on_one_process",
        "models/test_features.py::test_bf16_trains_as_on_one_process",
        "models/test_features.py::test_checkpoint_resumes_under_another_schedule",
        "zero/test_zero12.py::test_training_equals_equal_partitions[stage 2, accumulation]",
        "zero/test_zero12.py::test_training_equals_equal_partitions[offload, weights of zero]",
        "zero/test_zero12.py::test_training_equals_equal_partitions[bf16, summed in fp32, stage 1]",
        "zero/test_zero12_checkpoints.py::test_universal_checkpoints_go_to_stock_and_back",
        "zero/test_zero3.py::test_training_equals_that_of_equal_shards[offload]",
        "zero/test_zero3.py::test_training_equals_that_of_equal_shards[sequential]",
        "zero/test_rare_parameters.py::test_with_accumulation_and_checkpointed_layers",
        "pipelines/test_pipelines.py::test_unequal_stages_train_as_one_process[tensor at both ends]",
        "trainer/test_trainer.py::test_training_equals_one_process[one replica, stage 2]",
        "trainer/test_trainer.py::test_resume_under_another_schedule",
        "trainer/test_trainer.py::test_trl_trains_packed_documents_as_one_process",
        "trainer/test_accelerate.py::test_loop_on_two_ranks_equals_one_process[stage 1, documented loss]",
    )
)
"""Every test trains or resumes on two to five CPU ranks and compares the outcome with one process."""

OLDEST = Row(python="{}.{}".format(*sys.version_info), deepspeed="0.18.4", transformers="5.6.0", accelerate="1.12.0")
"""What CI runs beside the newest: an environment that the installer makes in seconds."""
SUITE_OF_OLDEST = (
    *SUITE,
    "tests/integration/loops/test_unlike_models.py::"
    "test_trainers_with_a_loss_of_their_own_equal_one_process[means of micro-batches]",
    "tests/integration/models/test_features.py",
    "tests/integration/zero/test_zero3.py",
    "tests/integration/zero/test_rare_parameters.py",
    "tests/unit/test_framework_surface.py",
)


def run_row(name: str, row: Row, suite: Sequence[str] = SUITE, *, options: Sequence[str] = ()) -> dict[str, Any]:
    """Make the environment of a row if it does not exist, run pytest on a suite in it, and return what came of it.

    Args:
        options: of pytest.
    """
    folder = FOLDER / name
    report = folder / "report.xml"
    started = time.monotonic()
    make_environment(folder, row.python, row.requirements())
    installed_s, started = time.monotonic() - started, time.monotonic()
    report.unlink(missing_ok=True)
    pytest = [folder / "bin" / "python", "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--junitxml={report}"]
    with (folder / "output.txt").open("w") as output:
        subprocess.run(
            [*pytest, *_IGNORED, *options, *suite],
            cwd=ROOT, env=_environment(), stdout=output, stderr=output, timeout=_TIMEOUT_S, check=False,
        )  # fmt: skip
    assert report.exists(), f"pytest did not end: {folder / 'output.txt'}"
    result = {**vars(row), **outcome(report), "seconds": round(time.monotonic() - started)}
    print(f"{name}: {_summary(result)}, installed in {installed_s:.0f} s", flush=True)
    return result


# These three come from DeepSpeed: some releases compile something on import, where torch or Python warn, and those
# below 0.19.8 import distutils.
_IGNORED = tuple(
    part
    for warning in (
        "`torch.jit:DeprecationWarning",
        ":SyntaxWarning",
        "The distutils:DeprecationWarning",
    )
    for part in ("-W", f"ignore:{warning}")
)


def _environment() -> dict[str, str]:
    """Without a compiler, DeepSpeed leaves out its shared-memory extension, which takes a minute to compile in each."""
    kept = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
    return {**kept, "PYTHONPATH": str(ROOT), "CXX": "none", "OMP_NUM_THREADS": "1"}


def make_environment(folder: Path, python: str, requirements: list[str]) -> None:
    """Make an environment with the requirements, unless the folder holds one of the same.

    Args:
        folder: of the environment.
        python: such as ``3.12``. If it is this command's, packages that meet the requirements are imported from this
            command's environment, and the installer adds those that do not.
        requirements: as the installer takes them.

    Raises:
        subprocess.CalledProcessError: something cannot be installed.
    """
    is_above_this = python == "{}.{}".format(*sys.version_info)
    below = sysconfig.get_path("purelib") if is_above_this else ""
    digest = hashlib.sha256("\n".join([python, below, *requirements]).encode()).hexdigest()
    mark = folder / "installed"
    if mark.exists() and mark.read_text() == digest:
        return
    shutil.rmtree(folder, ignore_errors=True)
    own, uv = folder / "bin" / "python", shutil.which("uv")
    install = [own, "-m", "pip", "-qq", "install", "--no-compile"]
    if is_above_this:
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
        (site,) = folder.glob("lib/python*/site-packages")
        (site / "below.pth").write_text(f"{below}\n")  # has pip, too
    else:
        found, _ = find_pythons([python], {})
        assert found, f"python{python} is not on the path, or does not run"
        subprocess.run([found[0].executable, "-m", "venv", folder], check=True)
        if uv:
            install = [uv, "pip", "install", "--quiet", "--python", own]
    subprocess.run([*install, *requirements, *_own_requirements()], check=True)
    mark.write_text(digest)


def _own_requirements() -> list[str]:
    """Return what ds_hetero requires without extras; ds_hetero itself is imported from the clone."""
    config = configparser.ConfigParser(interpolation=None)
    config.read(ROOT / "setup.cfg")
    return [line for line in config["options"]["install_requires"].splitlines() if line]


def outcome(report: Path) -> dict[str, Any]:
    """Read pytest's report: how many tests passed, and which failed or were refused by name."""
    counts: dict[str, Any] = {"passed": 0, "refused": [], "failed": [], "skipped": []}
    for case in ElementTree.parse(report).iter("testcase"):
        name = str(case.get("name"))
        skipped, failed = case.find("skipped"), [each for each in case if each.tag in ("failure", "error")]
        if failed:
            text = f"{failed[0].get('message')}"
            counts["failed"].append(f"{name}: {_last_line(text)}")
        elif skipped is not None:
            text = str(skipped.get("message"))
            counts["refused" if text.startswith("refused by name") else "skipped"].append(f"{name}: {_last_line(text)}")
        else:
            counts["passed"] += 1
    return counts


def failed_tests(result: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the tests that failed or were skipped in a row, as pytest takes them."""
    names = [line.partition(": ")[0] for line in (*result["failed"], *result["skipped"])]
    file_of = {test.partition("::")[2]: test.partition("::")[0] for test in SUITE}
    return tuple(
        f"{file}::{name}"
        for name in names
        for test, file in file_of.items()
        if name == test or name.startswith(f"{test}[")
    )


def with_second_run(former: Mapping[str, Any], second: Mapping[str, Any]) -> dict[str, Any]:
    """Return the result of a row whose failed tests ran a second time."""
    counts = {kind: former[kind] + second[kind] for kind in ("passed", "refused", "seconds")}
    return {**second, **counts}


def _last_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1][:200] if lines else ""


def _summary(result: Mapping[str, Any]) -> str:
    lists = ", ".join(f"{len(result[kind])} {kind}" for kind in ("refused", "skipped", "failed"))
    return f"{result['passed']} passed, {lists}, {result['seconds']} s"


def render(results: Mapping[str, Mapping[str, Any]]) -> str:
    """Return a table with a line for each row that ran."""
    newest = Row()
    titles = [*(_SHOWN[part] for part in _IN_COLUMNS), "others", *_COUNTED]
    lines = [f"|{'|'.join(titles)}|", f"|{'---|' * len(titles)}"]
    for name in ROWS:
        if name not in results:
            continue
        result = results[name]
        differing = [part for part in vars(newest) if part not in _IN_COLUMNS and result[part] != vars(newest)[part]]
        others = ", ".join(f"{_SHOWN[part]} {result[part]}" for part in differing)
        counts = [result["passed"], *(len(result[kind]) for kind in _COUNTED[1:])]
        lines.append(f"|{'|'.join(map(str, [*(result[part] for part in _IN_COLUMNS), others, *counts]))}|")
    counted = {part: {result[part] for result in results.values()} for part in _IN_COLUMNS}
    shown = ", ".join(f"{len(counted[part])} of {_SHOWN[part]}" for part in _IN_COLUMNS)
    usual = ", ".join(f"{_SHOWN[part]} {vars(newest)[part]}" for part in vars(newest) if part not in _IN_COLUMNS)
    return "\n".join([f"{len(results)} rows: {shown}. Others: {usual} if none are named.", "", *lines])


_COUNTED = ("passed", "refused", "skipped", "failed")
_IN_COLUMNS = ("python", "torch", "deepspeed", "transformers")
_SHOWN = {
    "python": "Python",
    "torch": "torch",
    "deepspeed": "DeepSpeed",
    "transformers": "transformers",
    "accelerate": "accelerate",
    "trl": "TRL",
    "peft": "PEFT",
}


def with_table(page: str, results: Mapping[str, Mapping[str, Any]]) -> str:
    """Return the page with the table replaced."""
    return with_generated(page, "matrix", render(results))


def read_results() -> dict[str, dict[str, Any]]:
    """Return the results of the rows that ran, in the order of `ROWS`."""
    found: dict[str, dict[str, Any]] = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    return {name: found[name] for name in ROWS if name in found}


def main() -> int:
    """Run the command, see the module's docstring; return 1 if a test failed."""
    parser = argparse.ArgumentParser(
        prog=".ci/matrix", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("rows", nargs="*", metavar="ROW", help="rows to run; all without any")
    parser.add_argument("--list", action="store_true", help="print the rows")
    parser.add_argument("--single", metavar="PACKAGE-RELEASE", help="run the newest with one other release")
    parser.add_argument("--oldest", action="store_true", help="run the oldest frameworks with this Python and torch")
    parser.add_argument("--failed", action="store_true", help="run only tests that failed, or were skipped, on record")
    parser.add_argument("--write", action="store_true", help="write the table from the results on record")
    options = parser.parse_args()
    if options.list:
        print("\n".join(f"{name}: {' '.join(row.requirements())}" for name, row in ROWS.items()))
        return 0
    if options.oldest:
        failed = run_row("oldest-here", OLDEST, SUITE_OF_OLDEST, options=("-m", "not slow"))["failed"]
        if failed:
            print((FOLDER / "oldest-here" / "output.txt").read_text())
        return int(bool(failed))
    if options.single:
        return int(bool(run_row(options.single, single(options.single))["failed"]))
    unknown = [name for name in options.rows if name not in ROWS]
    if unknown:
        parser.error(f"no row {', '.join(unknown)}; rows: {'; '.join(ROWS)}")
    did_fail = False
    for name in () if options.write else options.rows or ROWS:
        former = read_results().get(name) if options.failed else None
        if options.failed and not (former and failed_tests(former)):
            continue
        result = run_row(name, ROWS[name], failed_tests(former) if former else SUITE)
        if former:
            result = with_second_run(former, result)
        did_fail |= bool(result["failed"])
        RESULTS.write_text(json.dumps({**read_results(), name: result}, indent=1) + "\n")
    PAGE.write_text(with_table(PAGE.read_text(), read_results()))
    return int(did_fail)


if __name__ == "__main__":
    sys.exit(main())
