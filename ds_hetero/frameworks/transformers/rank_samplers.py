"""Loaders of ms-swift, whose batch sampler divides samples by the ranks of torch.distributed.

ms-swift's trainers make their training loader themselves. Its sampler looks the rank up whenever it draws, so that
the ranks of a replica would draw different samples. Here it is made to draw as on one process; afterwards accelerate,
or `replica_samples`, divides the loader among replicas.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from itertools import chain
from typing import Any

from torch.utils.data import BatchSampler, DataLoader, Sampler

from ds_hetero.runtime.data.sampling import COPIED_ARGUMENTS
from ds_hetero.runtime.data.shards import Entries

_BY_RANK = ("swift.dataloader.shard", "BatchSamplerShard")  # module and class


def divides_by_rank(loader: Any) -> bool:
    """Return True for a loader with the batch sampler of ms-swift."""
    kind = type(getattr(loader, "batch_sampler", None))
    return (kind.__module__, kind.__name__) == _BY_RANK


def loader_of_all_samples(loader: Any, num_shards: int) -> DataLoader[Any]:
    """Return a loader like ``loader`` that yields the samples of all ranks in the order of one process.

    Args:
        loader: see `divides_by_rank`.
        num_shards: loaders whose batches together are one batch of one process.
    """
    sampler = loader.batch_sampler
    samples = _AllSamples(sampler, len(loader.dataset), num_shards)
    arguments: Entries = {name: getattr(loader, name) for name in COPIED_ARGUMENTS}
    batches = BatchSampler(samples, sampler.batch_size, sampler.drop_last)
    return DataLoader(loader.dataset, batch_sampler=batches, **arguments)


class _AllSamples(Sampler[int]):
    """Yields the samples that a batch sampler of ms-swift draws on one process."""

    def __init__(self, sampler: Any, num_samples: int, num_shards: int) -> None:
        kind = type(sampler)
        self._batches = copy.copy(sampler)
        # Both are properties of the class, which ask torch.distributed.
        self._batches.__class__ = type(kind.__name__, (kind,), {"rank": 0, "world_size": 1})
        self._batches.total_samples = num_samples  # rounded down by the sampler to what the ranks can share equally
        self._batches.batch_size = sampler.batch_size * num_shards  # inside which it groups samples by their length

    def __iter__(self) -> Iterator[int]:
        return chain.from_iterable(self._batches)

    def __len__(self) -> int:
        full_batches = len(self._batches) * self._batches.batch_size
        return full_batches if self._batches.drop_last else int(self._batches.total_samples)

    def set_epoch(self, epoch: int) -> None:
        """Tell the sampler which epoch comes next."""
        self._batches.set_epoch(epoch)
