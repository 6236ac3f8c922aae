"""Hooks around the methods of DeepSpeed's engine: those that every engine has, and those of a model that is no stage.

How they are put on: `installer.EngineHooks`; in which order: `engine.HOOKS`. `before`, `after` and `within` make a hook
of what is done around any call.
"""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ds_hetero.engine.adapters import SplitModel
from ds_hetero.engine.forward_mode import sharding_is_set
from ds_hetero.engine.patching import Function
from ds_hetero.engine.whole_model import WholeModel
from ds_hetero.errors import ConfigError
from ds_hetero.frameworks.deepspeed.in_memory import is_in_memory
from ds_hetero.frameworks.deepspeed.installer import Hook, HookedEngine
from ds_hetero.frameworks.deepspeed.loading import expect_one_save
from ds_hetero.frameworks.deepspeed.losses import BackwardsOfStep, LossScaling
from ds_hetero.frameworks.deepspeed.random_states import restore_random_states
from ds_hetero.frameworks.deepspeed.saving import save_whole
from ds_hetero.frameworks.deepspeed.zero.stage3_checkpoint import Stage3Checkpoints
from ds_hetero.job.prediction_check import PredictionCheck
from ds_hetero.runtime.devices import default_device
from ds_hetero.runtime.peers.calls import FORWARD, own_calls
from ds_hetero.runtime.peers.watch import waiting_for_peers
from ds_hetero.runtime.step_checks import SameSwitches
from ds_hetero.runtime.step_clock import IDLE
from ds_hetero.values.section import SECTION


def before(act: Callable[[Any], object]) -> Hook:
    """Make a hook that acts and goes on to the method; ``act`` may refuse it."""

    @functools.wraps(act)
    def act_and_go_on(part: Any, method: Function, *args: object, **kwargs: object) -> object:
        act(part)
        return method(*args, **kwargs)

    return act_and_go_on


def after(act: Callable[[Any], object]) -> Hook:
    """Make a hook that acts when the method has returned."""

    @functools.wraps(act)
    def go_on_and_act(part: Any, method: Function, *args: object, **kwargs: object) -> object:
        result = method(*args, **kwargs)
        act(part)
        return result

    return go_on_and_act


def after_optimizer_step(act: Callable[[Any], object]) -> Hook:
    """Make a hook that acts when the engine's step was one of the optimizer, and not of an accumulation."""

    @functools.wraps(act)
    def step_and_act(hooked: HookedEngine, step: Function, *args: object, **kwargs: object) -> object:
        done = hooked.engine.global_steps
        result = step(*args, **kwargs)
        if hooked.engine.global_steps > done:
            act(hooked)
        return result

    return step_and_act


def within(context_of: Callable[[Any], AbstractContextManager[None]]) -> Hook:
    """Make a hook that runs the method inside a context."""

    @functools.wraps(context_of)
    def go_on_within(part: Any, method: Function, *args: object, **kwargs: object) -> object:
        with context_of(part):
            return method(*args, **kwargs)

    return go_on_within


def waiting(phase: str) -> Hook:
    """Make a hook that reports a collective which broke or timed out inside the engine as `PeerError`."""

    def name_lost_peers(hooked: HookedEngine) -> AbstractContextManager[None]:
        return waiting_for_peers(phase)

    return within(name_lost_peers)


def recording(call: str) -> Hook:
    """Make a hook that records a call in which ranks wait for one another, see `ds_hetero.runtime.peers.calls`."""

    def record_call(hooked: HookedEngine) -> AbstractContextManager[None]:
        return _recorded(call)

    return within(record_call)


@contextlib.contextmanager
def _recorded(call: str) -> Iterator[None]:
    own_calls.record(call)
    try:
        yield
    except Exception as error:
        own_calls.fail(error)
        raise


@contextlib.contextmanager
def time_step(hooked: HookedEngine) -> Iterator[None]:
    """Time the engine's step."""
    with hooked.clock.running(), hooked.clock.optimizer_step():
        yield


def take_times(hooked: HookedEngine) -> None:
    """Let the monitor look at all ranks' times after an optimizer step, and change the plan."""
    hooked.monitor.record_step(hooked.engine.global_samples)


def check_step(hooked: HookedEngine) -> None:
    """Compare what all ranks know of a step, before the optimizer's step; not amid an accumulation."""
    if hooked.checks is not None and hooked.engine.is_gradient_accumulation_boundary():
        hooked.checks.judge()


def note_forward(hooked: SplitEngine) -> None:
    """Note the modes that a forward of training runs under, and where its graph begins, before it."""
    if hooked.switches is not None and torch.is_grad_enabled():
        hooked.switches.note_forward(default_device().type)
    if hooked.model.graphs is not None and torch.is_grad_enabled():
        hooked.model.graphs.note_forward()


def compare_changed(hooked: SplitEngine) -> None:
    """Compare a piece of a batch again, before the optimizer's step, where losses were made of other operations."""
    model = hooked.model
    if not isinstance(model, WholeModel) and model.graphs is not None and model.graphs.take_change():
        model.checks.check_again()


def refuse_batch_sizes(hooked: HookedEngine) -> None:
    """Refuse another batch size where the plan says what batches there are. Raises `ConfigError`: it does."""
    if (message := hooked.why_batch_is_fixed) is not None:
        raise ConfigError(message)


@dataclass(kw_only=True)
class SplitEngine(HookedEngine):
    """An engine whose model is split over the sequence, or runs whole on every rank."""

    model: SplitModel | WholeModel
    prediction_check: PredictionCheck  # compares steps with their prediction
    note_destroyed: Callable[[], None]  # called before the engine is gone
    stage3: Stage3Checkpoints | None  # reads and writes checkpoints of ZeRO-3; None for other stages
    switches: SameSwitches | None = None  # a check that looks at forwards; None where checks are off

    @functools.cached_property
    def scaling(self) -> LossScaling:
        """Brings losses to the scale of the engine's average."""
        return LossScaling(self.model)

    @functools.cached_property
    def backwards(self) -> BackwardsOfStep:
        """Watches over several backwards for one step."""
        return BackwardsOfStep(self.engine)

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


@contextlib.contextmanager
def time_forward(hooked: SplitEngine) -> Iterator[None]:
    """Time a forward of the model."""
    clock, training = hooked.clock, hooked.model.times_forward and torch.is_grad_enabled()
    with clock.running(), clock.forward(training), _naming_batch(hooked.model):
        yield


def find_unit(hooked: SplitEngine, forward: Function, *args: object, **kwargs: object) -> object:
    """Find the unit by which losses are weighed, before the first forward on unlike batches."""
    if isinstance(hooked.model, WholeModel) and hooked.model.needs_probe:
        hooked.model.find_unit(args, kwargs)
    return forward(*args, **kwargs)


@contextlib.contextmanager
def time_backward(hooked: SplitEngine) -> Iterator[None]:
    """Time a backward."""
    exchanges = not isinstance(hooked.model, WholeModel)
    with hooked.clock.running(), hooked.clock.backward(exchanges), _naming_batch(hooked.model):
        yield


@contextlib.contextmanager
def _naming_batch(model: SplitModel | WholeModel) -> Iterator[None]:
    """Name the batch of this rank, and the cure, where it runs out of memory inside."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        split, rank = model.replica.batch_split, model.replica.replica_id
        if not isinstance(model, WholeModel) and _is_evaluated_whole(model):
            raise torch.OutOfMemoryError(
                "this forward in eval() ran on whole sequences, as evaluation in a loop does where "
                f'"{SECTION}.evaluation" is left out or "whole". "sharded" splits them as in training; all ranks of a '
                f"replica call the model then. {error}"
            ) from error
        if split is None or not isinstance(model, WholeModel):
            raise
        raise torch.OutOfMemoryError(
            f'rank {rank} has no memory for its {split.micro_batch_sizes[rank]} samples of "batch": '
            f'{list(split.micro_batch_sizes)}. Give it fewer in "{SECTION}.batch", make the global batch smaller, or '
            f"accumulate more steps. {error}"
        ) from error


def _is_evaluated_whole(model: SplitModel) -> bool:
    """Whether a forward runs on whole sequences that could be split."""
    return not (model.takes_shards or model.evaluates_shards or model.why_evaluated_whole) and sharding_is_set() is None


def record_step(hooked: SplitEngine) -> None:
    """Note when an optimizer step was done, for the comparison with its prediction."""
    hooked.prediction_check.record_step(time.perf_counter())


def scale_loss(
    hooked: SplitEngine, backward: Function, loss: Tensor, retain_graph: bool = False, scale_wrt_gas: bool = True
) -> object:
    """Bring a loss of any convention to the scale that the engine's average needs."""
    accumulation_steps = hooked.engine.gradient_accumulation_steps()
    divisor = accumulation_steps if scale_wrt_gas else 1
    whole = hooked.model if isinstance(hooked.model, WholeModel) else None
    if hooked.model.graphs is not None:
        hooked.model.graphs.note_backward(loss)
    with hooked.clock.phase(IDLE, "loss"):
        micro_step = 0 if whole is None else whole.batches.micro_step(hooked.engine.global_steps)
        loss = hooked.scaling.scale(loss, divisor, micro_step)
    # Divided here: DeepSpeed 0.18 divides wherever a gradient passes an output, at the loss and again at the logits.
    result = backward(loss / divisor, retain_graph=retain_graph, scale_wrt_gas=False)
    if whole is not None:
        hooked.scaling.release()
        whole.end_backward()
    return result


def report_prediction(hooked: SplitEngine) -> None:
    """Print how prediction and measurement compare before the engine is gone."""
    hooked.note_destroyed()
    hooked.prediction_check.report()


def record_common_forward(hooked: SplitEngine) -> AbstractContextManager[None]:
    """Record a forward unless it is of a whole batch, or without gradients, and so this rank's own affair."""
    is_common = hooked.model.waits_in_forward and torch.is_grad_enabled()
    return _recorded(FORWARD) if is_common else contextlib.nullcontext()


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
