"""Samplers of one replica, made from the loader of one process: they read only samples that the replica trains on.

The samples keep the order and the number that the given loader's sampler, or iterable dataset, has; the batches are
those of `BatchSplit`. Every rank must be given a loader of all samples, not one that is sharded already.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Iterator
from itertools import chain, islice
from typing import Any, NamedTuple

from torch.utils.data import BatchSampler, DataLoader, IterableDataset, Sampler

from ds_hetero.errors import BatchError
from ds_hetero.runtime.data.epochs import add_to_checksum, expect_same_checksum
from ds_hetero.runtime.data.shards import Entries
from ds_hetero.values.plans import BatchSplit

_COPIED = (
    "num_workers",
    "collate_fn",
    "pin_memory",
    "timeout",
    "worker_init_fn",
    "multiprocessing_context",
    "generator",
    "prefetch_factor",
    "persistent_workers",
)


class Drawn(NamedTuple):
    """The samples of one step, those of all replicas."""

    samples: int | None = None  # how many; None where they were drawn by another process, or the epoch is over
    checksum: int = 0  # of their indices, or of a stream's first one; 0 where these are not known


class _Steps:
    """Draws for the steps of an epoch, those of all replicas, and which of them are left out.

    Attributes:
        checksum: of what the steps that were taken have drawn; None where another process drew it.
        expected: what `checksum` is to be after the steps that are left out; None where that is not known.
    """

    def __init__(self, split: BatchSplit) -> None:
        self.first_step = 0  # of the next epoch; those before are drawn and left out
        self.newest_step = -1  # that was drawn in this epoch
        self._splits = [(0, split)]  # and the steps of the epoch from which they hold
        self.checksum: int | None = 0
        self.expected: int | None = None
        self._drawn: dict[int, Drawn] = {}

    @property
    def split(self) -> BatchSplit:
        """How the steps to come are shared out."""
        return self._splits[-1][1]

    def split_at(self, step: int) -> BatchSplit:
        """Return how a step of this epoch is shared out."""
        return next(split for first, split in reversed(self._splits) if first <= step)

    def change(self, split: BatchSplit, step: int) -> None:
        """Share steps from this one on by another split of as many samples; all ranks alike, before it is drawn."""
        assert split.samples == self.split.samples and step > self.newest_step, (split, step, self.newest_step)
        self._splits.append((step, split))

    def take_drawn(self, step: int) -> Drawn:
        """Return what was drawn for a step, once."""
        drawn = self._drawn.pop(step, Drawn())
        self._add(drawn)
        return drawn

    def oldest_checksum(self) -> int:
        """Return the checksum of the oldest step that was drawn and not asked for, once; 0 where there is none."""
        return self._drawn.pop(min(self._drawn)).checksum if self._drawn else 0

    def _samples_by_step(self, samples: Iterable[Any], size: int) -> Iterator[list[Any]]:
        """Yield samples of the steps not left out, ``size`` each. Raises `BatchError`: those left out have changed."""
        first_step, self.checksum = self.first_step, 0
        self.newest_step, self._splits = -1, [(0, self.split)]
        self._drawn.clear()
        steps = _chunks(samples, size)
        for chosen in islice(steps, first_step):
            self._add(_drawn(chosen))
        if first_step:
            expect_same_checksum(self.checksum, self.expected, f"{first_step} steps")
        for step, chosen in enumerate(steps, first_step):
            self._drawn[step], self.newest_step = _drawn(chosen), step
            yield chosen

    def _add(self, drawn: Drawn) -> None:
        known = self.checksum is not None and drawn.samples is not None
        self.checksum = add_to_checksum(self.checksum or 0, drawn) if known else None


class ReplicaSampler(_Steps, Sampler[list[int]]):
    """Batch sampler of one replica over the batch sampler of one process.

    Args:
        batch_sampler: yields lists of sample indices; ``batch_sampler.sampler`` is where shuffling is seeded.
    """

    def __init__(self, batch_sampler: Any, split: BatchSplit, replica: int) -> None:
        super().__init__(split)
        self.batch_sampler, self.replica = batch_sampler, replica

    @property
    def sampler(self) -> Any:
        """The sampler that yields single samples, if there is one."""
        return getattr(self.batch_sampler, "sampler", None)

    @sampler.setter
    def sampler(self, sampler: Any) -> None:  # accelerate puts a seeded one in
        self.batch_sampler.sampler = sampler

    @property
    def batch_size(self) -> int:
        """Samples of this replica's micro-batch."""
        return self.split.micro_batch_sizes[self.replica]

    @property
    def drop_last(self) -> bool:
        """The batch sampler's ``drop_last``."""
        return bool(getattr(self.batch_sampler, "drop_last", False))

    def set_epoch(self, epoch: int) -> None:
        """Tell the parts inside which epoch comes next."""
        for part in (self.batch_sampler, self.sampler):
            if hasattr(part, "set_epoch"):
                part.set_epoch(epoch)

    def __iter__(self) -> Iterator[list[int]]:
        samples = chain.from_iterable(self.batch_sampler)
        for chosen in self._samples_by_step(samples, self.split.samples):
            split = self.split_at(self.newest_step)
            yield from (chosen[a:b] for a, b in split.micro_batches_of(self.replica, len(chosen)))

    def __len__(self) -> int:
        full, rest = divmod(self.num_samples, self.split.samples)
        return full * self.split.micro_batches[self.replica] + len(self.split.micro_batches_of(self.replica, rest))

    @property
    def num_samples(self) -> int:
        """Samples of an epoch, of all replicas. Raises ``TypeError``: the batch sampler does not show how many."""
        size = getattr(self.batch_sampler, "batch_size", None)
        if self.sampler is None or not isinstance(size, int):
            raise TypeError(f"{type(self.batch_sampler).__name__} does not show how many samples it yields")
        samples = len(self.sampler)
        return samples - samples % size if self.drop_last else samples


class ReplicaStream(_Steps, IterableDataset[Any]):
    """One replica's samples of an iterable dataset; ``drop_last`` leaves out what does not fill a process's batch."""

    def __init__(self, dataset: Any, batch_size: int, drop_last: bool, split: BatchSplit, replica: int) -> None:
        super().__init__(split)
        self.dataset, self.replica = dataset, replica
        self.batch_size, self.drop_last = batch_size, drop_last

    def set_epoch(self, epoch: int) -> None:
        """Tell the parts inside which epoch comes next."""
        if hasattr(self.dataset, "set_epoch"):
            self.dataset.set_epoch(epoch)

    def __iter__(self) -> Iterator[Any]:
        samples: Iterable[Any] = self.dataset
        if self.drop_last:
            full = (batch for batch in _chunks(samples, self.batch_size) if len(batch) == self.batch_size)
            samples = chain.from_iterable(full)
        for chosen in self._samples_by_step(samples, self.split.samples):
            for a, b in self.split.micro_batches_of(self.replica, len(chosen)):
                yield from chosen[a:b]

    @property
    def num_samples(self) -> int:
        """Samples of an epoch, of all replicas. Raises ``TypeError``: the dataset has no length."""
        samples = len(self.dataset)
        return samples - samples % self.batch_size if self.drop_last else samples


def replica_samples(
    dataloader: DataLoader[Any], split: BatchSplit, replica: int, *, is_of_rank: bool = False
) -> DataLoader[Any]:
    """Return a loader like ``dataloader``, a plain ``DataLoader``, that yields this replica's micro-batches.

    Args:
        is_of_rank: its batch size is a rank's, so that ``drop_last`` leaves out what fills no micro-step of all ranks.

    Raises:
        BatchError: the loader does not make batches itself, or reads a stream with several workers, whose batches do
            not come in the order of the samples.
    """
    dataset = dataloader.dataset
    kept: Entries = {name: getattr(dataloader, name) for name in _COPIED}
    if isinstance(dataset, IterableDataset):
        if dataloader.batch_size is None or dataloader.num_workers > 1:
            raise BatchError(
                f"an iterable dataset with batch_size={dataloader.batch_size} and num_workers={dataloader.num_workers} "
                "cannot be divided among replicas that differ; give a batch_size, and at most one worker."
            )
        stream = ReplicaStream(dataset, dataloader.batch_size, dataloader.drop_last, split, replica)
        return DataLoader(stream, split.micro_batch_sizes[replica], **kept)
    if dataloader.batch_sampler is None:
        raise BatchError("a DataLoader without a batch_size cannot be divided among replicas that differ; give it one.")
    sampler: Any = dataloader.batch_sampler
    if is_of_rank and type(sampler) is BatchSampler:
        sampler = BatchSampler(sampler.sampler, sum(split.micro_batch_sizes), sampler.drop_last)
    return DataLoader(dataset, batch_sampler=ReplicaSampler(sampler, split, replica), **kept)


def all_samples(dataloader: Any) -> DataLoader[Any]:
    """Return the loader of one process again, from what `replica_samples` made of it."""
    reader = reader_of(dataloader)
    kept: Entries = {name: getattr(dataloader, name) for name in _COPIED}
    if isinstance(reader, ReplicaStream):
        return DataLoader(reader.dataset, reader.batch_size, drop_last=reader.drop_last, **kept)
    assert reader is not None
    return DataLoader(dataloader.dataset, batch_sampler=reader.batch_sampler, **kept)


def reader_of(dataloader: Any) -> ReplicaSampler | ReplicaStream | None:
    """Return a loader's sampler from `replica_samples`, also after accelerate has made another loader of it."""
    for part in (getattr(dataloader, "batch_sampler", None), getattr(dataloader, "dataset", None)):
        if isinstance(part, ReplicaSampler | ReplicaStream):
            return part
    return None


def reader_inside(dataloader: Any) -> ReplicaSampler | ReplicaStream | None:
    """`reader_of` a loader, or of what it wraps, as accelerate's skipping of batches does."""
    part = getattr(dataloader, "batch_sampler", None)
    while part is not None and not isinstance(part, ReplicaSampler):
        part = getattr(part, "batch_sampler", None)
    return part if isinstance(part, ReplicaSampler) else reader_of(dataloader)


def steps_in_epoch(reader: ReplicaSampler | ReplicaStream) -> int:
    """Optimizer steps of an epoch. Raises ``TypeError``: the number of samples is not known."""
    return -(-reader.num_samples // reader.split.samples)


def micro_steps_in_epoch(reader: ReplicaSampler | ReplicaStream) -> int:
    """Micro-steps of an epoch.

    Where all replicas have as many micro-batches in a step, they are the micro-batches of one process: a short last
    step has as many as the replicas need for its samples. Where they have not, one process has steps alone, and every
    step counts alike. Raises ``TypeError``: the number of samples is not known.
    """
    split = reader.split
    if len(set(split.micro_batches)) > 1:
        return steps_in_epoch(reader) * split.micro_steps
    full, rest = divmod(reader.num_samples, split.samples)
    replicas = range(len(split.micro_batches))
    return full * split.micro_steps + max(len(split.micro_batches_of(replica, rest)) for replica in replicas)


def _drawn(chosen: list[Any]) -> Drawn:
    """Draws of a step: indices, or samples of a stream, of which one is enough to see another order."""
    indices = all(isinstance(one, int) for one in chosen)
    return Drawn(len(chosen), zlib.crc32(repr(chosen).encode()) if indices else add_to_checksum(0, chosen[:1]))


def _chunks(items: Iterable[Any], size: int) -> Iterator[list[Any]]:
    items = iter(items)
    while chunk := list(islice(items, size)):
        yield chunk
