"""An engine whose model is split over the sequence, or runs whole on every rank, and the hooks around its methods."""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from ds_hetero.engine.forward_mode import sharding_is_set
from ds_hetero.engine.patching import Function
from ds_hetero.engine.trained.model import TrainedModel
from ds_hetero.engine.trained.split_model import SplitModel
from ds_hetero.frameworks.deepspeed.experts.engine import EngineExperts
from ds_hetero.frameworks.deepspeed.hook_makers import recorded
from ds_hetero.frameworks.deepspeed.hooked_engine import HookedEngine
from ds_hetero.frameworks.deepspeed.in_memory import is_in_memory
from ds_hetero.frameworks.deepspeed.loading import expect_one_save
from ds_hetero.frameworks.deepspeed.losses import LossScaling
from ds_hetero.frameworks.deepspeed.random_states import restore_random_states
from ds_hetero.frameworks.deepspeed.saving import save_whole
from ds_hetero.frameworks.deepspeed.step_backwards import BackwardsOfStep
from ds_hetero.frameworks.deepspeed.zero.stage3_checkpoint import Stage3Checkpoints
from ds_hetero.job.prediction_check import PredictionCheck
from ds_hetero.runtime.devices import default_device
from ds_hetero.runtime.peers.calls import FORWARD
from ds_hetero.runtime.step_checks import SameSwitches
from ds_hetero.runtime.step_clock import IDLE
from ds_hetero.values.section import SECTION


@dataclass(kw_only=True)
class ReplicaEngine(HookedEngine):
    """An engine whose model is split over the sequence, or runs whole on every rank."""

    trained: TrainedModel
    prediction_check: PredictionCheck  # compares the times of steps with the prediction
    scaling: LossScaling | None  # scales the losses given to backward; None if the engine's average is right as it is
    stage3: Stage3Checkpoints | None  # saves and loads checkpoints of ZeRO-3; None for other stages
    experts: EngineExperts | None = None  # experts that are divided among the ranks; None if every rank has all
    switches: SameSwitches | None = None  # a check that is told of forwards; None if checks are off

    @functools.cached_property
    def backwards(self) -> BackwardsOfStep:
        """Refuses backwards of a step that would drop gradients."""
        return BackwardsOfStep(self.engine)

    @property
    def fixed_batch_message(self) -> str | None:
        """The message for a script that changes the batch size; None if it may: all replicas take equal batches."""
        split = self.trained.replica.batch_split
        if split is None:
            return None
        return (
            f"the batch cannot be changed while replicas take different ones ({split}); change their micro_batch_size "
            "and micro_batches in the schedule."
        )

    def note_forward(self) -> None:
        """Before a forward with gradients, note torch's switches (such as autocast) and the first node of its graph."""
        if self.switches is not None and torch.is_grad_enabled():
            self.switches.note_forward(default_device().type)
        sequences = self.trained.sequences
        if sequences is not None and sequences.losses.graphs is not None and torch.is_grad_enabled():
            sequences.losses.graphs.note_forward()

    def record_common_forward(self) -> AbstractContextManager[None]:
        """Return a context that records a forward on a shard with gradients, to find ranks that left it out."""
        is_common = self.trained.waits_in_forward and torch.is_grad_enabled()
        return recorded(FORWARD) if is_common else contextlib.nullcontext()

    @contextlib.contextmanager
    def time_forward(self) -> Iterator[None]:
        """Inside the context, let the clock count the time as a forward, and an out-of-memory error name the batch."""
        clock, training = self.clock, self.trained.times_forward and torch.is_grad_enabled()
        with clock.running(), clock.forward(training), _naming_batch(self.trained):
            yield

    @contextlib.contextmanager
    def time_backward(self) -> Iterator[None]:
        """Inside the context, let the clock count the time as a backward, and an out-of-memory error name the batch."""
        exchanges = self.trained.sequences is not None
        with self.clock.running(), self.clock.backward(exchanges), _naming_batch(self.trained):
            yield

    def scale_loss(
        self, backward: Function, loss: Tensor, retain_graph: bool = False, scale_wrt_gas: bool = True
    ) -> object:
        """Replace the engine's backward: scale the loss so that averaged gradients are those of one process."""
        accumulation_steps = self.engine.gradient_accumulation_steps()
        divisor = accumulation_steps if scale_wrt_gas else 1
        sequences = self.trained.sequences
        if sequences is not None and sequences.losses.graphs is not None:
            sequences.losses.graphs.note_backward(loss)
        with self.clock.phase(IDLE, "loss"):
            if self.scaling is not None:
                loss = self.scaling.scale(loss, divisor, self.engine.global_steps)
        # Divide here, not in DeepSpeed: 0.18 divides a gradient at every output that it passes, so at the loss and
        # again at the logits.
        result = backward(loss / divisor, retain_graph=retain_graph, scale_wrt_gas=False)
        if self.scaling is not None:
            self.scaling.end_backward()
        return result

    def compare_changed(self) -> None:
        """Before the optimizer's step, compare the model with one process again if the loss has new operations."""
        sequences = self.trained.sequences
        if sequences is not None and sequences.losses.graphs is not None and sequences.losses.graphs.take_change():
            sequences.checks.check_again()

    def record_step(self) -> None:
        """Record the time of an optimizer step, for the comparison with its prediction."""
        self.prediction_check.record_step(time.perf_counter())

    def report_prediction(self) -> None:
        """Before the engine is destroyed, print how measured steps compare with their prediction."""
        self.trained.is_destroyed = True
        self.prediction_check.report()

    def save_checkpoint(self, save: Function, *args: object, **kwargs: object) -> object:
        """Replace ``save_checkpoint``: save all files or none, with the present plan and what losses have shown."""
        save_all: Function = save_whole
        losses = self.trained.losses
        if self.experts is not None:
            self.experts.expect_saveable()
            save = functools.partial(self.experts.save, save)
        state = None if losses is None else losses.state_dict()
        return save_all(self.engine, save, self.monitor.changed_plan, state, *args, **kwargs)

    def load_checkpoint(self, load: Function, load_dir: str, tag: object, **kwargs: object) -> object:
        """Replace ``_load_checkpoint``: load files of one save only, its random states, and the plan of re-planning."""
        engine = self.engine
        if is_in_memory():
            return load(load_dir, tag, **kwargs)
        only_weights = kwargs.get("load_module_only", False) or not kwargs.get("load_optimizer_states", True)
        with_optimizer = not only_weights or engine.zero_optimization_partition_weights()
        manifest = expect_one_save(engine, Path(load_dir, str(tag)), with_optimizer=with_optimizer)
        loaded = load(load_dir, tag, **kwargs)
        if manifest is not None and manifest.plan is not None and not only_weights:
            self.monitor.resume(manifest.plan)
        if self.experts is not None:
            self.experts.load(Path(load_dir, str(tag)), manifest, only_weights=bool(only_weights))
        losses = self.trained.losses
        if manifest is not None and manifest.losses is not None and not only_weights and losses is not None:
            losses.load_state_dict(manifest.losses)
        if manifest is not None and not only_weights:
            restore_random_states(Path(load_dir, str(tag)), manifest)
        return loaded


@contextlib.contextmanager
def _naming_batch(trained: TrainedModel) -> Iterator[None]:
    """Add this rank's batch, and a remedy, to the message of an out-of-memory error inside."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        sequences, batches = trained.sequences, trained.batches
        if sequences is not None and _is_evaluated_whole(sequences):
            raise torch.OutOfMemoryError(
                "this forward in eval() ran on whole sequences, as evaluation in a custom loop does if "
                f'"{SECTION}.evaluation" is left out or "whole". Set it to "sharded" to split sequences as in '
                f"training; then all ranks of a replica have to call the model. {error}"
            ) from error
        if batches is None:
            raise
        sizes, rank = batches.split.micro_batch_sizes, batches.replica.replica_id
        raise torch.OutOfMemoryError(
            f'rank {rank} has not enough memory for its {sizes[rank]} samples of "batch": '
            f'{list(sizes)}. Give it fewer in "{SECTION}.batch", make the global batch smaller, or '
            f"accumulate more steps. {error}"
        ) from error


def _is_evaluated_whole(model: SplitModel) -> bool:
    """Return whether a forward would run on whole sequences, although an evaluation over shards is possible."""
    is_split = model.takes_shards or model.evaluation.takes_forwards
    return not (is_split or model.evaluation.whole_reason) and sharding_is_set() is None
