"""Private names of other packages: every one that is relied on is listed.

Whether those listed exist is looked up in tests/integration/job/test_registration.py.
"""

from __future__ import annotations

import ast
from types import ModuleType

import pytest

from ds_hetero.engine import names as of_torch
from ds_hetero.frameworks.accelerate import names as of_accelerate
from ds_hetero.frameworks.deepspeed import names as of_deepspeed
from ds_hetero.frameworks.transformers import names as of_transformers
from ds_hetero.frameworks.trl import names as of_trl
from tests.support import ROOT

NAMES = {names.PACKAGE: names for names in (of_accelerate, of_deepspeed, of_torch, of_transformers, of_trl)}
PACKAGE = ROOT / "ds_hetero"


@pytest.mark.parametrize("folder", ["accelerate", "deepspeed", "transformers", "trl"])
def test_every_private_attribute_that_an_adapter_reads_of_another_object_is_listed(folder: str) -> None:
    trees = [ast.parse(path.read_text()) for path in sorted((PACKAGE / "frameworks" / folder).rglob("*.py"))]
    # Trainers of TRL are transformers' Trainers, and are met as such.
    listing = (NAMES[folder], of_torch, *((of_trl,) if folder == "transformers" else ()))
    listed = {name.rpartition(".")[2] for names in listing for name in _all_of(names)}
    read = {node.attr for tree in trees for node in ast.walk(tree) if _is_private(node) and not _is_own(node)}
    assert read - listed - {"_C", "_fields"} == set()  # of torch, checked by what is read of it; of named tuples


def _is_private(node: ast.AST) -> bool:
    return isinstance(node, ast.Attribute) and node.attr.startswith("_") and not node.attr.startswith("__")


def _is_own(node: ast.AST) -> bool:
    """Whether an attribute is looked up on ``self``, or on ``super()`` by the method of that name that replaces it."""
    base = ast.unparse(node.value) if isinstance(node, ast.Attribute) else ""
    return base in ("self", "cls", "super()")


def _all_of(names: ModuleType) -> tuple[str, ...]:
    return (*names.PRIVATE_NAMES, *names.ATTRIBUTES)
