"""Save checkpoints of the Hugging Face Trainer: weights of stages, and saves that succeed on all ranks or on none."""

from __future__ import annotations

import contextlib
import shutil
from pathlib import Path

import torch
from transformers import Trainer

from ds_hetero.engine.patching import Function
from ds_hetero.engine.registry import Registry
from ds_hetero.errors import CheckpointError, HeteroError, PeerError
from ds_hetero.frameworks.transformers.resumed_epochs import save_epoch
from ds_hetero.job.checkpoints import write_failure_reason
from ds_hetero.runtime.collectives import on_all_ranks


def save_stages(
    registry: Registry, stock: Function, trainer: Trainer, output_dir: str | None = None, _internal_call: bool = False
) -> None:
    """Replace ``Trainer.save_model``: write the weights of pipeline stages, in the format of transformers."""
    stage = registry.find_stage(trainer.model)
    if stage is None:
        stock(trainer, output_dir, _internal_call)
        return
    folder = output_dir if output_dir is not None else trainer.args.output_dir
    stage.save_pretrained(folder)
    if trainer.args.should_save:
        # The other files that ``Trainer._save`` writes.
        if trainer.processing_class is not None:
            trainer.processing_class.save_pretrained(folder)
        torch.save(trainer.args, Path(folder, "training_args.bin"))


def save_rng_state(registry: Registry, stock: Function, trainer: Trainer, output_dir: str) -> None:
    """Extend ``Trainer._save_rng_state``: also save the random states from the beginning of the epoch.

    A resumed job draws the order of the epoch again from these, and then skips the batches that it has trained.
    """
    stock(trainer, output_dir)
    if registry.adapters.processes.asks_for_engine(trainer.accelerator):
        save_epoch(trainer, Path(output_dir))


def fail_together(registry: Registry, stock: Function, trainer: Trainer, *args: object, **kwargs: object) -> None:
    """Run a step of saving a checkpoint, and raise on every rank if any rank failed.

    Otherwise the ranks without an error would wait in the next collective until it times out.

    Raises:
        CheckpointError: on every rank; a rank could not write.
    """
    # A script may call save_model on one rank only, so that call must not become collective.
    is_call_of_script = stock.__name__ == "save_model" and not kwargs.get("_internal_call")
    if is_call_of_script or not registry.adapters.processes.asks_for_engine(trainer.accelerator):
        stock(trainer, *args, **kwargs)
        return

    def save() -> None:
        try:
            stock(trainer, *args, **kwargs)
        except (HeteroError, PeerError):
            raise
        except Exception as error:  # torch and safetensors raise almost anything here
            reason = write_failure_reason(Path(trainer.args.output_dir), error)
            raise CheckpointError(f"{stock.__name__} of the Trainer cannot write the checkpoint: {reason}.") from error

    on_all_ranks(save)


def mark_unfinished(registry: Registry, stock: Function, trainer: Trainer, model: object, trial: object) -> None:
    """Replace ``Trainer._save_checkpoint``: rename an incomplete checkpoint, from which the Trainer would resume.

    Raises:
        CheckpointError: on every rank; a rank could not write.
    """
    try:
        fail_together(registry, stock, trainer, model, trial)
    except CheckpointError as error:
        folder = Path(trainer._get_output_dir(trial=trial), f"checkpoint-{trainer.state.global_step}")
        unfinished = folder.with_name(f"{folder.name}.unfinished")
        if trainer.args.should_save and folder.exists():
            shutil.rmtree(unfinished, ignore_errors=True)
            with contextlib.suppress(OSError):  # a file system that refuses a file may refuse the rename as well
                folder.rename(unfinished)
        raise CheckpointError(
            f"{error} The incomplete checkpoint is in {folder} or {unfinished.name}; delete it, and resume from the "
            "previous one."
        ) from error
