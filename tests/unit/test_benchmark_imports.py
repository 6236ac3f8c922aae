"""Modules of the benchmarks import each other without circles, and what is there, also inside functions."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

from tests.support import ROOT

PATHS = {
    ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path
    for path in (ROOT / "benchmarks").rglob("*.py")
}


def test_benchmarks_have_no_circle_of_imports() -> None:
    imports = {module: set(_imported(module)) for module in PATHS}
    assert imports["benchmarks.elastic.loops"] == {"benchmarks.elastic.small_model"}
    TopologicalSorter(imports).prepare()  # raises CycleError, which names the circle


def test_what_benchmarks_import_is_there() -> None:
    """Imports inside functions fail only when they run, which on a rented GPU is too late."""
    missing = [
        f"{module}: from {source} import {name}"
        for module, path in PATHS.items()
        for source, name in _names_from_here(path)
        if not _is_there(source, name)
    ]
    assert missing == []


def _names_from_here(path: Path) -> Iterator[tuple[str, str]]:
    """Module and name of every ``from ... import`` of the package, the benchmarks and the tests."""
    for node in ast.walk(ast.parse(path.read_text())):
        module = node.module if isinstance(node, ast.ImportFrom) else None
        if module is not None and module.split(".")[0] in ("ds_hetero", "benchmarks", "tests"):
            yield from ((module, alias.name) for alias in node.names)


def _is_there(source: str, name: str) -> bool:
    folder = ROOT.joinpath(*source.split("."))
    if folder.is_dir():
        if (folder / f"{name}.py").exists() or (folder / name / "__init__.py").exists():
            return True
        file = folder / "__init__.py"
    else:
        file = folder.with_suffix(".py")
    if not file.exists():
        return False
    names = _names_of(file)
    return name in names or "__getattr__" in names  # which finds names when they are asked for


@cache
def _names_of(file: Path) -> frozenset[str]:
    """What a module binds outside functions and classes."""
    names, todo = set(), list(ast.parse(file.read_text()).body)
    while todo:
        node = todo.pop()
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            names.add(node.name)
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            names |= {alias.asname or alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, (ast.If, ast.Try, ast.With, ast.For)):
            todo += ast.iter_child_nodes(node)
        else:
            names |= {each.id for each in ast.walk(node) if isinstance(each, ast.Name)}
    return frozenset(names)


def _imported(module: str) -> Iterator[str]:
    for node in ast.walk(ast.parse(PATHS[module].read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in PATHS)
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            for alias in node.names:
                submodule = f"{node.module}.{alias.name}"
                yield from [name for name in (submodule, node.module) if name in PATHS][:1]
