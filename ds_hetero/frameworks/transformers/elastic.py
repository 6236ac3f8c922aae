"""The HF Trainer, and TRL's, in an elastic job: `train` goes on where the newest save in memory is.

The Trainer is given a folder as a checkpoint to resume from. Its small files (state, scheduler, random states) are
written there from memory by the Trainer's own methods; DeepSpeed's parts are none, and are read by the engine. So all
that the Trainer does when it resumes (epochs, batches to skip, callbacks) is its own. What it does not keep in a
checkpoint, the loss since the last log, is put back after that.

A save belongs to the end of all that the Trainer does in a step: it has the step's log, its evaluation and its
checkpoint; where a step ends an epoch, those of the epoch too.
"""

from __future__ import annotations

import functools
import json
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import transformers.trainer
from transformers import Trainer, TrainerCallback
from transformers.trainer_callback import ExportableState

from ds_hetero.common.patching import Function
from ds_hetero.elastic.restart import Kept, find_newest
from ds_hetero.elastic.worker import own_worker
from ds_hetero.engine.registry import Registry
from ds_hetero.errors import CheckpointError
from ds_hetero.runtime.data.epochs import process_states, set_process_states

_STATE, _SCHEDULER = "trainer_state.json", "scheduler.pt"
_OBJECT = "trainer"
_RUNNING = ("_tr_loss", "_total_loss_scalar", "_globalstep_last_logged", "_initial_global_step", "current_flos")


def install(registry: Registry) -> None:
    """Let trainings of elastic jobs go on from memory."""
    replace = registry.patches.replace
    replace(Trainer, "train", lambda stock: _going_on(registry, stock))
    replace(Trainer, "_maybe_log_save_evaluate", lambda stock: _saving_after(registry, stock))
    replace(transformers.trainer, "deepspeed_load_checkpoint", lambda stock: _loading_from_memory(registry, stock))


class _Training:
    """One call of `train` in an elastic job.

    Args:
        kept: the save that it goes on from; None where it begins.
    """

    def __init__(self, trainer: Trainer, kept: Kept | None, folder: Path) -> None:
        self.trainer, self.kept, self.folder = trainer, kept, folder
        self._running: dict[str, Any] = {}
        self.saved_step = -1
        if kept is not None:
            self._write(kept)

    def _write(self, kept: Kept) -> None:
        """Write what the Trainer reads for itself."""
        own = kept.contents[dist.get_rank() if dist.get_rank() < kept.save.world_size else 0]
        if _OBJECT not in own["objects"]:
            raise CheckpointError(
                "this job was begun by a loop of its own and not by a Trainer; give the job another name (--job)."
            )
        state = own["objects"][_OBJECT]
        (self.folder / _STATE).write_text(state["state"])
        torch.save(state["scheduler"], self.folder / _SCHEDULER)
        before = process_states()
        set_process_states(own["random"])
        self.trainer._save_rng_state(str(self.folder))
        set_process_states(before)
        self._running = state["running"]

    def begin(self) -> None:
        """Before the first step: what no checkpoint has."""
        for name, value in self._running.items():
            like = getattr(self.trainer, name)
            setattr(self.trainer, name, torch.full_like(like, value) if isinstance(like, torch.Tensor) else value)
        self.saved_step = self.trainer.state.global_step

    def state_dict(self) -> dict[str, Any]:
        """The Trainer's state, as its checkpoints have it, and what they do not have."""
        trainer = self.trainer
        for one in [*trainer.callback_handler.callbacks, trainer.control]:
            if isinstance(one, ExportableState):
                _set_state(trainer.state.stateful_callbacks, one)
        return {
            "state": json.dumps(asdict(trainer.state), sort_keys=True),
            "scheduler": trainer.lr_scheduler.state_dict(),
            "running": {name: float(getattr(trainer, name)) for name in _RUNNING},
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Nothing: the Trainer reads its files."""


def _set_state(states: dict[str, Any], one: ExportableState) -> None:
    """As the Trainer does before it writes its state: several callbacks of a class have a list."""
    name, state = type(one).__name__, one.state()
    states[name] = [*states[name], state] if isinstance(states.get(name), list) else state


class _Beginning(TrainerCallback):
    """Tells the training when its Trainer is ready, by the one callback that is called then."""

    def __init__(self, registry: Registry, training: _Training) -> None:
        self._registry, self._training = registry, training

    def on_train_begin(self, *_: object, **__: object) -> None:
        """Begin to save; where nothing was resumed, the engine learns here what belongs to its state."""
        if self._training.kept is None:
            _state_of(self._registry, self._training.trainer).resume({_OBJECT: self._training}, by_script=False)
        self._training.begin()


def _state_of(registry: Registry, trainer: Trainer) -> Any:
    prepared = registry.find(trainer.model)
    assert prepared is not None and prepared.elastic is not None, "other engines were refused when they were made"
    return prepared.elastic


def _going_on(registry: Registry, stock: Function) -> Function:
    @functools.wraps(stock)
    def train(trainer: Trainer, resume_from_checkpoint: Any = None, *args: object, **kwargs: object) -> object:
        worker = own_worker()
        if worker is None or not registry.adapters.processes.asks_for_engine(trainer.accelerator):
            return stock(trainer, resume_from_checkpoint, *args, **kwargs)
        group = dist.new_group(backend="gloo")
        kept = find_newest(worker, group, None)
        with tempfile.TemporaryDirectory(prefix="ds_hetero-") as folder:
            training = _Training(trainer, kept, Path(folder))
            trainer._ds_hetero_training = training
            callback = _Beginning(registry, training)
            trainer.add_callback(callback)
            try:
                return stock(trainer, resume_from_checkpoint if kept is None else folder, *args, **kwargs)
            finally:
                trainer.remove_callback(callback)
                del trainer._ds_hetero_training

    return train
