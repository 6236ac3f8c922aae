"""Divide the batches of the Trainer's training loader, also if the script overrides ``get_train_dataloader``.

loader                                         batches
prepared by accelerate                         divided among replicas when it is prepared
plain, replicas take different batches         divided here (`replica_samples`)
plain, ranks share each sequence               read by all ranks of a replica; `count_batches` counts those of an epoch
of ms-swift, ranks share each sequence         made one of all samples, and prepared by accelerate (`rank_samplers`)
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch.utils.data import DataLoader
from transformers import Trainer

from ds_hetero.engine.known_loaders import KNOWN_LOADERS
from ds_hetero.errors import ConfigError, SamplingError
from ds_hetero.frameworks.transformers.rank_samplers import divides_by_rank, loader_of_all_samples
from ds_hetero.job.start import ReplicaBatches
from ds_hetero.runtime.collectives import on_all_ranks
from ds_hetero.runtime.data.batch_mode import describe_loader, expect_unsharded
from ds_hetero.runtime.data.epoch_length import EpochLength, epoch_length
from ds_hetero.runtime.data.sampling import reader_of, replica_samples

Preparing = Callable[[], contextlib.AbstractContextManager[None]]


@dataclass(frozen=True)
class CountedLoader:
    """A stand-in for a loader, for code that reads only its length.

    Args:
        length: batches of an epoch; None if unknown.
    """

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
    """Inside the context, let ``get_train_dataloader`` of a Trainer, or of a subclass, return a loader for this engine.

    Args:
        preparing: makes a context in which accelerate divides loaders among replicas.
        batches: how replicas share samples if they take different batches; None if all take equal batches.
        is_of_rank: whether every replica is one rank, see `replica_samples`.
    """
    make_loader = trainer.get_train_dataloader

    def get_train_dataloader() -> Any:
        with preparing():
            loader = make_loader()
            if batches is None and divides_by_rank(loader):
                seed_workers_by_replica(trainer, loader)
                all_samples = loader_of_all_samples(loader, dist.get_world_size() // trainer.get_sp_size())
                loader = trainer.accelerator.prepare(all_samples)
        if batches is None or reader_of(loader) is not None:
            return loader
        return _divide_samples(loader, batches, f"{type(trainer).__name__}.get_train_dataloader", is_of_rank)

    trainer.get_train_dataloader = get_train_dataloader
    try:
        yield
    finally:
        trainer.__dict__.pop("get_train_dataloader", None)


def seed_workers_by_replica(trainer: Trainer, loader: Any) -> None:
    """Seed loader workers by replica, so that a collator draws the same masks on all ranks of a replica.

    ``Trainer._get_dataloader`` seeds workers by rank: ``partial(seed_worker, num_workers=..., rank=...)``.
    """
    loader = getattr(loader, "base_dataloader", loader)
    seed_worker = loader.worker_init_fn
    if isinstance(seed_worker, functools.partial) and "rank" in seed_worker.keywords:
        replica = seed_worker.keywords["rank"] // trainer.get_sp_size()
        keywords = {**seed_worker.keywords, "rank": replica}
        loader.worker_init_fn = functools.partial(seed_worker.func, *seed_worker.args, **keywords)


def _divide_samples(loader: Any, batches: ReplicaBatches, method_name: str, is_of_rank: bool) -> Any:
    """Return a loader of only those samples that this rank's replica takes.

    Args:
        method_name: name of the script's method that made ``loader``.

    Caller: every rank of the world.
    Collectives: one `on_all_ranks`.

    Raises:
        ConfigError: ``loader`` is not a DataLoader.
        BatchError: see `expect_unsharded`.
    """
    reports = on_all_ranks(lambda: describe_loader(loader, KNOWN_LOADERS, batches.replica_id))
    if not isinstance(loader, DataLoader):
        raise ConfigError(
            f"{method_name} returned a {type(loader).__name__}, not a DataLoader, so its samples cannot be divided "
            f"among ranks that take different batches ({batches.split}). Return a DataLoader of all samples."
        )
    expect_unsharded(reports, divides_samples=True)
    return replica_samples(loader, batches.split, batches.replica_id, is_of_rank=is_of_rank)


def count_batches(trainer: Trainer, loader: Any, *, needs_whole_batches: bool) -> EpochLength:
    """Return the number of batches in an epoch of this rank's replica, whose ranks share each sequence.

    Args:
        needs_whole_batches: True if all ranks of a replica need the same whole batch, as for a loss from all logits.

    Caller: every rank of the world.

    Raises:
        SamplingError: on every rank; see `epoch_length`. Or the ranks of a replica draw different batches, but need the
            same.
    """
    replica = dist.get_rank() // trainer.get_sp_size()
    method_name = f"{type(trainer).__name__}.get_train_dataloader"
    length = epoch_length(loader, KNOWN_LOADERS, replica, method_name)
    if needs_whole_batches and length.ranks_in_turn > 1:
        raise SamplingError(
            f"the loader of {method_name} gives each of the {length.ranks_in_turn} ranks of a replica batches of its "
            f"own, as by a DistributedSampler over all ranks, but {type(trainer).__name__} computes its loss from "
            "whole sequences or from all logits (compute_loss_func, label smoothing, a compute_loss that takes the "
            "labels): all ranks of a replica need the same batches. Return a DataLoader of all samples without such a "
            "sampler, "
            "prepared by self.accelerator.prepare(loader); or give the loss as model.loss_function."
        )
    return length
