"""Check, build and try a release: ``python -m tests.release``. RELEASING.md says when, and what follows.

It checks that the tree is ready to be tagged, runs what CI runs, builds sdist and wheel, installs each into a fresh
environment of every Python that setup.cfg names, and runs the quick start there: planning everywhere, and training on
the Pythons of ``--train``. It writes into the folder of ``--out`` alone, makes no tag and uploads nothing.
"""

from __future__ import annotations

import argparse
import configparser
import json
import os
import re
import shutil
import socket
import subprocess
import sys
import tarfile
import tempfile
import time
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PLACEHOLDER = "https://example.org/"  # URLs in setup.cfg that a maintainer has to fill
PLAN = "plan --gpus 4090x2,3090x2 --model llama-3.2-3b --train lora --seq-len 64K --tiled-loss --json"  # of the README
FIT = "fit --gpus 5090,3090x2 --model llama-3.2-1b --seq-len 8192 --json"
# The quick start's script on one process and on four, short enough for a release on every Python.
QUICK = ("--steps", "2", "--min-tokens", "256", "--max-tokens", "512")


class ReleaseError(Exception):
    """A step has failed; the message says which, and what was found."""


@dataclass(frozen=True)
class Python:
    """An interpreter that the release is tried with."""

    version: str  # "3.11"
    executable: str


@dataclass(frozen=True)
class Trial:
    """Result of one file of the release in a fresh environment of one Python."""

    python: str
    file: str  # "wheel" or "sdist"
    install_s: float
    plan: str  # what `ds-hetero plan --json` printed, without the times of the search
    training: str  # "PASS" with the release of torch, or why training was not tried


# --- is the tree ready? ---------------------------------------------------------------------------------


def version_of_package(root: Path = ROOT) -> str:
    """Return ``__version__`` of the package, without importing it."""
    text = (root / "ds_hetero" / "__init__.py").read_text(encoding="utf-8")
    match = re.search(r'^__version__ = "([^"]+)"$', text, re.MULTILINE)
    assert match, "ds_hetero/__init__.py has no __version__"
    return match[1]


def problems_of_tree(root: Path = ROOT) -> list[str]:
    """Return what keeps a version from being tagged: files that name another version, and empty notes."""
    version = version_of_package(root)
    changelog = (root / "CHANGELOG.md").read_text(encoding="utf-8")
    notes = re.split(r"^## ", changelog, flags=re.MULTILINE)[1:]
    problems = []
    if not notes or notes[0].strip() != "[Unreleased]":
        problems.append("CHANGELOG.md: move the lines below [Unreleased] to the heading of the release")
    heading = rf"\[{re.escape(version)}\] - \d{{4}}-\d\d-\d\d\n"
    if len(notes) < 2 or not re.match(heading, notes[1]):
        problems.append(f"CHANGELOG.md: no heading `## [{version}] - YYYY-MM-DD` below [Unreleased]")
    citation = (root / "CITATION.cff").read_text(encoding="utf-8")
    if f"\nversion: {version}\n" not in citation:
        problems.append(f"CITATION.cff: version is not {version}")
    return problems


def unfilled_urls(root: Path = ROOT) -> list[str]:
    """Return the names of the project URLs in setup.cfg that are still placeholders."""
    parser = configparser.ConfigParser(interpolation=None)
    parser.read(root / "setup.cfg", encoding="utf-8")
    lines = parser["metadata"]["project_urls"].strip().splitlines()
    return [line.partition("=")[0].strip() for line in lines if PLACEHOLDER in line]


def _problems_of_git(version: str) -> list[str]:
    """Return changes that are not committed, and a tag of this version if there is one."""
    problems = []
    if _output("git", "status", "--porcelain"):
        problems.append("git: changes that are not committed")
    if _output("git", "tag", "--list", f"v{version}"):
        problems.append(f"git: the tag v{version} exists; raise __version__")
    return problems


# --- interpreters ---------------------------------------------------------------------------------------


def supported_versions(root: Path = ROOT) -> list[str]:
    """Return the Pythons that setup.cfg names, such as ``["3.10", "3.11"]``."""
    text = (root / "setup.cfg").read_text(encoding="utf-8")
    return re.findall(r"Programming Language :: Python :: (3\.\d+)$", text, re.MULTILINE)


def find_pythons(versions: Sequence[str], given: Mapping[str, str]) -> tuple[list[Python], list[str]]:
    """Find an interpreter of each version: a given one, ``python3.X`` on the path, or the one that runs this.

    Returns:
        The interpreters, and the versions without one.
    """
    found, missing = [], []
    for version in versions:
        candidates = [given.get(version), shutil.which(f"python{version}"), sys.executable]
        working = [path for path in candidates if path and _version_of(path) == version]
        if working:
            found.append(Python(version, working[0]))
        else:
            missing.append(version)
    return found, missing


def _version_of(executable: str) -> str | None:
    """Return the version of an interpreter; None if it does not run, as a link that a version manager has left."""
    program = "import sys; print('{}.{}'.format(*sys.version_info))"
    try:
        run = subprocess.run([executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    except OSError:
        return None
    return run.stdout.strip() if run.returncode == 0 else None


# --- building and trying --------------------------------------------------------------------------------


def build(out: Path) -> dict[str, Path]:
    """Build sdist and wheel into an empty folder; ``{"sdist": ..., "wheel": ...}``."""
    shutil.rmtree(out, ignore_errors=True)
    _run(sys.executable, "-m", "build", "--outdir", str(out), str(ROOT))
    (sdist,), (wheel,) = out.glob("*.tar.gz"), out.glob("*.whl")
    return {"wheel": wheel, "sdist": sdist}


def names_in(file: Path) -> set[str]:
    """Return the names of the files of the package in a wheel or sdist: ``ds_hetero/...``."""
    if file.suffix == ".whl":
        with zipfile.ZipFile(file) as wheel:
            return {name for name in wheel.namelist() if name.startswith("ds_hetero/")}
    with tarfile.open(file) as sdist:
        names = [member.name.partition("/")[2] for member in sdist.getmembers() if not member.isdir()]
    return {name for name in names if name.startswith("ds_hetero/")}


def try_out(python: Python, name: str, file: Path, torch: str | None, *, trains: bool) -> Trial:
    """Install a file into a fresh environment, plan there, and train if ``trains``.

    Args:
        name: "wheel" or "sdist".
        torch: requirement that is installed before, such as ``torch==2.13.0``; None leaves the choice to pip.
    """
    with tempfile.TemporaryDirectory() as folder:
        environment, work = Path(folder, "env"), Path(folder, "work")
        work.mkdir()
        _run(python.executable, "-m", "venv", str(environment))
        bin_folder = environment / "bin"
        pip = (str(bin_folder / "python"), "-m", "pip", "-q", "--disable-pip-version-check", "install")
        began = time.perf_counter()
        _run(*pip, str(file), cwd=work)
        install_s = time.perf_counter() - began
        plan = _try_planning(bin_folder, work)
        training = "not tried"
        if trains:
            if torch is not None:
                _run(*pip, torch, cwd=work)
            _run(*pip, f"{file}[train]", cwd=work)
            training = _try_training(bin_folder, work)
        return Trial(python.version, name, install_s, plan, training)


def _try_planning(bin_folder: Path, work: Path) -> str:
    """Run the README's commands in an environment; return the plan without the times of the search."""
    command, version = str(bin_folder / "ds-hetero"), version_of_package()
    printed = _run(command, "--version", cwd=work)
    if printed != f"ds-hetero {version}\n":
        raise ReleaseError(f"ds-hetero --version prints {printed!r}, not {version}")
    for arguments in ("cards", FIT, PLAN.replace(" --json", " --out plan.html")):
        _run(command, *arguments.split(), cwd=work)
    plan = json.loads(_run(command, *PLAN.split(), cwd=work))
    return json.dumps(_without_times(plan), sort_keys=True)


def _without_times(value: object) -> object:
    """Return plain data without the keys of how long a search took."""
    if isinstance(value, dict):
        return {key: _without_times(inner) for key, inner in value.items() if key != "search_s"}
    return [_without_times(inner) for inner in value] if isinstance(value, list) else value


def _try_training(bin_folder: Path, work: Path) -> str:
    """Run the quick start on one process and on four; return its verdict."""
    script = str(ROOT / "examples" / "quickstart.py")
    reference = ("--reference", str(work / "reference.json"))
    output = ""
    for num_processes in ("1", "4"):
        with socket.socket() as free:
            free.bind(("", 0))
            port = str(free.getsockname()[1])
        launcher = (str(bin_folder / "deepspeed"), "--quiet", "--num_gpus", num_processes, "--no_local_rank")
        output = _run(*launcher, "--master_port", port, script, *QUICK, *reference, cwd=work)
    if "PASS: uneven ranks train as one process" not in output:
        raise ReleaseError(f"the quick start did not say PASS:\n{output[-2000:]}")
    torch = _run(str(bin_folder / "python"), "-c", "import torch; print(torch.__version__)", cwd=work).strip()
    return f"PASS, torch {torch}"


def _clean_environment() -> dict[str, str]:
    """Return the environment without what would let the clone, or a GPU, take part."""
    kept = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV", "COLUMNS")}
    return {**kept, "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore::FutureWarning"}


def _run(*command: str, cwd: Path = ROOT) -> str:
    """Run a command and return its stdout. Raises `ReleaseError` with the end of its output: it failed."""
    run = subprocess.run(
        command,
        cwd=cwd,
        env=_clean_environment(),
        capture_output=True,
        text=True,
        check=False,
    )
    if run.returncode != 0:
        raise ReleaseError(f"{' '.join(command)} ended with {run.returncode}:\n{(run.stdout + run.stderr)[-3000:]}")
    return run.stdout


def _output(*command: str) -> str:
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()


# --- the command ----------------------------------------------------------------------------------------


def main() -> int:
    """Run all steps, print what each has found, and return 1 if anything is missing or wrong."""
    arguments = _parser().parse_args()
    version = version_of_package()
    print(f"ds-hetero {version}", flush=True)
    problems = [*problems_of_tree(), *_problems_of_git(version)]
    given = dict(text.partition("=")[::2] for text in arguments.python)
    tried = arguments.only.split(",") if arguments.only else supported_versions()
    pythons, missing = find_pythons(tried, given)
    problems += [f"Python {name}: left out by --only" for name in supported_versions() if name not in tried]
    problems += [f"Python {name}: no interpreter; install it, or --python {name}=PATH" for name in missing]
    for python in pythons:
        print(f"Python {python.version}: {python.executable}", flush=True)
    try:
        for name, command in _checks(arguments.checks):
            print(f"checking: {name}", flush=True)
            _run(*command)
        files = build(arguments.out)
        for name, file in files.items():
            print(f"{name}: {file.name}, {file.stat().st_size / 1e6:.2f} MB, {len(names_in(file))} files", flush=True)
        unlike = names_in(files["wheel"]) ^ names_in(files["sdist"])
        problems += [f"only in one of wheel and sdist: {name}" for name in sorted(unlike)]
        trials = []
        for python in pythons:
            for name, file in files.items():
                trains = name == "wheel" and python.version in arguments.train.split(",")
                trials.append(try_out(python, name, file, arguments.torch, trains=trains))
                print(_line(trials[-1]), flush=True)
    except ReleaseError as error:
        print(f"FAIL: {error}", file=sys.stderr)
        return 1
    if len({trial.plan for trial in trials}) > 1:
        problems.append("the plan differs between these environments")
    for problem in problems:
        print(f"not ready: {problem}")
    if problems:
        return 1
    if arguments.checks != "full":
        print(f"checks: {arguments.checks}; the rest of .ci/run, and all sweeps, must have passed on this commit")
    if untried := [version for version in supported_versions() if version not in arguments.train.split(",")]:
        print(f"training: not tried on Python {', '.join(untried)}")
    if unfilled := unfilled_urls():
        print(f"to fill in setup.cfg before anything is published: the URLs {', '.join(unfilled)}")
    print(f"ready. Next: git tag -a v{version} -m 'ds-hetero {version}'")
    return 0


def _checks(which: str) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Yield names and commands of the checks that run before anything is built."""
    if which == "full":
        yield "all that CI runs", (".ci/run",)
        yield "all cases of all sweeps", ("bash", "tests/run.sh", "--all")
    elif which == "lint":
        yield "lint, types, layers", (".ci/lint",)


def _line(trial: Trial) -> str:
    return (
        f"Python {trial.python}, {trial.file:5}: installed in {trial.install_s:.0f} s, plans, "
        f"training: {trial.training}"
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tests.release", description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--checks", choices=("full", "lint", "none"), default="full", help="what to run before building"
    )
    parser.add_argument("--out", type=Path, default=ROOT / "dist", help="folder of sdist and wheel; emptied first")
    parser.add_argument("--python", action="append", default=[], metavar="3.X=PATH", help="interpreter of a version")
    parser.add_argument(
        "--train", default=",".join(supported_versions()), help="Pythons that run the training quick start"
    )
    parser.add_argument("--only", metavar="3.X,3.Y", help="Pythons to try, to repeat a part; the result is not ready")
    parser.add_argument("--torch", help="requirement to install before the extra train, such as torch==2.13.0")
    return parser


if __name__ == "__main__":
    sys.exit(main())
