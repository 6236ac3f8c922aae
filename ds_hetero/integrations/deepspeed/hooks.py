"""What runs around the methods of DeepSpeed's engine, and in which order: `HOOKS`, one table.

A hook is a function ``hook(job, method, *args, **kwargs)`` that is called in the place of an engine's method. It calls
``method``, which is the next hook or the engine's own, and returns what the caller of the engine gets. This is the only
file that replaces methods of an engine.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from ds_hetero.errors import ConfigError
from ds_hetero.integrations.deepspeed.checkpoints import expect_one_save, load_any_layout, raise_on_all_ranks
from ds_hetero.integrations.deepspeed.losses import LossScaling
from ds_hetero.integrations.deepspeed.protocols import Engine
from ds_hetero.integrations.deepspeed.saving import copy_script_last, save_whole
from ds_hetero.integrations.deepspeed.zero.stage3_checkpoint import Stage3Checkpoints
from ds_hetero.integrations.transformers.sharded_model import ShardedModel
from ds_hetero.integrations.whole_model import WholeModel
from ds_hetero.job.monitor import StepMonitor
from ds_hetero.job.prediction_check import PredictionCheck
from ds_hetero.runtime.peers.calls import BACKWARD, FORWARD, SAVE, STEP, own_calls
from ds_hetero.runtime.peers.waiting import waiting_for_peers
from ds_hetero.runtime.step_clock import IDLE

__all__ = [
    "HOOKS",
    "Hook",
    "Hooked",
    "HookedEngine",
    "expect_scaled_loss",
    "install_hooks",
    "load_checkpoint",
    "record_common_forward",
    "record_step",
    "recording",
    "refuse_batch_sizes",
    "report_prediction",
    "report_times",
    "save_checkpoint",
    "scale_loss",
    "time_backward",
    "time_forward",
    "time_step",
    "waiting",
]


@dataclass(frozen=True, kw_only=True)
class HookedEngine:
    """An engine and what the hooks around its methods need.

    Args:
        engine: DeepSpeed's, as it was built.
        model: what it trains.
        scaling: brings losses to the scale of the engine's average.
        monitor: takes the times of steps.
        prediction_check: compares steps with their prediction.
        note_destroyed: called before the engine is gone.
        stage3: reads and writes checkpoints of ZeRO-3; None for other stages.
    """

    engine: Engine
    model: ShardedModel | WholeModel
    scaling: LossScaling
    monitor: StepMonitor
    prediction_check: PredictionCheck
    note_destroyed: Callable[[], None]
    stage3: Stage3Checkpoints | None


Hook = Callable[..., Any]


class Hooked(Protocol):
    """What hooks are given: an engine and whatever else they need."""

    @property
    def engine(self) -> Engine:
        """DeepSpeed's, as it was built."""


def install_hooks(hooked: Hooked, table: Mapping[str, tuple[Hook, ...]] | None = None) -> None:
    """Put hooks around the methods of an engine.

    Args:
        hooked: what every hook is given.
        table: by method, outermost first; left out, `HOOKS`.
    """
    for name, hooks in (HOOKS if table is None else table).items():
        method = getattr(hooked.engine, name)
        for hook in reversed(hooks):
            method = _around(hook, hooked, method)
        setattr(hooked.engine, name, method)


def _around(hook: Hook, hooked: Hooked, method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def call(*args: Any, **kwargs: Any) -> Any:
        return hook(hooked, method, *args, **kwargs)

    return call


def time_forward(hooked: HookedEngine, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Time a forward of the model."""
    clock, model = hooked.model.clock, hooked.model
    with clock.running(), clock.forward(training=model.times_forward and torch.is_grad_enabled()):
        return forward(*args, **kwargs)


def time_backward(hooked: HookedEngine, backward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Time a backward."""
    with hooked.model.clock.running(), hooked.model.clock.backward():
        return backward(*args, **kwargs)


def time_step(hooked: HookedEngine, step: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Time the engine's step; after an optimizer step the monitor may look at all ranks' times."""
    before = hooked.engine.global_steps
    with hooked.model.clock.running(), hooked.model.clock.optimizer_step():
        result = step(*args, **kwargs)
    if hooked.engine.global_steps > before:
        hooked.monitor.record_step(hooked.engine.global_samples)
    return result


def record_step(hooked: HookedEngine, step: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Note when an optimizer step was done, for the comparison with its prediction."""
    before = hooked.engine.global_steps
    result = step(*args, **kwargs)
    if hooked.engine.global_steps > before:
        hooked.prediction_check.record_step(time.perf_counter())
    return result


def scale_loss(
    hooked: HookedEngine,
    backward: Callable[..., Any],
    loss: Tensor,
    retain_graph: bool = False,
    scale_wrt_gas: bool = True,
) -> Any:
    """Bring a loss of any convention to the scale that the engine's average needs."""
    accumulation_steps = hooked.engine.gradient_accumulation_steps()
    divisor = accumulation_steps if scale_wrt_gas else 1
    with hooked.model.clock.phase(IDLE, "loss"):
        loss = hooked.scaling.scale(loss, divisor, hooked.engine.micro_steps % accumulation_steps)
    return backward(loss, retain_graph=retain_graph, scale_wrt_gas=scale_wrt_gas)


def expect_scaled_loss(hooked: HookedEngine, step: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Refuse a step on gradients of a loss that did not come through ``engine.backward``."""
    hooked.scaling.expect_scaled()
    return step(*args, **kwargs)


def report_times(hooked: HookedEngine, destroy: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Print the table of the ranks' times before the engine is gone."""
    hooked.note_destroyed()
    hooked.monitor.report()
    return destroy(*args, **kwargs)


def report_prediction(hooked: HookedEngine, destroy: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Print how prediction and measurement compare before the engine is gone."""
    hooked.prediction_check.report()
    return destroy(*args, **kwargs)


def refuse_batch_sizes(hooked: HookedEngine, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Refuse another batch size while replicas take different batches, which are the schedule's.

    Raises:
        ConfigError: replicas take different batches.
    """
    split = hooked.model.replica.batch_split
    if split is not None:
        raise ConfigError(
            f"the batch cannot be changed while replicas take different ones ({split}); change their micro_batch_size "
            "and micro_batches in the schedule."
        )
    return method(*args, **kwargs)


def waiting(phase: str) -> Hook:
    """Make a hook that reports a collective which broke or timed out inside the engine as `PeerError`."""

    def name_lost_peers(hooked: Hooked, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        with waiting_for_peers(phase):
            return method(*args, **kwargs)

    return name_lost_peers


def recording(call: str) -> Hook:
    """Make a hook that records a call in which ranks wait for one another, see `ds_hetero.runtime.peers.calls`."""

    def record_call(hooked: Hooked, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        own_calls.record(call)
        try:
            return method(*args, **kwargs)
        except Exception as error:
            own_calls.fail(error)
            raise

    return record_call


_record_forward = recording(FORWARD)


def record_common_forward(hooked: HookedEngine, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Record a forward unless it is of a whole batch, or without gradients, and so this rank's own affair."""
    if hooked.model.waits_in_forward and torch.is_grad_enabled():
        return _record_forward(hooked, forward, *args, **kwargs)
    return forward(*args, **kwargs)


def save_checkpoint(hooked: HookedEngine, save: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Save whole or not at all, with the plan that re-planning has come to."""
    return save_whole(hooked.engine, save, hooked.monitor.changed_plan, *args, **kwargs)


def load_checkpoint(hooked: HookedEngine, load: Callable[..., Any], load_dir: str, tag: Any, **kwargs: Any) -> Any:
    """Load the parts of one save only, and go on with the plan that re-planning had come to."""
    engine = hooked.engine
    weights_alone = kwargs.get("load_module_only", False) or not kwargs.get("load_optimizer_states", True)
    with_optimizer = not weights_alone or engine.zero_optimization_partition_weights()
    manifest = expect_one_save(engine, Path(load_dir, str(tag)), with_optimizer=with_optimizer)
    loaded = load(load_dir, tag, **kwargs)
    if manifest is not None and manifest.plan is not None and not weights_alone:
        hooked.monitor.resume(manifest.plan)
    return loaded


def _checkpoint(hook: Callable[..., Any]) -> Hook:
    """Make a hook of a function of the engine alone."""

    @functools.wraps(hook)
    def of_engine(hooked: HookedEngine, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return hook(hooked.engine, method, *args, **kwargs)

    return of_engine


def _stage3(hook: Callable[..., Any]) -> Hook:
    """Make a hook of a method of `Stage3Checkpoints`; engines of other stages run without it."""

    @functools.wraps(hook)
    def of_stage3(hooked: HookedEngine, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if hooked.stage3 is None:
            return method(*args, **kwargs)
        return hook(hooked.stage3, method, *args, **kwargs)

    return of_stage3


HOOKS: Mapping[str, tuple[Hook, ...]] = {
    "forward": (record_common_forward, time_forward, waiting("running a forward")),
    "backward": (recording(BACKWARD), time_backward, waiting("running a backward"), scale_loss),
    "step": (recording(STEP), time_step, record_step, waiting("running the engine's step"), expect_scaled_loss),
    "destroy": (report_times, report_prediction),
    "set_train_batch_size": (refuse_batch_sizes,),
    "set_train_micro_batch_size": (refuse_batch_sizes,),
    "save_checkpoint": (recording(SAVE), waiting("saving a checkpoint"), save_checkpoint),
    "_copy_recovery_script": (_checkpoint(copy_script_last),),
    "_load_checkpoint": (
        waiting("loading a checkpoint"),
        load_checkpoint,
        _checkpoint(raise_on_all_ranks),
        _stage3(Stage3Checkpoints.examine),
    ),
    "_load_zero_checkpoint": (_checkpoint(load_any_layout), _stage3(Stage3Checkpoints.load_state)),
    "load_module_state_dict": (_stage3(Stage3Checkpoints.load_frozen_parameters),),
    "_get_all_ckpt_names": (_stage3(Stage3Checkpoints.list_model_files),),
    "_get_param_fragment_func": (_stage3(Stage3Checkpoints.equal_shard),),
}
"""By method of the engine, the hooks around it: outermost first."""
