"""Resume the Hugging Face Trainer, or one of TRL's, in an elastic job from the newest save in memory.

The Trainer resumes by its own code, from a temporary folder in place of a checkpoint:

    state, scheduler, random states             written into the folder from memory, before ``train``
    model and optimizer (DeepSpeed's files)     not in the folder: `load_from_memory` lets the engine read its state
    loss and TRL's numbers since the last log   in no checkpoint: set by a callback when training begins

A step is saved when the Trainer has finished it: after the log, the evaluation and the checkpoint of the step, and, if
the step ends an epoch, after those of the epoch.
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
from ds_hetero.engine.patching import Function
from ds_hetero.engine.registry import Registry
from ds_hetero.engine.trained.elastic_state import ElasticState
from ds_hetero.errors import CheckpointError
from ds_hetero.frameworks.transformers.resumed_epochs import epochs_of, write_epoch
from ds_hetero.runtime.data.random_states import drawing_from, process_states, set_process_states

_trainings: dict[str, _Training] = {}  # running calls of ``train``, by their temporary folder

_STATE_FILE, _SCHEDULER_FILE = "trainer_state.json", "scheduler.pt"  # as the Trainer names them
_OBJECT_NAME = "trainer"  # name of the Trainer's state among the objects of a save
# Attributes of a Trainer that change between two logs, and that are in none of its checkpoints.
_UNSAVED = (
    "_tr_loss",
    "_total_loss_scalar",
    "_globalstep_last_logged",
    "_initial_global_step",
    "current_flos",
)


class _Training:
    """One call of ``train`` in an elastic job.

    Args:
        saves: the saves in the memory of all nodes.
        folder: an empty folder, which gets the small files of the checkpoint that the Trainer resumes from.

    Raises:
        CheckpointError: the newest save is one of a training loop without a Trainer.
    """

    def __init__(self, registry: Registry, trainer: Trainer, saves: SavesInMemory, folder: Path) -> None:
        self._registry = registry
        self._trainer = trainer
        self._saves = saves
        self._unsaved: dict[str, Any] = {}  # values of `_UNSAVED`
        # State that a trainer class of another library, such as TRL's, adds to the Trainer's.
        self._library_state: dict[str, Any] = registry.adapters.trainers.running_state(trainer)
        self._saved_step = 0  # the latest step that was saved
        self._waits_for_epoch_end = False
        if saves.newest is not None:
            self._write_files(saves.newest, folder)

    def _write_files(self, newest: LoadedSave, folder: Path) -> None:
        """Write the files from which the Trainer resumes.

        Raises:
            CheckpointError: the save is one of a training loop without a Trainer.
        """
        rank = dist.get_rank()
        # A rank that the saved world did not have starts from the random states of rank 0.
        content = newest.contents[rank if rank < newest.save.world_size else 0]
        if _OBJECT_NAME not in content["objects"]:
            raise CheckpointError(
                "this job was begun by a training loop without a Trainer, but is resumed with one. Give the job "
                "another name (--job)."
            )
        state = content["objects"][_OBJECT_NAME]
        (folder / _STATE_FILE).write_text(state["state"])
        torch.save(state["scheduler"], folder / _SCHEDULER_FILE)
        # ``_save_rng_state`` writes the present random states, so the saved states are set while it runs.
        with drawing_from(content["random"]):
            if content["device_random"] is not None and torch.cuda.is_available():
                torch.cuda.set_rng_state(content["device_random"])
            self._trainer._save_rng_state(str(folder))
        if state.get("epoch") is not None:
            write_epoch(state["epoch"], folder)
        self._unsaved = state["running"]
        self._library_state = state["derived"]

    def is_of(self, trainer: Trainer) -> bool:
        """Return True if this is a call of ``train`` of that Trainer."""
        return self._trainer is trainer

    @property
    def elastic(self) -> ElasticState:
        """The object that saves and restores the state of the Trainer's engine."""
        elastic = self._registry.elastic_of(self._trainer.model)
        assert elastic is not None, "engines that cannot be elastic are refused when they are made"
        return elastic

    def load(self) -> None:
        """Let the engine read its state from the newest save, if there is one, and save from now on."""
        self.elastic.go_on({_OBJECT_NAME: self}, self._saves)

    def begin(self) -> None:
        """Set the attributes that are in no checkpoint. Call it before the first step."""
        if self._saves.newest is None:
            self.load()  # the Trainer has loaded no checkpoint, so `load_from_memory` was not called
        for name, value in self._unsaved.items():
            present = getattr(self._trainer, name)
            is_tensor = isinstance(present, torch.Tensor)
            setattr(self._trainer, name, torch.full_like(present, value) if is_tensor else value)
        self._registry.adapters.trainers.set_running_state(self._trainer, self._library_state)
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
        """Return the Trainer's state for a save: the content of its checkpoints, and the attributes that these lack."""
        trainer = self._trainer
        state = asdict(trainer.state)
        state["stateful_callbacks"] = self._callback_states(state["stateful_callbacks"])
        unsaved: dict[str, Any] = {}
        for name in _UNSAVED:
            value = getattr(trainer, name)
            unsaved[name] = value.item() if isinstance(value, torch.Tensor) else value
        return {
            "state": json.dumps(state, indent=2, sort_keys=True),
            "scheduler": trainer.lr_scheduler.state_dict(),
            "epoch": epochs_of(trainer).state(),
            "running": unsaved,
            "derived": self._registry.adapters.trainers.running_state(trainer),
        }

    def _callback_states(self, former: dict[str, Any]) -> dict[str, Any]:
        """Return the present states of callbacks by class, as ``Trainer._save_checkpoint`` writes them.

        Args:
            former: the states by class that the Trainer has now; a class with several callbacks has a list of states.
        """
        states_by_class: dict[str, list[Any]] = {}
        for callback in [*self._trainer.callback_handler.callbacks, self._trainer.control]:
            if isinstance(callback, ExportableState):
                states_by_class.setdefault(type(callback).__name__, []).append(callback.state())
        result: dict[str, Any] = {}
        for name, states in states_by_class.items():
            result[name] = states if isinstance(former.get(name), list) else states[-1]
        return result

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Do nothing, because the Trainer has read its state from files."""


class _BeginCallback(TrainerCallback):  # type: ignore[misc]
    """Calls `_Training.begin` when training begins."""

    def __init__(self, training: _Training) -> None:
        self._training = training

    def on_train_begin(self, *args: object, **kwargs: object) -> None:
        """Called by the Trainer before the first step, when engine and checkpoint are ready."""
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
        callback = _BeginCallback(training)
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
    """Replace ``deepspeed_load_checkpoint``: load from memory if the folder is the temporary one of an elastic job."""
    training = _trainings.get(str(checkpoint_path))
    if training is not None:
        training.load()
        return
    # The stock function restores the random states of the checkpoint at once, which are from the middle of an epoch:
    # the order of the epoch would be drawn from them. The Trainer restores them itself after the epoch has begun, see
    # `resumed_epochs`.
    states = process_states()
    stock(engine, checkpoint_path, *args, **kwargs)
    set_process_states(states)
