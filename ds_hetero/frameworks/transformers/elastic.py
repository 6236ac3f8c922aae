"""The HF Trainer, and TRL's, in an elastic job: ``train`` resumes from the newest save in memory.

The Trainer resumes by its own code, from a temporary folder that stands for a checkpoint:

    small files (state, scheduler, random states)     written to the folder from memory, before ``train``
    DeepSpeed's files                                 none: `load_from_memory` lets the engine read its state
    loss and TRL's numbers since the last log         are in no checkpoint: set by a callback when training begins

A save is taken after everything that the Trainer does in a step: the log, the evaluation and the checkpoint; at the end
of an epoch also those of the epoch.
"""

from __future__ import annotations

import json
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from transformers import Trainer, TrainerCallback
from transformers.trainer_callback import ExportableState

from ds_hetero.elastic.resume import LoadedSave, SavesInMemory, find_newest
from ds_hetero.elastic.worker import own_worker
from ds_hetero.engine.adapters import ElasticState
from ds_hetero.engine.patching import Function
from ds_hetero.engine.registry import Registry
from ds_hetero.errors import CheckpointError
from ds_hetero.frameworks.transformers.resumed_epochs import epochs_of, write_epoch
from ds_hetero.runtime.data.epochs import drawing_from, process_states, set_process_states

_trainings: dict[str, _Training] = {}  # calls of ``train`` under way, by their folder

_STATE, _SCHEDULER = "trainer_state.json", "scheduler.pt"  # as the Trainer names them
_OBJECT = "trainer"  # name of the Trainer's state among the objects of a save
# Attributes of a Trainer that change between two logs and that its checkpoints lack.
_RUNNING = ("_tr_loss", "_total_loss_scalar", "_globalstep_last_logged", "_initial_global_step", "current_flos")


class _Training:
    """One call of ``train`` in an elastic job.

    Args:
        saves: those in the memory of all nodes.
        folder: empty; gets the small files of the checkpoint that the Trainer resumes from.

    Raises:
        CheckpointError: the newest save is of a training loop without a Trainer.
    """

    def __init__(self, registry: Registry, trainer: Trainer, saves: SavesInMemory, folder: Path) -> None:
        self._registry = registry
        self._trainer = trainer
        self._saves = saves
        self._running: dict[str, Any] = {}
        self._derived: dict[str, Any] = registry.adapters.trainers.running_state(trainer)
        self._saved_step = 0
        self._waits_for_epoch_end = False
        if saves.newest is not None:
            self._write(saves.newest, folder)

    def _write(self, save: LoadedSave, folder: Path) -> None:
        """Write the files that the Trainer reads itself."""
        rank = dist.get_rank()
        # A rank that the saved world did not have starts from the random states of rank 0.
        content = save.contents[rank if rank < save.save.world_size else 0]
        if _OBJECT not in content["objects"]:
            raise CheckpointError(
                "this job was begun by a training loop without a Trainer, but is resumed with one; give it another "
                "name (--job)."
            )
        state = content["objects"][_OBJECT]
        (folder / _STATE).write_text(state["state"])
        torch.save(state["scheduler"], folder / _SCHEDULER)
        # The Trainer writes the present random states, so the saved ones are made the present ones for a moment.
        with drawing_from(content["random"]):
            if content["device_random"] is not None and torch.cuda.is_available():
                torch.cuda.set_rng_state(content["device_random"])
            self._trainer._save_rng_state(str(folder))
        if state.get("epoch") is not None:
            write_epoch(state["epoch"], folder)
        self._running = state["running"]
        self._derived = state["derived"]

    def is_of(self, trainer: Trainer) -> bool:
        """Return True if this is a call of this Trainer's ``train``."""
        return self._trainer is trainer

    @property
    def elastic(self) -> ElasticState:
        """The elastic state of the Trainer's engine."""
        elastic = self._registry.elastic_of(self._trainer.model)
        assert elastic is not None, "other engines are refused when they are made"
        return elastic

    def load(self) -> None:
        """Load the engine's state from the newest save, if there is one, and begin to save."""
        self.elastic.go_on({_OBJECT: self}, self._saves)

    def begin(self) -> None:
        """Set the attributes that no checkpoint has. Call it before the first step."""
        if self._saves.newest is None:
            self.load()  # the Trainer loads no checkpoint, so `load_from_memory` was not called
        for name, value in self._running.items():
            present = getattr(self._trainer, name)
            is_tensor = isinstance(present, torch.Tensor)
            setattr(self._trainer, name, torch.full_like(present, value) if is_tensor else value)
        self._registry.adapters.trainers.set_running_state(self._trainer, self._derived)
        self._saved_step = self._trainer.state.global_step

    def end_step(self) -> None:
        """Save after a step, when the Trainer has done everything that belongs to it.

        The Trainer calls ``_maybe_log_save_evaluate`` after each step, and once more at the end of an epoch. A step
        that ends an epoch is saved at the second call.
        """
        step, epoch = self._trainer.state.global_step, self._trainer.state.epoch
        if step == self._saved_step:
            return
        ends_epoch = epoch is not None and float(epoch).is_integer()
        if ends_epoch and not self._waits_for_epoch_end:
            self._waits_for_epoch_end = True
            return
        self._waits_for_epoch_end = False
        self._saved_step = step
        self.elastic.after_step(step)
        self.elastic.leave_if_due()

    def state_dict(self) -> dict[str, Any]:
        """Return the Trainer's state as its checkpoints have it, and the attributes that these lack."""
        trainer = self._trainer
        state = asdict(trainer.state)
        state["stateful_callbacks"] = self._callback_states(state["stateful_callbacks"])
        running: dict[str, Any] = {}
        for name in _RUNNING:
            value = getattr(trainer, name)
            running[name] = value.item() if isinstance(value, torch.Tensor) else value
        return {
            "state": json.dumps(state, indent=2, sort_keys=True),
            "scheduler": trainer.lr_scheduler.state_dict(),
            "epoch": epochs_of(trainer).state(),
            "running": running,
            "derived": self._registry.adapters.trainers.running_state(trainer),
        }

    def _callback_states(self, former: dict[str, Any]) -> dict[str, Any]:
        """Return the present states of callbacks in the form of the Trainer's files.

        ``Trainer._save_checkpoint`` does the same: a class with several callbacks has a list, others their state.
        """
        states_of: dict[str, list[Any]] = {}
        for callback in [*self._trainer.callback_handler.callbacks, self._trainer.control]:
            if isinstance(callback, ExportableState):
                states_of.setdefault(type(callback).__name__, []).append(callback.state())
        return {
            name: states if isinstance(former.get(name), list) else states[-1] for name, states in states_of.items()
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Do nothing: the Trainer reads its files."""


class _Beginning(TrainerCallback):  # type: ignore[misc]
    """A callback that calls `_Training.begin`."""

    def __init__(self, training: _Training) -> None:
        self._training = training

    def on_train_begin(self, *args: object, **kwargs: object) -> None:
        """The Trainer calls it after the engine was made and a checkpoint was loaded, before the first step."""
        self._training.begin()


def train_from_memory(
    registry: Registry,
    stock: Function,
    trainer: Trainer,
    resume_from_checkpoint: Any = None,
    *args: object,
    **kwargs: object,
) -> object:
    """Replace `transformers.Trainer.train`: resume from the newest save in memory."""
    worker = own_worker()
    if worker is None or not registry.adapters.processes.asks_for_engine(trainer.accelerator):
        return stock(trainer, resume_from_checkpoint, *args, **kwargs)
    saves = find_newest(worker, dist.new_group(backend="gloo"))
    checkpoint = resume_from_checkpoint
    with tempfile.TemporaryDirectory(prefix="ds_hetero-") as folder:
        training = _trainings[folder] = _Training(registry, trainer, saves, Path(folder))
        if saves.newest is not None:
            checkpoint = folder
        callback = _Beginning(training)
        trainer.add_callback(callback)
        try:
            return stock(trainer, checkpoint, *args, **kwargs)
        finally:
            trainer.remove_callback(callback)
            del _trainings[folder]


def save_after(stock: Function, trainer: Trainer, *args: object, **kwargs: object) -> None:
    """Extend `transformers.Trainer._maybe_log_save_evaluate`: save the step in memory afterwards."""
    stock(trainer, *args, **kwargs)
    for training in _trainings.values():
        if training.is_of(trainer):
            training.end_step()


def load_from_memory(stock: Function, engine: Any, checkpoint_path: str, *args: object, **kwargs: object) -> None:
    """Replace ``deepspeed_load_checkpoint``: load from memory if the folder is that of a training in an elastic job."""
    training = _trainings.get(str(checkpoint_path))
    if training is not None:
        training.load()
        return
    # DeepSpeed's checkpoint restores random states at once, so that the order of the epoch would be drawn from the
    # states in its middle. The Trainer restores them itself after the epoch has begun, see `resumed_epochs`.
    states = process_states()
    stock(engine, checkpoint_path, *args, **kwargs)
    set_process_states(states)
