"""The HF Trainer, and TRL's, in an elastic job: ``train`` goes on where the newest save in memory is.

The Trainer is given a folder as a checkpoint to resume from. Its small files (state, scheduler, random states) are
written there from memory by the Trainer's own methods; DeepSpeed's parts are none, and are read by the engine. So all
that the Trainer does when it resumes (epochs, batches to skip, callbacks) is its own. What it does not keep in a
checkpoint, the loss and TRL's numbers since the last log, is put back after that.

A save belongs to the end of all that the Trainer does in a step: it has the step's log, its evaluation and its
checkpoint; where a step ends an epoch, those of the epoch too.
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

_trainings: dict[str, _Training] = {}  # that are under way, by the folder of each

_STATE, _SCHEDULER = "trainer_state.json", "scheduler.pt"
_OBJECT = "trainer"
_RUNNING = ("_tr_loss", "_total_loss_scalar", "_globalstep_last_logged", "_initial_global_step", "current_flos")


class _Training:
    """One call of ``train`` in an elastic job; the ``folder`` has small files of the checkpoint that stands for it."""

    def __init__(self, registry: Registry, trainer: Trainer, found: SavesInMemory, folder: Path) -> None:
        self._registry, self._trainer, self._found = registry, trainer, found
        self._running: dict[str, Any] = {}
        self._derived: dict[str, Any] = registry.adapters.trainers.running_state(trainer)
        self._step = 0  # that was saved last
        self._waits = False  # for the end of an epoch
        if found.newest is not None:
            self._write(found.newest, folder)

    def _write(self, kept: LoadedSave, folder: Path) -> None:
        """Write what the Trainer reads for itself."""
        own = kept.contents[dist.get_rank() if dist.get_rank() < kept.save.world_size else 0]
        if _OBJECT not in own["objects"]:
            raise CheckpointError(
                "this job was begun by a loop of its own, and goes on with a Trainer; give it another name (--job)."
            )
        state = own["objects"][_OBJECT]
        (folder / _STATE).write_text(state["state"])
        torch.save(state["scheduler"], folder / _SCHEDULER)
        with drawing_from(own["random"]):
            if own["device_random"] is not None and torch.cuda.is_available():
                torch.cuda.set_rng_state(own["device_random"])
            self._trainer._save_rng_state(str(folder))
        if state.get("epoch") is not None:
            write_epoch(state["epoch"], folder)
        self._running, self._derived = state["running"], state["derived"]

    def is_of(self, trainer: Trainer) -> bool:
        """Whether it is a Trainer's."""
        return self._trainer is trainer

    @property
    def elastic(self) -> ElasticState:
        """The state of the Trainer's engine."""
        elastic = self._registry.elastic_of(self._trainer.model)
        assert elastic is not None, "other engines are refused when they are made"
        return elastic

    def load(self) -> None:
        """Put back the engine's state, in place of reading a checkpoint; where there is none, begin to save."""
        self.elastic.go_on({_OBJECT: self}, self._found)

    def begin(self) -> None:
        """Before the first step: put back what no checkpoint has."""
        if self._found.newest is None:
            self.load()
        for name, value in self._running.items():
            like = getattr(self._trainer, name)
            setattr(self._trainer, name, torch.full_like(like, value) if isinstance(like, torch.Tensor) else value)
        self._registry.adapters.trainers.set_running_state(self._trainer, self._derived)
        self._step = self._trainer.state.global_step

    def end_step(self) -> None:
        """Save after a step, when the Trainer has done all that belongs to it."""
        step, epoch = self._trainer.state.global_step, self._trainer.state.epoch
        if step == self._step:
            return
        if not self._waits and epoch is not None and float(epoch).is_integer():
            self._waits = True  # it is called once more, after the epoch
            return
        self._waits, self._step = False, step
        self.elastic.after_step(step)
        self.elastic.leave_if_due()

    def state_dict(self) -> dict[str, Any]:
        """The Trainer's state, as its checkpoints have it, and what they do not have."""
        trainer, state = self._trainer, asdict(self._trainer.state)
        of_callbacks: dict[str, Any] = {}
        for one in [*trainer.callback_handler.callbacks, trainer.control]:
            if isinstance(one, ExportableState):  # several of a class have a list, as in the Trainer's own files
                of_callbacks.setdefault(type(one).__name__, []).append(one.state())
        state["stateful_callbacks"] = {
            name: states if isinstance(state["stateful_callbacks"].get(name), list) else states[-1]
            for name, states in of_callbacks.items()
        }
        running = {name: getattr(trainer, name) for name in _RUNNING}
        return {
            "state": json.dumps(state, indent=2, sort_keys=True),
            "scheduler": trainer.lr_scheduler.state_dict(),
            "epoch": epochs_of(trainer).state(),
            "running": {name: one.item() if isinstance(one, torch.Tensor) else one for name, one in running.items()},
            "derived": self._registry.adapters.trainers.running_state(trainer),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Nothing: the Trainer reads its files."""


class _Beginning(TrainerCallback):  # type: ignore[misc]
    """Tells a training when its Trainer is ready."""

    def __init__(self, training: _Training) -> None:
        self._training = training

    def on_train_begin(self, *_: object, **__: object) -> None:
        """After the engine was made and a checkpoint was loaded."""
        self._training.begin()


def train_from_memory(
    registry: Registry,
    stock: Function,
    trainer: Trainer,
    resume_from_checkpoint: Any = None,
    *args: object,
    **kwargs: object,
) -> object:
    """Around `transformers.Trainer.train`: begin where the newest save in memory is."""
    worker = own_worker()
    if worker is None or not registry.adapters.processes.asks_for_engine(trainer.accelerator):
        return stock(trainer, resume_from_checkpoint, *args, **kwargs)
    found = find_newest(worker, dist.new_group(backend="gloo"))
    with tempfile.TemporaryDirectory(prefix="ds_hetero-") as folder:
        training = _trainings[folder] = _Training(registry, trainer, found, Path(folder))
        callback = _Beginning(training)
        trainer.add_callback(callback)
        try:
            return stock(trainer, resume_from_checkpoint if found.newest is None else folder, *args, **kwargs)
        finally:
            trainer.remove_callback(callback)
            del _trainings[folder]


def save_after(stock: Function, trainer: Trainer, *args: object, **kwargs: object) -> None:
    """Around `transformers.Trainer._maybe_log_save_evaluate`: save in memory what the step has become."""
    stock(trainer, *args, **kwargs)
    for training in _trainings.values():
        if training.is_of(trainer):
            training.end_step()


def load_from_memory(stock: Function, engine: Any, checkpoint_path: str, *args: object, **kwargs: object) -> None:
    """Around what loads DeepSpeed's checkpoint: read the one in memory where the folder stands for it."""
    training = _trainings.get(str(checkpoint_path))
    if training is not None:
        training.load()
        return
    # The Trainer puts random states back for itself, after it has begun the epoch; see `resumed_epochs`. The engine's
    # checkpoint does so at once, and the order of the epoch would be drawn from the states of its middle.
    states = process_states()
    stock(engine, checkpoint_path, *args, **kwargs)
    set_process_states(states)
