"""What runs around the engine's methods: one table, in one order, of methods that exist. Budget: 15 s."""

from __future__ import annotations

import ast
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import ds_hetero
from tests.support import run_deepspeed

ORDER = {
    "forward": ["note_forward", "around_forward", "record_common_forward", "time_forward", "name_lost_peers"],
    "backward": ["record_call", "time_backward", "name_lost_peers", "scale_loss"],
    "step": [
        "around_step",
        "record_call",
        "take_times",
        "time_step",
        "record_step",
        "name_lost_peers",
        "expect_scaled",
        "end_step",
        "check_step",
        "compare_changed",
    ],
    "zero_grad": ["end_step"],
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

    from ds_hetero.frameworks.deepspeed.names import ATTRIBUTES, PRIVATE_NAMES
    from ds_hetero.frameworks.deepspeed.protocols import Engine

    engine = deepspeed.DeepSpeedEngine
    called = [name for name, kind in Engine.__annotations__.items() if kind.startswith("Callable[")]
    assert len(called) > 10, called
    split, of_pipelines = _hooks_with_all_parts()
    methods = called + [row.method for row in split + of_pipelines]
    missing = [name for name in methods if not callable(getattr(engine, name, None))]
    known = {name.rpartition(".")[2] for name in PRIVATE_NAMES + ATTRIBUTES}
    private = {name for name in methods if name.startswith("_")}

    def order(rows: list[Any]) -> dict[str, list[str]]:
        return {m: [row.hook.__name__ for row in rows if row.method == m] for m in {row.method for row in rows}}

    return order(split), order(of_pipelines), missing, known >= private


def _hooks_with_all_parts() -> tuple[list[Any], list[Any]]:
    """The tables of engines that have every part; hooks are only named here, so that parts need no content."""
    from ds_hetero.engine.trained.unlike_batches import UnlikeBatches
    from ds_hetero.frameworks.deepspeed.elastic import ElasticEngine
    from ds_hetero.frameworks.deepspeed.hook_table import hooks_of_pipelines, hooks_of_replica
    from ds_hetero.frameworks.deepspeed.losses import scaling_of
    from ds_hetero.frameworks.deepspeed.pipeline.pipelined_engine import PipelinedEngine
    from ds_hetero.frameworks.deepspeed.replica_engine import ReplicaEngine
    from ds_hetero.frameworks.deepspeed.zero.stage3_checkpoint import Stage3Checkpoints
    from ds_hetero.job.monitor import StepMonitor
    from ds_hetero.runtime.step_clock import StepClock

    def empty(kind: type) -> Any:
        return object.__new__(kind)

    of_all: Any = {
        "engine": SimpleNamespace(),
        "clock": empty(StepClock),
        "monitor": empty(StepMonitor),
        "elastic": empty(ElasticEngine),
    }
    trained: Any = SimpleNamespace(batches=empty(UnlikeBatches), losses=SimpleNamespace(), sequences=None)
    replica = ReplicaEngine(
        **of_all,
        trained=trained,
        prediction_check=Any,
        scaling=scaling_of(trained),
        stage3=empty(Stage3Checkpoints),
    )
    of_stages: Any = dict.fromkeys(("plan", "stage", "runner", "groups", "outputs_with"))
    return hooks_of_replica(replica), hooks_of_pipelines(PipelinedEngine(**of_all, **of_stages))


def test_the_first_hook_of_a_method_is_the_outermost_and_all_can_be_taken_off() -> None:
    from ds_hetero.frameworks.deepspeed.hook_makers import EngineHooks, Hook, HookRow

    calls: list[str] = []

    def hook(name: str) -> Hook:
        def around(method: Hook, *args: int) -> int:
            calls.append(name)
            result: int = method(*args)
            return result + 1

        return around

    class StockEngine:
        def step(self, n: int) -> int:
            calls.append("engine")
            return n

    engine: Any = StockEngine()
    hooks = EngineHooks(engine, [HookRow("step", hook("outer")), HookRow("step", hook("inner"))])
    assert engine.step(5) == 7
    assert calls == ["outer", "inner", "engine"]
    hooks.remove()
    assert engine.step(5) == 5


def test_no_other_file_replaces_a_method_of_an_engine() -> None:
    """Data of an engine may be set elsewhere; its methods, and names that are not known here, only by the table."""
    data = {"_config", "checkpoint_engine", "dp_world_size", "seq_parallel_group", "tput_timer"}
    data |= {"enable_backward_allreduce", "param_names"}
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
    setting = {path.name for path in root.rglob("*.py") if "setattr(engine, row.method" in path.read_text()}
    assert not replaced
    assert setting == {"hook_makers.py"}
