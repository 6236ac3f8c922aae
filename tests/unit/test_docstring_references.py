"""A reference in docstrings and comments of the package finds what it names.

One backtick is a reference, as in Sphinx; two are code that stands for itself. A reference is one of these:

    a command            `python -m benchmarks.kernels`, `ds-hetero profile`: the module or the command exists
    a full name          `ds_hetero.batch.routes`, `benchmarks.real_cards`, `torch.autograd.grad`: it can be found
    a name in scope      of the same module (a class, an argument, an attribute), or of a module beside it
    a name that is once  of a class or function with no twin in the package, or of a module, with members behind it

So a name that is moved or renamed takes its references along.
"""

from __future__ import annotations

import ast
import io
import pkgutil
import re
import tokenize
from collections import defaultdict
from collections.abc import Iterator
from functools import cache

import pytest

from ds_hetero.cli.app import COMMANDS
from tests.support import ROOT
from tests.unit.test_package import MODULES, SOURCES, TREES

PATHS = dict(zip(MODULES, SOURCES, strict=True))
FRAMEWORKS = ("accelerate", "deepspeed", "math", "numpy", "os", "torch", "transformers", "trl")
REFERENCE = re.compile(r"(?<!`)`([^`]+)`(?!`)")


def test_references_are_found_and_slips_are_not() -> None:
    module = "ds_hetero.batch.ring_steps"
    found = ["make_rings", "Ring.calls", "routes", "routes.Round", "ds_hetero.batch.routes", "torch.autograd.grad"]
    found += ["python -m benchmarks.kernels --quick", "ds-hetero profile", "AsymmetricGradientSync.start"]
    slips = ["make_wheels", "Ring.spokes", "routes.Square", "ds_hetero.batch.roads", "torch.autograd.graph_of"]
    slips += ["python -m benchmarks.nothing", "ds-hetero fly", "AsymmetricGradientSync.stopped"]
    assert [name for name in found if not _resolves(name, module)] == []
    assert [name for name in slips if _resolves(name, module)] == []


# References that do not resolve yet. The list only shrinks: who mends one removes its line.
STALE: dict[str, set[str]] = {}


@pytest.mark.parametrize("module", MODULES)
def test_every_reference_in_docstrings_and_comments_resolves(module: str) -> None:
    assert {where: name for where, name in _stale(module) if name not in STALE.get(module, ())} == {}


def test_the_list_of_stale_references_shrinks() -> None:
    still = {module: {name for _, name in _stale(module)} for module in STALE if module in TREES}
    mended = {module: names - still.get(module, set()) for module, names in STALE.items()}
    assert {module: names for module, names in mended.items() if names} == {}


def _stale(module: str) -> list[tuple[str, str]]:
    """References that name nothing, each behind its file and line."""
    path = PATHS[module].relative_to(ROOT)
    return [
        (f"{path}:{line}", name)
        for line, text in _texts(module)
        for name in _references(text)
        if not _resolves(name, module)
    ]


def _texts(module: str) -> Iterator[tuple[int, str]]:
    """Docstrings and comments of a module, each with its line."""
    for node in ast.walk(TREES[module]):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            yield node.lineno, node.value.value
    for token in tokenize.generate_tokens(io.StringIO(PATHS[module].read_text()).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], token.string


def _references(text: str) -> list[str]:
    without_code = re.sub(r"```.*?```|``.*?``", "", text, flags=re.DOTALL)
    return [" ".join(reference.split()) for reference in REFERENCE.findall(without_code)]


def _resolves(reference: str, module: str) -> bool:
    if " " in reference:
        return _is_command(reference)
    names = reference.split(".")
    if names[0] == "ds_hetero":
        return _is_full_name(names)
    if names[0] in ("benchmarks", "tests"):
        return _is_file("/".join(names))
    if names[0] in FRAMEWORKS and len(names) > 1:
        return _can_be_imported(reference)
    return _is_in_scope(names, module) or _is_once_in_the_package(names)


def _is_command(text: str) -> bool:
    program, *words = text.split()
    if program == "ds-hetero":
        return words[0] in COMMANDS
    return program == "python" and words[0] == "-m" and _is_file(words[1].replace(".", "/"))


def _is_file(path: str) -> bool:
    return (ROOT / path).with_suffix(".py").is_file() or (ROOT / path).is_dir()


def _is_full_name(names: list[str]) -> bool:
    """A module, or what it defines; of what the package exports lazily, members are not followed."""
    size = next(size for size in range(len(names), 0, -1) if ".".join(names[:size]) in TREES)
    module = ".".join(names[:size])
    return all(name in _names(module) for name in names[size:])


def _can_be_imported(reference: str) -> bool:
    try:
        pkgutil.resolve_name(reference)
    except (ImportError, AttributeError):
        return False
    return True


def _is_in_scope(names: list[str], module: str) -> bool:
    """Every name occurs in the code of this module; or the first one is a module beside it, and the rest are its."""
    if set(names) <= _names(module):
        return True
    folders = module, module.rpartition(".")[0]
    return any(_is_full_name([*folder.split("."), *names]) for folder in folders if f"{folder}.{names[0]}" in TREES)


def _is_once_in_the_package(names: list[str]) -> bool:
    first, *members = names
    places = _places()[first]
    return len(places) == 1 and set(members) <= _names(places[0])


@cache
def _places() -> dict[str, list[str]]:
    """Modules by their last name, and by the classes and functions that they define."""
    places = defaultdict(list)
    for module, tree in TREES.items():
        places[module.rpartition(".")[2]].append(module)
        for node in tree.body:
            if isinstance(node, ast.ClassDef | ast.FunctionDef):
                places[node.name].append(module)
    return places


@cache
def _names(module: str) -> frozenset[str]:
    """Names that occur in the code of a module."""
    names = set()
    for node in ast.walk(TREES[module]):
        match node:
            case ast.ClassDef(name=name) | ast.FunctionDef(name=name) | ast.Name(id=name) | ast.Attribute(attr=name):
                names.add(name)
            case ast.arg(arg=name) | ast.keyword(arg=str(name)):
                names.add(name)
            case ast.alias(name=name, asname=other):
                names.add((other or name).rpartition(".")[2])
    return frozenset(names)
