"""What holds for the package as a whole: light to import, layered, public names listed, files in place."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from pathlib import Path

import pytest

import ds_hetero
from ds_hetero import errors
from ds_hetero.common.paths import config_dir
from tests.support import ROOT
from tests.unit.without import run_without

SOURCES = sorted(Path(ds_hetero.__file__).parent.rglob("*.py"))
MODULES = [".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__") for path in SOURCES]
FRAMEWORKS = {"torch", "deepspeed", "transformers", "accelerate"}
# Plans on a laptop without any of them; the contract "planning" in pyproject.toml says so of every import statement.
PLANNING = (
    "baselines",
    "cluster",
    "common",
    "cost",
    "errors",
    "models",
    "planner",
    "plans",
    "schedule",
    "splits",
    "zero",
)
ARITHMETIC = (
    "ds_hetero.gradient_sync",
    "ds_hetero.gradient_sync.buckets",
    "ds_hetero.gradient_sync.chunks",
    "ds_hetero.gradient_sync.parameter_cuts",
    "ds_hetero.gradient_sync.traffic",
)


def test_importing_ds_hetero_is_quick_and_loads_no_framework():
    runs = [_import_in_a_new_process(["ds_hetero"]) for _ in range(3)]
    assert "ds_hetero" in runs[0]["loaded"]
    assert not FRAMEWORKS & set(runs[0]["loaded"])
    assert min(run["seconds"] for run in runs) < 0.3


def test_every_public_name_resolves():
    assert all(getattr(ds_hetero, name) is not None for name in ds_hetero.__all__)
    assert set(errors.__all__) <= set(ds_hetero.__all__) <= set(dir(ds_hetero))
    assert callable(ds_hetero.plan) and callable(ds_hetero.load_cluster)
    with pytest.raises(AttributeError, match="no attribute 'schedule_of'"):
        _ = ds_hetero.schedule_of


def test_every_public_name_of_the_gradient_synchronization_resolves():
    from ds_hetero import gradient_sync

    assert all(getattr(gradient_sync, name).__name__ == name for name in gradient_sync.__all__)
    assert set(gradient_sync._MODULES) == set(gradient_sync.__all__)
    with pytest.raises(AttributeError, match="no attribute 'Lane'"):
        _ = gradient_sync.Lane


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
    assert set(refused) == {"AsymmetricGradientSync", "Handle", "empty_model", "register()"}
    assert {"Group", "Plan", "PlanError", "Schedule", "load_cluster", "plan"} <= set(resolved)
    assert all('pip install "ds-hetero[train]"' in message for message in refused.values())
    assert "not installed: torch, deepspeed, transformers, accelerate" in refused["register()"]


def test_the_planning_half_loads_no_framework():
    planning = [name for name in MODULES if name.count(".") and name.split(".")[1] in PLANNING]
    assert {name.split(".")[1] for name in planning} == set(PLANNING)
    assert not FRAMEWORKS & set(_import_in_a_new_process([*planning, *ARITHMETIC])["loaded"])


def _import_in_a_new_process(modules: list[str]) -> dict:
    program = (
        "import importlib, json, sys, time\n"
        "start = time.perf_counter()\n"
        "for name in sys.argv[1:]: importlib.import_module(name)\n"
        "seconds = time.perf_counter() - start\n"
        "print(json.dumps({'seconds': seconds, 'loaded': sorted({name.partition('.')[0] for name in sys.modules})}))"
    )
    run = subprocess.run(
        [sys.executable, "-c", program, *modules], stdout=subprocess.PIPE, text=True, cwd=ROOT, timeout=60, check=True
    )
    return json.loads(run.stdout)


def test_the_layers_are_kept():
    command = Path(sys.executable).with_name("lint-imports")
    run = subprocess.run([command, "--no-cache"], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert run.returncode == 0, run.stdout + run.stderr


@pytest.mark.parametrize("path", SOURCES, ids=MODULES)
def test_all_lists_the_public_names_of_a_module(path):
    """A name is public when it has no underscore; ruff checks the other way, the order and the docstrings."""
    body = ast.parse(path.read_text()).body
    public = {node.name for node in body if isinstance(node, ast.FunctionDef | ast.ClassDef) and node.name[0] != "_"}
    unlisted = public - set(_value_of_all(body))
    assert not unlisted, f"{path.name} defines {sorted(unlisted)}: list them in __all__, or begin them with _"


def _value_of_all(body: list[ast.stmt]) -> list[str]:
    for node in body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            return ast.literal_eval(node.value)
    return []


def test_ready_configurations_are_where_the_package_looks_for_them():
    assert config_dir().samefile(ROOT / "ds_configs")
    assert (config_dir() / "clusters").is_dir()
    assert (config_dir() / "models").is_dir()
