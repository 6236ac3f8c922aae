"""What runs around the engine's methods: one table, in one order, of methods that exist. Budget: 15 s."""

from __future__ import annotations

import ast
import inspect
from pathlib import Path
from types import SimpleNamespace

import pytest

import ds_hetero
from tests.support import run_deepspeed

ORDER = {
    "forward": ["record_common_forward", "time_forward", "name_lost_peers"],
    "backward": ["record_call", "time_backward", "name_lost_peers", "scale_loss"],
    "step": ["record_call", "time_step", "record_step", "name_lost_peers", "expect_scaled_loss"],
    "destroy": ["report_times", "report_prediction"],
    "set_train_batch_size": ["refuse_batch_sizes"],
    "set_train_micro_batch_size": ["refuse_batch_sizes"],
    "save_checkpoint": ["record_call", "name_lost_peers", "save_checkpoint"],
    "_copy_recovery_script": ["copy_script_last"],
    "_load_checkpoint": ["name_lost_peers", "load_checkpoint", "raise_on_all_ranks", "examine"],
    "_load_zero_checkpoint": ["load_any_layout", "load_state"],
    "load_module_state_dict": ["load_frozen_parameters"],
    "_get_all_ckpt_names": ["list_model_files"],
    "_get_param_fragment_func": ["equal_shard"],
}


def test_hooks_are_of_methods_that_the_engine_has_and_in_one_order() -> None:
    ((order, missing, is_documented),) = run_deepspeed(_read_the_table, 1)
    assert order == ORDER
    assert not missing
    assert is_documented


def _read_the_table(rank: int) -> tuple[dict[str, list[str]], list[str], bool]:
    import deepspeed

    from ds_hetero.integrations.deepspeed.engine import PRIVATE_NAMES
    from ds_hetero.integrations.deepspeed.hooks import HOOKS
    from ds_hetero.integrations.deepspeed.protocols import Engine

    engine = deepspeed.DeepSpeedEngine
    members = {name: member for name, member in vars(Engine).items() if not name.startswith("__")}
    methods = [name for name, member in members.items() if inspect.isfunction(member)]
    missing = [name for name in (*HOOKS, *methods) if not callable(getattr(engine, name, None))]
    known = {name.rpartition(".")[2] for name in PRIVATE_NAMES}
    private = [name for name in (*HOOKS, *methods) if name.startswith("_")]
    return {name: [hook.__name__ for hook in hooks] for name, hooks in HOOKS.items()}, missing, known >= set(private)


def test_the_first_hook_of_a_method_is_the_outermost(monkeypatch: pytest.MonkeyPatch) -> None:
    from ds_hetero.integrations.deepspeed import hooks

    calls: list[str] = []

    def hook(name: str) -> hooks.Hook:
        def around(hooked: hooks.HookedEngine, method: hooks.Hook, *args: int) -> int:
            calls.append(name)
            result: int = method(*args)
            return result + 1

        return around

    engine = SimpleNamespace(step=lambda n: calls.append("engine") or n)
    monkeypatch.setattr(hooks, "HOOKS", {"step": (hook("outer"), hook("inner"))})
    hooks.install_hooks(SimpleNamespace(engine=engine))  # type: ignore[arg-type]
    assert engine.step(5) == 7
    assert calls == ["outer", "inner", "engine"]


def test_no_other_file_replaces_a_method_of_an_engine() -> None:
    """Data of an engine may be set elsewhere; its methods, and names that are not known here, only by the table."""
    data = {"_config", "checkpoint_engine", "dp_world_size", "seq_parallel_group", "tput_timer"}
    root = Path(ds_hetero.__file__).parent
    replaced = {
        (path.name, target.attr)
        for path in root.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Assign)
        for target in node.targets
        if isinstance(target, ast.Attribute) and isinstance(target.value, ast.Name) and target.value.id == "engine"
        if target.attr not in data
    }
    setting = {path.name for path in root.rglob("*.py") if "setattr(hooked.engine" in path.read_text()}
    assert not replaced
    assert setting == {"hooks.py"}
