"""Divide the batches of the loaders that accelerate prepares among replicas."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch.utils.data import IterableDataset

from ds_hetero.engine.loader_by_mode import LoaderByMode
from ds_hetero.engine.patching import Function
from ds_hetero.errors import ConfigError
from ds_hetero.job.start import ReplicaBatches
from ds_hetero.runtime.data.sampling import replica_samples

# Settings of the loaders that are being prepared; None outside of `loaders_over_replicas`.
_sharding: ContextVar[_Sharding | None] = ContextVar("_sharding", default=None)


@dataclass(frozen=True)
class _Sharding:
    """How the batches of the loaders that accelerate is preparing are divided among ranks."""

    sp_size: int  # ranks that share a batch
    batches: ReplicaBatches | None  # how replicas share samples if they take different batches; None if equal ones
    by_mode: bool = False  # True if the model's mode decides, at every epoch, whether a loader trains or evaluates
    evaluates: bool = False  # True if the loaders are for evaluation only, whose order needs no random state


@contextlib.contextmanager
def loaders_over_replicas(
    sp_size: int, batches: ReplicaBatches | None, *, by_mode: bool = False, evaluates: bool = False
) -> Iterator[None]:
    """Inside the context, let accelerate divide the batches of loaders among replicas, not among ranks.

    Args:
        sp_size: number of ranks in a replica, which share a batch.
        batches: how replicas share samples if they take different batches, else None; see
            `ds_hetero.job.start.Request.batches_of`.
        by_mode: True if the model's mode decides, at every epoch, whether a loader trains or evaluates.
        evaluates: True if the loaders are for evaluation only.
    """
    token = _sharding.set(_Sharding(sp_size, batches, by_mode, evaluates))
    try:
        yield
    finally:
        _sharding.reset(token)


def prepare_data_loader(stock: Function, dataloader: Any, *args: object, **kwargs: object) -> object:
    """Replace ``prepare_data_loader``: inside `loaders_over_replicas`, divide batches among replicas.

    Raises:
        ConfigError: dispatch_batches is True.
    """
    sharding = _sharding.get()
    if sharding is None:
        return stock(dataloader, *args, **kwargs)
    batches = sharding.batches
    if sharding.by_mode and batches is not None:
        return LoaderByMode(stock(dataloader, *args, **kwargs), dataloader)
    num_replicas = dist.get_world_size() // sharding.sp_size
    replica = dist.get_rank() // sharding.sp_size
    if batches is not None:
        dataloader = replica_samples(dataloader, batches.split, batches.replica_id, is_of_rank=sharding.sp_size == 1)
        num_replicas, replica = 1, 0  # the loader has only this replica's samples, so accelerate must not divide them
    kwargs.update(num_processes=num_replicas, process_index=replica)
    if kwargs.get("dispatch_batches"):
        raise ConfigError(
            "dispatch_batches=True (of accelerator_config, or of DataLoaderConfiguration) lets rank 0 read all batches "
            "and send each rank another one, but here ranks share each sequence. Leave dispatch_batches out, or set it "
            "to False: every rank then reads the same batches, and keeps its part."
        )
    if isinstance(dataloader.dataset, IterableDataset) and kwargs.get("dispatch_batches") is None:
        kwargs["dispatch_batches"] = False  # by default, accelerate would let rank 0 send them
    if num_replicas == 1 and not sharding.evaluates:
        # Samplers shuffle by torch's random state, so accelerate has to make it equal on all ranks. With several
        # replicas, accelerate synchronizes a generator of the sampler instead.
        kwargs["rng_types"] = ["torch"]
    prepared = stock(dataloader, *args, **kwargs)
    if batches is not None:
        # ``begin`` and ``end`` register the loader, so that accelerate steps the optimizer at the end of an epoch. But
        # this loader is read ahead by one optimizer step, so the end would come too early. Every optimizer step has the
        # same number of micro-batches, so accelerate's count of these is enough.
        prepared.begin = prepared.end = _do_nothing
    return prepared


def _do_nothing() -> None:
    pass
