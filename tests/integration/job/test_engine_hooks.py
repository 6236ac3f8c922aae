"""What runs around the engine's methods: one table, in one order, of methods that exist. Budget: 15 s."""

from __future__ import annotations

import ast
from pathlib import Path

import ds_hetero
from tests.support import run_deepspeed

ORDER = {
    "forward": ["note_forward", "find_unit", "record_common_forward", "time_forward", "name_lost_peers"],
    "backward": ["record_call", "time_backward", "name_lost_peers", "scale_loss"],
    "step": [
        "around_step",
        "record_call",
        "take_times",
        "time_step",
        "record_step",
        "name_lost_peers",
        "expect_scaled",
        "forget",
        "check_step",
        "compare_changed",
    ],
    "zero_grad": ["forget"],
    "_backward_prologue": ["begin"],
    "_backward_epilogue": ["note_gradients", "end"],
    "destroy": ["report", "report_prediction"],
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
OF_PIPELINES = {
    "forward": ["record_call", "name_lost_peers", "run_passes"],
    "backward": ["record_call", "keep_books"],
    "step": ["around_step", "record_call", "take_times", "time_step", "name_lost_peers", "expect_passes", "check_step"],
    "destroy": ["report"],
    "set_train_batch_size": ["refuse_batch_sizes"],
    "set_train_micro_batch_size": ["refuse_batch_sizes"],
    "save_checkpoint": ["record_call", "name_lost_peers", "save_pipelines"],
    "module_state_dict": ["frozen_state"],
    "load_checkpoint": ["name_lost_peers", "load_any_plan"],
}


def test_hooks_are_of_methods_that_the_engine_has_and_in_one_order() -> None:
    ((split, of_pipelines, missing, is_documented),) = run_deepspeed(_read_the_table, 1)
    assert split == ORDER
    assert of_pipelines == OF_PIPELINES
    assert not missing
    assert is_documented


def _read_the_table(rank: int) -> tuple[dict[str, list[str]], dict[str, list[str]], list[str], bool]:
    import deepspeed

    from ds_hetero.frameworks.deepspeed.hook_table import HOOKS
    from ds_hetero.frameworks.deepspeed.hooks import SplitEngine
    from ds_hetero.frameworks.deepspeed.names import ATTRIBUTES, PRIVATE_NAMES
    from ds_hetero.frameworks.deepspeed.pipeline.pipelined_engine import PipelinedEngine
    from ds_hetero.frameworks.deepspeed.protocols import Engine

    engine = deepspeed.DeepSpeedEngine
    called = [name for name, kind in Engine.__annotations__.items() if kind.startswith("Callable[")]
    assert len(called) > 10, called
    methods = called + [row.method for row in HOOKS]
    missing = [name for name in methods if not callable(getattr(engine, name, None))]
    known = {name.rpartition(".")[2] for name in PRIVATE_NAMES + ATTRIBUTES}
    private = {name for name in methods if name.startswith("_")}

    def order(kind: type) -> dict[str, list[str]]:
        rows = [row for row in HOOKS if issubclass(kind, row.of)]
        return {m: [row.hook.__name__ for row in rows if row.method == m] for m in {row.method for row in rows}}

    return order(SplitEngine), order(PipelinedEngine), missing, known >= private


def test_the_first_hook_of_a_method_is_the_outermost_and_all_can_be_taken_off() -> None:
    from ds_hetero.frameworks.deepspeed.installer import EngineHooks, Hook, HookedEngine, HookRow

    calls: list[str] = []

    def hook(name: str) -> Hook:
        def around(hooked: HookedEngine, method: Hook, *args: int) -> int:
            calls.append(name)
            result: int = method(*args)
            return result + 1

        return around

    class OtherEngine(HookedEngine):
        """Engines of another kind."""

    class StockEngine:
        def step(self, n: int) -> int:
            calls.append("engine")
            return n

    engine = StockEngine()
    hooked = HookedEngine(engine=engine, clock=None, monitor=None)  # type: ignore[arg-type]
    table = [
        HookRow("step", hook("outer")),
        HookRow("step", hook("other"), OtherEngine),
        HookRow("step", hook("inner")),
    ]
    hooks = EngineHooks(hooked, table)
    assert engine.step(5) == 7
    assert calls == ["outer", "inner", "engine"]
    hooks.take_off()
    assert engine.step(5) == 5


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
    assert setting == {"installer.py"}
