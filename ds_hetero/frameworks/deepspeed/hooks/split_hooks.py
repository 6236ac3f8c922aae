"""Hooks of an engine whose model is split over the sequence, or runs whole on every rank."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from ds_hetero.engine.adapters import SplitModel
from ds_hetero.engine.process.patching import Function
from ds_hetero.engine.registry import ElasticState
from ds_hetero.engine.whole_model import WholeModel
from ds_hetero.frameworks.deepspeed.checkpoints.loading import expect_one_save
from ds_hetero.frameworks.deepspeed.checkpoints.random_states import restore_random_states
from ds_hetero.frameworks.deepspeed.checkpoints.saving import save_whole
from ds_hetero.frameworks.deepspeed.hooks.backwards import BackwardsOfStep
from ds_hetero.frameworks.deepspeed.hooks.hooks import Hook, HookedEngine, recording
from ds_hetero.frameworks.deepspeed.hooks.losses import LossScaling
from ds_hetero.frameworks.deepspeed.in_memory import is_in_memory
from ds_hetero.frameworks.deepspeed.zero.stage3_checkpoint import Stage3Checkpoints
from ds_hetero.job.monitoring.prediction_check import PredictionCheck
from ds_hetero.runtime.peers.calls import FORWARD
from ds_hetero.runtime.step_clock import IDLE


@dataclass(kw_only=True)
class SplitEngine(HookedEngine):
    """An engine whose model is split over the sequence, or runs whole on every rank.

    Args:
        model: what it trains.
        scaling: brings losses to the scale of the engine's average.
        prediction_check: compares steps with their prediction.
        note_destroyed: called before the engine is gone.
        stage3: reads and writes checkpoints of ZeRO-3; None for other stages.
        backwards: watches over several backwards for one step.
        elastic: keeps its state in memory; None in a job that is not elastic.
    """

    model: SplitModel | WholeModel
    scaling: LossScaling
    prediction_check: PredictionCheck
    note_destroyed: Callable[[], None]
    stage3: Stage3Checkpoints | None
    backwards: BackwardsOfStep
    elastic: ElasticState | None = None

    @property
    def why_batch_is_fixed(self) -> str | None:
        """Replicas take different batches, which are the schedule's."""
        split = self.model.replica.batch_split
        if split is None:
            return None
        return (
            f"the batch cannot be changed while replicas take different ones ({split}); change their micro_batch_size "
            "and micro_batches in the schedule."
        )


def time_forward(hooked: SplitEngine, forward: Function, *args: object, **kwargs: object) -> object:
    """Time a forward of the model."""
    clock = hooked.clock
    with clock.running(), clock.forward(training=hooked.model.times_forward and torch.is_grad_enabled()):
        return forward(*args, **kwargs)


def find_unit(hooked: SplitEngine, forward: Function, *args: object, **kwargs: object) -> object:
    """Before the first forward on unlike batches: find by what its loss is to be weighed."""
    if isinstance(hooked.model, WholeModel) and hooked.model.needs_unit:
        hooked.model.find_unit(args, kwargs)
    return forward(*args, **kwargs)


def time_backward(hooked: SplitEngine, backward: Function, *args: object, **kwargs: object) -> object:
    """Time a backward."""
    with hooked.clock.running(), hooked.clock.backward():
        return backward(*args, **kwargs)


def record_step(hooked: SplitEngine, step: Function, *args: object, **kwargs: object) -> object:
    """Note when an optimizer step was done, for the comparison with its prediction."""
    before = hooked.engine.global_steps
    result = step(*args, **kwargs)
    if hooked.engine.global_steps > before:
        hooked.prediction_check.record_step(time.perf_counter())
    return result


def scale_loss(
    hooked: SplitEngine,
    backward: Function,
    loss: Tensor,
    retain_graph: bool = False,
    scale_wrt_gas: bool = True,
) -> object:
    """Bring a loss of any convention to the scale that the engine's average needs."""
    accumulation_steps = hooked.engine.gradient_accumulation_steps()
    divisor = accumulation_steps if scale_wrt_gas else 1
    whole = hooked.model if isinstance(hooked.model, WholeModel) else None
    with hooked.clock.phase(IDLE, "loss"):
        micro_step = 0 if whole is None else whole.micro_step(hooked.engine.global_steps)
        loss = hooked.scaling.scale(loss, divisor, micro_step)
    result = backward(loss, retain_graph=retain_graph, scale_wrt_gas=scale_wrt_gas)
    if whole is not None:
        whole.end_batch()
    return result


def expect_scaled_loss(hooked: SplitEngine, step: Function, *args: object, **kwargs: object) -> object:
    """Refuse a step on gradients of a loss that did not come through ``engine.backward``."""
    hooked.scaling.expect_scaled()
    return step(*args, **kwargs)


def begin_backward(hooked: SplitEngine, begin: Callable[[], None]) -> None:
    """Keep the gradients of the backwards before, or refuse; see `backwards`."""
    hooked.backwards.begin()
    begin()


def end_backward(hooked: SplitEngine, end: Callable[[], None]) -> None:
    """Note that a backward has ended."""
    end()
    hooked.backwards.end()


def forget_backwards(hooked: SplitEngine, method: Function, *args: object, **kwargs: object) -> object:
    """After the gradients were used or dropped, the next backward is the first of a step."""
    result = method(*args, **kwargs)
    hooked.backwards.forget()
    return result


def report_prediction(hooked: SplitEngine, destroy: Function, *args: object, **kwargs: object) -> object:
    """Print how prediction and measurement compare before the engine is gone."""
    hooked.note_destroyed()
    hooked.prediction_check.report()
    return destroy(*args, **kwargs)


_record_forward = recording(FORWARD)


def record_common_forward(hooked: SplitEngine, forward: Function, *args: object, **kwargs: object) -> object:
    """Record a forward unless it is of a whole batch, or without gradients, and so this rank's own affair."""
    if hooked.model.waits_in_forward and torch.is_grad_enabled():
        return _record_forward(hooked, forward, *args, **kwargs)
    return forward(*args, **kwargs)


def save_checkpoint(hooked: SplitEngine, save: Function, *args: object, **kwargs: object) -> object:
    """Save whole or not at all, with the plan that re-planning has come to."""
    save_all: Function = save_whole
    return save_all(hooked.engine, save, hooked.monitor.changed_plan, *args, **kwargs)


def load_checkpoint(hooked: SplitEngine, load: Function, load_dir: str, tag: object, **kwargs: object) -> object:
    """Load the parts of one save only; go on with its random states and the plan that re-planning had come to."""
    engine = hooked.engine
    if is_in_memory():
        return load(load_dir, tag, **kwargs)
    weights_alone = kwargs.get("load_module_only", False) or not kwargs.get("load_optimizer_states", True)
    with_optimizer = not weights_alone or engine.zero_optimization_partition_weights()
    manifest = expect_one_save(engine, Path(load_dir, str(tag)), with_optimizer=with_optimizer)
    loaded = load(load_dir, tag, **kwargs)
    if manifest is not None and manifest.plan is not None and not weights_alone:
        hooked.monitor.resume(manifest.plan)
    if manifest is not None and not weights_alone:
        restore_random_states(Path(load_dir, str(tag)), manifest)
    return loaded


def of_engine_alone(hook: Function) -> Hook:
    """Make a hook of a function of the engine alone."""

    @functools.wraps(hook)
    def of_engine(hooked: SplitEngine, method: Function, *args: object, **kwargs: object) -> object:
        return hook(hooked.engine, method, *args, **kwargs)

    return of_engine


def of_stage3_alone(hook: Function) -> Hook:
    """Make a hook of a method of `Stage3Checkpoints`; engines of other stages run without it."""

    @functools.wraps(hook)
    def of_stage3(hooked: SplitEngine, method: Function, *args: object, **kwargs: object) -> object:
        if hooked.stage3 is None:
            return method(*args, **kwargs)
        return hook(hooked.stage3, method, *args, **kwargs)

    return of_stage3
