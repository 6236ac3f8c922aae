"""Modules of the benchmarks import each other without circles, also inside functions."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from graphlib import TopologicalSorter

from tests.support import ROOT

PATHS = {
    ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path
    for path in (ROOT / "benchmarks").rglob("*.py")
}


def test_benchmarks_have_no_circle_of_imports() -> None:
    imports = {module: set(_imported(module)) for module in PATHS}
    assert imports["benchmarks.elastic.loops"] == {"benchmarks.elastic.small_model"}
    TopologicalSorter(imports).prepare()  # raises CycleError, which names the circle


def _imported(module: str) -> Iterator[str]:
    for node in ast.walk(ast.parse(PATHS[module].read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in PATHS)
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            for alias in node.names:
                submodule = f"{node.module}.{alias.name}"
                yield from [name for name in (submodule, node.module) if name in PATHS][:1]
