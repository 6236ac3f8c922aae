"""What this engine builds on in other packages, release by release: signatures and digests of bodies, in a record.

    python -m tests.framework_surface                              # compares what is installed with the record
    python -m tests.framework_surface --record                     # records what is installed
    python -m tests.framework_surface --record deepspeed==0.18.9   # fetches a release, reads its source, records it
    python -m tests.framework_surface --newest                     # compares the newest of the index, pre-releases too
    python -m tests.framework_surface --diff deepspeed             # what changed from release to release

The surface of a package is every name of its ``names.py`` (PRIVATE_NAMES and ATTRIBUTES), every name that ds_hetero
imports from it, and what it reads from DeepSpeed's engine and optimizers. That a name exists says little: of the 98 of
DeepSpeed, 54 bodies differ between 0.18.4 and 0.19.8. A changed signature asks whether the hook still passes every
argument on; a changed body asks for a look, and for the tests that the comparison names. Sources are read and never
imported, so that no release has to be installed. The record is part of ds_hetero: `ds_hetero.engine.surface` compares a
release that is not on it when a job starts.
"""

from __future__ import annotations

import argparse
import ast
import functools
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Iterator, Sequence
from importlib.metadata import version
from pathlib import Path
from types import ModuleType

from ds_hetero.engine import names as of_torch
from ds_hetero.engine.framework_source import ABSENT, Source, Surface, differences, installed
from ds_hetero.engine.surface import nearest_release, read_record, write_record
from ds_hetero.frameworks.accelerate import names as of_accelerate
from ds_hetero.frameworks.deepspeed import names as of_deepspeed
from ds_hetero.frameworks.deepspeed.keys import FAULTS
from ds_hetero.frameworks.transformers import names as of_transformers
from ds_hetero.frameworks.trl import names as of_trl
from tests.support import ROOT

NAMES: dict[str, ModuleType] = {
    names.PACKAGE: names for names in (of_deepspeed, of_transformers, of_accelerate, of_trl, of_torch)
}


def names_of(package: str) -> list[str]:
    """Names of a package that this engine builds on, as ``module:attribute`` or ``module:Class.attribute``."""
    of_keys = [fault.function for fault in FAULTS]
    used = {*listed_names(), *of_keys, *imported_names(), *read_attributes()} - {*of_torch.COMPILED}
    return sorted(name for name in used if re.match(rf"{package}[.:]", name))


def listed_names() -> tuple[str, ...]:
    """Names of all lists, but those of single builds."""
    return tuple(
        name
        for names in NAMES.values()
        for kind in ("PRIVATE_NAMES", "ATTRIBUTES", "IN_SOME_RELEASES", "ARGUMENTS_OF", "OF_FEATURES", "COMPILED")
        for name in getattr(names, kind, ())
    )


def is_private(name: str) -> bool:
    """Whether a part of a name begins with an underscore; ``__init__`` is public."""
    return any(_is_underscored(part) for part in re.split("[.:]", name))


def _is_underscored(word: str) -> bool:
    is_special = word.startswith("__") and word.endswith("__")
    return word.startswith("_") and word.isidentifier() and not is_special


def private_words(package: Path) -> dict[str, list[str]]:
    """Private attributes, imports and names in strings, in the source of a package that does not define them.

    Returns:
        By the last part of the name: the places, as ``file:line``.
    """
    trees = {path: ast.parse(path.read_text()) for path in sorted(package.rglob("*.py")) if path.name != "names.py"}
    own = {word for tree in trees.values() for node in ast.walk(tree) for word in _defined_words(node)}
    found: dict[str, list[str]] = {}
    for path, tree in trees.items():
        of_others = _names_of_others(tree)
        for node in ast.walk(tree):
            for word, is_of_others in _private_words_of(node, of_others):
                if is_of_others or word not in own:
                    found.setdefault(word, []).append(f"{path.relative_to(package)}:{getattr(node, 'lineno', 0)}")
    return found


def _defined_words(node: ast.AST) -> Iterator[str]:
    """Names that a node defines: functions, classes, variables, attributes of ``self``."""
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        yield node.name
    elif isinstance(node, ast.arg):
        yield node.arg
    elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
        yield node.id
    elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and ast.unparse(node.value) == "self":
        yield node.attr


def _names_of_others(tree: ast.Module) -> set[str]:
    """Names that a file has from imports of other packages."""
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.asname or alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and not node.level and not (node.module or "").startswith("ds_hetero"):
            names |= {alias.asname or alias.name for alias in node.names}
    return names


def _private_words_of(node: ast.AST, of_others: set[str]) -> Iterator[tuple[str, bool]]:
    """Private words in a node, each with whether it is an attribute or an import of another package for certain."""
    if isinstance(node, ast.Attribute) and _is_underscored(node.attr):
        root: ast.expr = node
        while isinstance(root, ast.Attribute):
            root = root.value
        yield node.attr, isinstance(root, ast.Name) and root.id in of_others
    elif isinstance(node, ast.ImportFrom) and not node.level and not (node.module or "").startswith("ds_hetero"):
        for word in (*(node.module or "").split("."), *(alias.name for alias in node.names)):
            if _is_underscored(word):
                yield word, True
    elif isinstance(node, ast.Constant) and isinstance(node.value, str) and _is_underscored(node.value):
        yield node.value, False


@functools.cache
def imported_names() -> frozenset[str]:
    """Names that the source of ds_hetero imports from the packages; imports for types alone do not count."""
    found = set()
    for path in (ROOT / "ds_hetero").rglob("*.py"):
        for node in _imports(ast.parse(path.read_text()).body):
            if not node.level and node.module:
                found |= {f"{node.module}:{alias.name}" for alias in node.names}
    return frozenset(found)


@functools.cache
def read_attributes() -> frozenset[str]:
    """Attributes of DeepSpeed's engine by the protocol `Engine`, and those that our optimizers inherit."""
    deepspeed = ROOT / "ds_hetero" / "frameworks" / "deepspeed"
    found = {f"deepspeed.runtime.engine:DeepSpeedEngine.{name}" for name in _of_protocol(deepspeed / "protocols.py")}
    for path in deepspeed.rglob("*.py"):
        tree = ast.parse(path.read_text())
        classes = {each.name: each for each in tree.body if isinstance(each, ast.ClassDef)}
        for made in classes.values():
            for base in filter(None, (_OPTIMIZERS.get(ast.unparse(each)) for each in made.bases)):
                found |= {f"{base}.{name}" for name in _read_from_self(made)}
    return frozenset(found)


_OPTIMIZERS = {
    "DeepSpeedZeroOptimizer": "deepspeed.runtime.zero.stage_1_and_2:DeepSpeedZeroOptimizer",
    "DeepSpeedZeroOptimizer_Stage3": "deepspeed.runtime.zero.stage3:DeepSpeedZeroOptimizer_Stage3",
}
"""Classes of DeepSpeed that ds_hetero derives others from."""


def _of_protocol(path: Path) -> set[str]:
    (engine,) = [
        each for each in ast.parse(path.read_text()).body if isinstance(each, ast.ClassDef) and each.name == "Engine"
    ]
    annotated = [each.target for each in engine.body if isinstance(each, ast.AnnAssign)]
    methods = {each.name for each in engine.body if isinstance(each, ast.FunctionDef)}
    return methods | {each.id for each in annotated if isinstance(each, ast.Name)}


def _read_from_self(made: ast.ClassDef) -> set[str]:
    """Attributes that the methods of a class read from ``self`` and neither set nor define."""
    own = {each.name for each in made.body if isinstance(each, ast.FunctionDef)}
    read = set()
    for node in ast.walk(made):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "self":
            (read if isinstance(node.ctx, ast.Load) else own).add(node.attr)
    return read - own


def _imports(body: Sequence[ast.stmt]) -> Iterator[ast.ImportFrom]:
    """Imports in a body and in the functions and branches of it, without those for types alone."""
    for node in body:
        if isinstance(node, ast.ImportFrom):
            yield node
        elif isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            yield from _imports(node.orelse)
        else:
            for branch in ("body", "orelse", "finalbody", "handlers"):
                yield from _imports(getattr(node, branch, []))


TESTS = {
    "deepspeed.runtime.zero.stage_1_and_2:": (
        "tests/integration/zero/test_zero12.py",
        "tests/integration/zero/test_zero12_checkpoints.py",
        "tests/integration/zero/test_rare_parameters.py",
    ),
    "deepspeed.runtime.zero.": (
        "tests/integration/zero/test_zero3.py",
        "tests/integration/zero/test_zero3_checkpoints.py",
        "tests/integration/zero/test_rare_parameters.py",
    ),
    "deepspeed.runtime.sequence_parallel.": ("tests/integration/trainer/test_accelerate.py",),
    "deepspeed.runtime.fp16.": ("tests/integration/zero/test_half_without_zero.py",),
    "deepspeed.comm.": ("tests/integration/job/test_undo.py", "tests/integration/loops/test_plain_loop.py"),
    "deepspeed": (
        "tests/integration/loops/test_plain_loop.py",
        "tests/integration/loops/test_step_contract.py",
        "tests/integration/zero/test_checkpoint_saving.py",
        "tests/integration/zero/test_resume.py",
    ),
    "transformers.trainer": ("tests/integration/trainer/test_trainer.py",),
    "transformers:Trainer.": (
        "tests/integration/trainer/test_trainer.py",
        "tests/integration/trainer/test_trainer_arguments.py",
        "tests/integration/trainer/test_trainer_evaluation.py",
    ),
    "transformers": ("tests/integration/models/test_features.py", "tests/integration/models/test_models.py"),
    "accelerate": (
        "tests/integration/trainer/test_accelerate.py",
        "tests/integration/trainer/test_accelerate_evaluation.py",
    ),
    "trl": ("tests/integration/trainer/test_trl.py", "tests/integration/trainer/test_trl_completions.py"),
    "torch": (
        "tests/dist",
        "tests/integration/loops/test_plain_loop.py",
        "tests/integration/pipelines/test_pipelines.py",
    ),
}
"""Tests that stand for names, by the beginning of a name; the longest counts."""


def stand_for(name: str) -> tuple[str, ...]:
    """Tests to run where what a name stands for has changed."""
    return TESTS[max((begin for begin in TESTS if name.startswith(begin)), key=len)]


def fetch(requirement: str, folder: Path) -> Source:
    """Fetch one release from pip's index, without what it needs, and unpack it.

    Args:
        requirement: such as ``deepspeed==0.18.9``.
        folder: an empty one.

    Raises:
        subprocess.CalledProcessError: the index does not have it.
    """
    package = requirement.partition("==")[0]
    pip = [
        sys.executable,
        "-m",
        "pip",
        "-qq",
        "--disable-pip-version-check",
        "download",
        "--no-deps",
        "--no-build-isolation",
    ]
    kind = ["--only-binary", ":all:"] if package != "deepspeed" else ["--no-binary", ":all:"]  # DeepSpeed has no wheels
    kind += [] if "==" in requirement else ["--pre"]
    subprocess.run([*pip, *kind, "--dest", str(folder), requirement], check=True)
    (archive,) = folder.iterdir()
    if archive.suffix == ".whl":
        zipfile.ZipFile(archive).extractall(folder / "source")
    else:
        with tarfile.open(archive) as tar:
            tar.extractall(folder / "source", filter="data")
    return Source(next(path.parent for path in sorted((folder / "source").rglob(f"{package}/__init__.py"))))


def kept_source(requirement: str) -> Source:
    """Return the source of a release, kept in .cache/releases: a new name is looked up in all releases."""
    folder, package = RELEASES / requirement, requirement.partition("==")[0]
    if not folder.exists():
        RELEASES.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory() as fetched:
            shutil.copytree(fetch(requirement, Path(fetched)).folder, folder / package, ignore=_NOT_SOURCE)
    return Source(folder / package)


RELEASES = ROOT / ".cache" / "releases"
_NOT_SOURCE = shutil.ignore_patterns("*.so", "*.so.*", "*.cu", "*.h", "*.cpp")


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--record", nargs="*", metavar="PACKAGE==RELEASE", help="what to record; without any: what is installed"
    )
    parser.add_argument("--newest", nargs="*", metavar="PACKAGE", help="compare the index's newest; of these or all")
    parser.add_argument("--diff", choices=NAMES, help="print what changed from release to release in the record")
    options = parser.parse_args()
    record = read_record()
    if options.diff:
        _show_changes(record[options.diff])
        return 0
    if options.newest is not None:
        return sum(_compare_newest(package, record[package]) for package in options.newest or NAMES)
    if options.record is None:
        return sum(_compare(package, record[package], release_of(package), installed(package)) for package in NAMES)
    for requirement in options.record:
        package, _, release = requirement.partition("==")
        record.setdefault(package, {})[release] = kept_source(requirement).surface(names_of(package))
        print(f"{requirement}: recorded", flush=True)
    for package in () if options.record else NAMES:
        record.setdefault(package, {})[release_of(package)] = installed(package).surface(names_of(package))
    write_record({package: _without_unused(package, releases) for package, releases in record.items()})
    return 0


def _without_unused(package: str, releases: dict[str, Surface]) -> dict[str, Surface]:
    """Leave out names that are no longer used."""
    used = {*names_of(package)}
    return {
        release: {name: state for name, state in surface.items() if name in used}
        for release, surface in releases.items()
    }


def release_of(package: str) -> str:
    """Release of what is installed, without its build."""
    return version(package).partition("+")[0]


def _compare_newest(package: str, record: dict[str, Surface]) -> int:
    with tempfile.TemporaryDirectory() as folder:
        source = fetch(package, Path(folder))
        release = next(path.name.split("-")[1] for path in Path(folder).iterdir() if path.is_file())
        return _compare(package, record, release.removesuffix(".tar.gz"), source)


def _compare(package: str, record: dict[str, Surface], release: str, source: Source) -> int:
    """Print how a release differs from the nearest on record; return 1 if it does."""
    release = release.partition("+")[0]
    nearest, now = nearest_release(record, release), source.surface(names_of(package))
    lines = differences(record[nearest], now)
    print(f"{package} {release} beside the record of {nearest}: {len(lines)} of {len(now)} names differ")
    for line in lines:
        print(f"  {line}")
    for test in sorted({test for line in lines for test in stand_for(line.partition(": ")[0])}):
        print(f"  run {test}")
    return bool(lines)


def _show_changes(releases: dict[str, Surface]) -> None:
    before: Surface | None = None
    for release, surface in releases.items():
        absent = sum(state == ABSENT for state in surface.values())
        print(f"{release}: {len(surface)} names, {absent} absent")
        for line in differences(before, surface) if before else ():
            print(f"  {line}")
        before = surface


if __name__ == "__main__":
    sys.exit(main())
