"""Checkpoints of the Hugging Face Trainer: weights of stages, and steps of saving that end on all ranks or on none."""

from __future__ import annotations

import contextlib
import functools
import shutil
from pathlib import Path

import torch
from transformers import Trainer

from ds_hetero.engine.process.patching import Function
from ds_hetero.engine.registry import Registry
from ds_hetero.errors import CheckpointError, HeteroError, PeerError
from ds_hetero.job.checkpoints.checkpoint_folder import why_not_written
from ds_hetero.runtime.collectives import on_all_ranks


def saving_stages(registry: Registry, stock: Function) -> Function:
    """The weights of a model that is cut into stages are written by the stages, in the folder's usual format."""

    @functools.wraps(stock)
    def save_model(trainer: Trainer, output_dir: str | None = None, _internal_call: bool = False) -> None:
        pipelined = registry.find_pipelined(trainer.model)
        if pipelined is None:
            stock(trainer, output_dir, _internal_call)
            return
        folder = output_dir if output_dir is not None else trainer.args.output_dir
        pipelined.save_pretrained(folder)
        if trainer.args.should_save:
            if trainer.processing_class is not None:
                trainer.processing_class.save_pretrained(folder)
            torch.save(trainer.args, Path(folder, "training_args.bin"))

    return save_model


def failing_together(registry: Registry, stock: Function) -> Function:
    """A step of saving a checkpoint that ends on all ranks if it fails on one; they wait for each other in the next."""

    @functools.wraps(stock)
    def save(trainer: Trainer, *args: object, **kwargs: object) -> None:
        by_user = stock.__name__ == "save_model" and not kwargs.get("_internal_call")  # maybe on one rank
        if by_user or not registry.adapters.processes.asks_for_engine(trainer.accelerator):
            stock(trainer, *args, **kwargs)
            return

        def save_own_part() -> None:
            try:
                stock(trainer, *args, **kwargs)
            except (HeteroError, PeerError):
                raise
            except Exception as error:  # torch and safetensors raise almost anything here
                reason = why_not_written(Path(trainer.args.output_dir), error)
                raise CheckpointError(
                    f"{stock.__name__} of the Trainer cannot write the checkpoint: {reason}."
                ) from error

        on_all_ranks(save_own_part)

    return save


def marking_unfinished(registry: Registry, stock: Function) -> Function:
    """A checkpoint that cannot be saved gets a name that the Trainer does not resume from."""
    save_all = failing_together(registry, stock)

    @functools.wraps(stock)
    def save_checkpoint(trainer: Trainer, model: object, trial: object) -> None:
        try:
            save_all(trainer, model, trial)
        except CheckpointError as error:
            folder = Path(trainer._get_output_dir(trial=trial), f"checkpoint-{trainer.state.global_step}")
            unfinished = folder.with_name(f"{folder.name}.unfinished")
            if trainer.args.should_save and folder.exists():
                shutil.rmtree(unfinished, ignore_errors=True)
                with contextlib.suppress(OSError):  # what refuses a file may refuse this as well
                    folder.rename(unfinished)
            raise CheckpointError(
                f"{error} What the Trainer has written is in {folder} or {unfinished.name}; delete it, and resume from "
                "the checkpoint before."
            ) from error

    return save_checkpoint
