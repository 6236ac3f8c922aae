"""What holds for the package as a whole: light to import, layered, public names listed, files in place."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

import pytest

import ds_hetero
from ds_hetero import errors
from ds_hetero.common.reading import config_dir
from tests.support import ROOT
from tests.unit.without import run_without

SOURCES = sorted(Path(ds_hetero.__file__).parent.rglob("*.py"))
MODULES = [".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__") for path in SOURCES]
TREES = {module: ast.parse(path.read_text()) for module, path in zip(MODULES, SOURCES, strict=True)}
FRAMEWORKS = {"torch", "deepspeed", "transformers", "accelerate"}
# Plans on a laptop without any of them; the contract "planning" in pyproject.toml says so of every import statement.
PLANNING = (
    "batch",
    "cluster",
    "common",
    "cost",
    "decision",
    "errors",
    "models",
    "planner",
    "reporting",
    "sharding",
    "values",
)


def test_importing_ds_hetero_loads_no_framework_and_little_else():
    loaded = _import_in_a_new_process(["ds_hetero"])
    assert "ds_hetero" in loaded
    assert not {*FRAMEWORKS, "numpy", "scipy", "pydantic", "rich", "click"} & loaded


def test_every_public_name_resolves():
    assert all(getattr(ds_hetero, name) is not None for name in ds_hetero.__all__)
    assert {name for name in vars(errors) if name.endswith("Error")} <= set(ds_hetero.__all__) <= set(dir(ds_hetero))
    assert callable(ds_hetero.plan) and callable(ds_hetero.load_cluster)
    with pytest.raises(AttributeError, match="no attribute 'schedule_of'"):
        _ = ds_hetero.schedule_of


def test_every_public_name_of_the_gradient_synchronization_resolves():
    from ds_hetero import gradient_sync

    assert all(getattr(gradient_sync, name).__name__ == name for name in gradient_sync.__all__)


def test_planning_takes_the_base_installation_and_training_names_what_is_missing():
    program = (
        "import json, ds_hetero\n"
        "from ds_hetero.errors import DependencyError\n"
        "resolved, refused = [], {}\n"
        "for name in ds_hetero.__all__:\n"
        "    try: resolved.append(getattr(ds_hetero, name) and name)\n"
        "    except DependencyError as error: refused[name] = str(error)\n"
        "try: ds_hetero.register()\n"
        "except DependencyError as error: refused['register()'] = str(error)\n"
        "print(json.dumps([resolved, refused]))"
    )
    resolved, refused = json.loads(run_without(FRAMEWORKS, program).stdout)
    assert set(refused) == {"AsymmetricGradientSync", "Handle", "empty_model", "register", "register()"}
    assert {"Group", "Plan", "PlanError", "Schedule", "load_cluster", "plan"} <= set(resolved)
    assert all('pip install "ds-hetero[train]"' in message for message in refused.values())
    assert "not installed: torch, deepspeed, transformers, accelerate" in refused["register()"]


def test_the_planning_half_loads_no_framework():
    planning = [name for name in MODULES if name.count(".") and name.split(".")[1] in PLANNING]
    assert {name.split(".")[1] for name in planning} == set(PLANNING)
    assert not FRAMEWORKS & _import_in_a_new_process(planning)


def _import_in_a_new_process(modules: list[str]) -> set[str]:
    """Packages that a new process has loaded after these modules."""
    program = (
        "import importlib, json, sys\n"
        "for name in sys.argv[1:]: importlib.import_module(name)\n"
        "print(json.dumps(sorted({name.partition('.')[0] for name in sys.modules})))"
    )
    run = subprocess.run(
        [sys.executable, "-c", program, *modules], stdout=subprocess.PIPE, text=True, cwd=ROOT, timeout=300, check=True
    )
    return set(json.loads(run.stdout))


def test_the_layers_are_kept():
    command = Path(sys.executable).with_name("lint-imports")
    run = subprocess.run([command, "--no-cache"], cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert run.returncode == 0, run.stdout + run.stderr


# Functions that modules of one kind have under one name.
INTERFACES = {
    "install": "of an adapter or of a part of the engine: makes its replacements, which `Patches` undoes",
    "main": "of a program",
    "plan": "the command, and the function that it calls",
    "replan": "the command, and the function that it calls",
}


def test_a_class_or_a_function_has_a_name_of_its_own() -> None:
    modules = defaultdict(list)
    for module, tree in TREES.items():
        for node in tree.body:
            if isinstance(node, ast.ClassDef | ast.FunctionDef) and node.name[0] != "_":
                modules[node.name].append(module)
    assert {name: where for name, where in modules.items() if len(where) > 1 and name not in INTERFACES} == {}
    assert [name for name in INTERFACES if len(modules[name]) < 2] == []


def test_only_packages_list_their_names():
    leaves = [module for module, path in zip(MODULES, SOURCES, strict=True) if path.name != "__init__.py"]
    assert [module for module in leaves if any(map(_assigns_all, TREES[module].body))] == []


def _assigns_all(node: ast.stmt) -> bool:
    return isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__"


def test_ready_configurations_are_where_the_package_looks_for_them():
    assert config_dir().samefile(ROOT / "ds_configs")
    assert (config_dir() / "clusters").is_dir()
    assert (config_dir() / "models").is_dir()
