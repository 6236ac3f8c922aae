"""The Trainer's training loader, also if the script overrides ``get_train_dataloader``.

loader                                         batches
prepared by accelerate                         divided among replicas when it is prepared
plain, replicas take different batches         divided here (`replica_samples`)
plain, ranks share each sequence               read by all ranks; `count_batches` gives the length of an epoch
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch.utils.data import DataLoader
from transformers import Trainer

from ds_hetero.engine.known_loaders import KNOWN_LOADERS
from ds_hetero.errors import ConfigError
from ds_hetero.job.start import ReplicaBatches
from ds_hetero.runtime.collectives import on_all_ranks
from ds_hetero.runtime.data.batch_mode import describe_loader, expect_unsharded
from ds_hetero.runtime.data.epoch_length import EpochLength, epoch_length
from ds_hetero.runtime.data.sampling import reader_of, replica_samples

Preparing = Callable[[], contextlib.AbstractContextManager[None]]


@dataclass(frozen=True)
class CountedLoader:
    """A stand-in for a loader, for code that only asks for its length. ``length``: None if unknown."""

    dataset: Any
    length: int | None

    def __len__(self) -> int:
        if self.length is None:
            raise TypeError("the training loader has no length")
        return self.length


@contextlib.contextmanager
def making_train_loader(
    trainer: Trainer, preparing: Preparing, batches: ReplicaBatches | None, *, is_of_rank: bool
) -> Iterator[None]:
    """Let ``get_train_dataloader`` of a Trainer, or of a subclass, return a loader for this engine inside.

    Args:
        preparing: a context in which accelerate divides loaders among replicas.
        batches: of replicas that take different batches; None if all take equal ones.
        is_of_rank: see `replica_samples`.
    """
    make = trainer.get_train_dataloader

    def get_train_dataloader() -> Any:
        with preparing():
            loader = make()
        if batches is None or reader_of(loader) is not None:
            return loader
        return _divide(loader, batches, f"{type(trainer).__name__}.get_train_dataloader", is_of_rank)

    trainer.get_train_dataloader = get_train_dataloader
    try:
        yield
    finally:
        trainer.__dict__.pop("get_train_dataloader", None)


def _divide(loader: Any, batches: ReplicaBatches, made_in: str, is_of_rank: bool) -> Any:
    """Let a plain loader read this rank's samples only. Raises `ConfigError` and `BatchError`."""
    reports = on_all_ranks(lambda: describe_loader(loader, KNOWN_LOADERS, batches.replica_id))
    if not isinstance(loader, DataLoader):
        raise ConfigError(
            f"{made_in} returned {type(loader).__name__}, not a DataLoader: its samples cannot be divided among ranks "
            f"that take different batches ({batches.split}). Return a DataLoader of all samples."
        )
    expect_unsharded(reports, divides_samples=True)
    return replica_samples(loader, batches.split, batches.replica_id, is_of_rank=is_of_rank)


def count_batches(trainer: Trainer, loader: Any) -> EpochLength:
    """Count the batches of an epoch of this rank's replica, if ranks share each sequence.

    Caller: every rank of the world.
    """
    replica = dist.get_rank() // trainer.get_sp_size()
    return epoch_length(loader, KNOWN_LOADERS, replica, f"{type(trainer).__name__}.get_train_dataloader")
