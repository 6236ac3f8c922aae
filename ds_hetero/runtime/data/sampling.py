"""Samplers that read one replica's samples, made from a loader of all samples.

All replicas together read the samples in the order of the loader's own sampler or iterable dataset; `BatchSplit` says
which of them each replica takes. Every rank must be given a loader of all samples, not one that is sharded already.

Example: a step has 6 samples, of which replica 0 takes 4 in one micro-batch and replica 1 takes 2. From the order
7 2 5 0 3 1 replica 0 reads 7 2 5 0, and replica 1 reads 3 1.
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

COPIED_ARGUMENTS = (
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
    """Number and checksum of the samples of one step, those of all replicas together."""

    samples: int | None = None  # None if another process drew them (a worker), or the epoch is over
    checksum: int = 0  # of their indices, or of a stream's first sample; 0 if these are not known


class _StepSamples:
    """Draws the samples of the steps of an epoch, those of all replicas; leaves out steps that were trained on before.

    Attributes:
        checksum: checksum of the samples of all steps so far; None if another process drew them.
        expected: the ``checksum`` that the steps before ``first_step`` must have; None if it is not known.
        first_step: step at which the next epoch begins; samples of the steps before it are drawn and left out.
        newest_step: the latest step of this epoch whose samples were drawn.
    """

    def __init__(self, split: BatchSplit) -> None:
        self.first_step = 0
        self.newest_step = -1
        self._splits = [(0, split)]  # (first step, the split from that step on)
        self.checksum: int | None = 0
        self.expected: int | None = None
        self._drawn: dict[int, Drawn] = {}

    @property
    def split(self) -> BatchSplit:
        """The split by which the replicas share the steps to come."""
        return self._splits[-1][1]

    def split_at(self, step: int) -> BatchSplit:
        """Return the split by which the replicas share ``step`` of this epoch."""
        return next(split for first, split in reversed(self._splits) if first <= step)

    def change(self, split: BatchSplit, step: int) -> None:
        """Let another split of as many samples share the steps from ``step`` on, which must not be drawn yet.

        Every rank makes the same change.
        """
        assert split.samples == self.split.samples and step > self.newest_step, (split, step, self.newest_step)
        self._splits.append((step, split))

    def take_drawn(self, step: int) -> Drawn:
        """Return the samples drawn for a step, forget them, and add them to ``checksum``."""
        drawn = self._drawn.pop(step, Drawn())
        self._add_to_checksum(drawn)
        return drawn

    def oldest_checksum(self) -> int:
        """Return the checksum of the oldest step that was drawn and not taken yet, and forget it; 0 if none is left."""
        return self._drawn.pop(min(self._drawn)).checksum if self._drawn else 0

    def _samples_by_step(self, samples: Iterable[Any], size: int) -> Iterator[list[Any]]:
        """Yield the ``size`` samples of each step that is not left out.

        Raises:
            SamplingError: in the steps that are left out, the earlier job had other samples.
        """
        first_step, self.checksum = self.first_step, 0
        self.newest_step, self._splits = -1, [(0, self.split)]
        self._drawn.clear()
        steps = _chunks(samples, size)
        for samples_of_step in islice(steps, first_step):
            self._add_to_checksum(_number_and_checksum(samples_of_step))
        if first_step:
            expect_same_checksum(self.checksum, self.expected, f"{first_step} steps")
        for step, samples_of_step in enumerate(steps, first_step):
            self._drawn[step], self.newest_step = _number_and_checksum(samples_of_step), step
            yield samples_of_step

    def _add_to_checksum(self, drawn: Drawn) -> None:
        is_known = self.checksum is not None and drawn.samples is not None
        self.checksum = add_to_checksum(self.checksum or 0, drawn) if is_known else None


class ReplicaSampler(_StepSamples, Sampler[list[int]]):
    """Batch sampler that yields one replica's part of the samples that the wrapped batch sampler draws.

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
        """Tell the batch sampler and its sampler which epoch comes next."""
        for part in (self.batch_sampler, self.sampler):
            if hasattr(part, "set_epoch"):
                part.set_epoch(epoch)

    def __iter__(self) -> Iterator[list[int]]:
        samples = chain.from_iterable(self.batch_sampler)
        for samples_of_step in self._samples_by_step(samples, self.split.samples):
            split = self.split_at(self.newest_step)
            for start, stop in split.micro_batches_of(self.replica, len(samples_of_step)):
                yield samples_of_step[start:stop]

    def __len__(self) -> int:
        full, num_rest = divmod(self.num_samples, self.split.samples)
        return full * self.split.micro_batches[self.replica] + len(self.split.micro_batches_of(self.replica, num_rest))

    @property
    def num_samples(self) -> int:
        """Number of samples of an epoch, of all replicas. Raises ``TypeError``: the batch sampler does not show it."""
        size = getattr(self.batch_sampler, "batch_size", None)
        if self.sampler is None or not isinstance(size, int):
            raise TypeError(f"{type(self.batch_sampler).__name__} does not show how many samples it yields")
        samples = len(self.sampler)
        return samples - samples % size if self.drop_last else samples


class ReplicaStream(_StepSamples, IterableDataset[Any]):
    """Iterable dataset that yields one replica's samples of another iterable dataset.

    Args:
        batch_size: of the loader of all samples.
        drop_last: leave out samples at the end that do not fill a batch of ``batch_size``.
    """

    def __init__(self, dataset: Any, batch_size: int, drop_last: bool, split: BatchSplit, replica: int) -> None:
        super().__init__(split)
        self.dataset, self.replica = dataset, replica
        self.batch_size, self.drop_last = batch_size, drop_last

    def set_epoch(self, epoch: int) -> None:
        """Tell the dataset which epoch comes next."""
        if hasattr(self.dataset, "set_epoch"):
            self.dataset.set_epoch(epoch)

    def __iter__(self) -> Iterator[Any]:
        samples: Iterable[Any] = self.dataset
        if self.drop_last:
            full = (batch for batch in _chunks(samples, self.batch_size) if len(batch) == self.batch_size)
            samples = chain.from_iterable(full)
        for samples_of_step in self._samples_by_step(samples, self.split.samples):
            for start, stop in self.split.micro_batches_of(self.replica, len(samples_of_step)):
                yield from samples_of_step[start:stop]

    @property
    def num_samples(self) -> int:
        """Number of samples of an epoch, of all replicas. Raises ``TypeError``: the dataset has no length."""
        samples = len(self.dataset)
        return samples - samples % self.batch_size if self.drop_last else samples


def replica_samples(
    dataloader: DataLoader[Any], split: BatchSplit, replica: int, *, is_of_rank: bool = False
) -> DataLoader[Any]:
    """Return a loader like ``dataloader``, a plain ``DataLoader``, that yields this replica's micro-batches.

    Args:
        is_of_rank: the loader's batch size is that of one rank, so ``drop_last`` leaves out samples that do not fill a
            micro-step of all ranks.

    Raises:
        BatchError: the loader does not make batches itself, or reads a stream with several workers, whose batches do
            not come in the order of the samples.
    """
    dataset = dataloader.dataset
    copied_arguments: Entries = {name: getattr(dataloader, name) for name in COPIED_ARGUMENTS}
    if isinstance(dataset, IterableDataset):
        if dataloader.batch_size is None or dataloader.num_workers > 1:
            raise BatchError(
                f"an iterable dataset with batch_size={dataloader.batch_size} and num_workers={dataloader.num_workers} "
                "cannot be divided among replicas that differ; give it a batch_size, and at most one worker."
            )
        stream = ReplicaStream(dataset, dataloader.batch_size, dataloader.drop_last, split, replica)
        return DataLoader(stream, split.micro_batch_sizes[replica], **copied_arguments)
    if dataloader.batch_sampler is None:
        raise BatchError("a DataLoader without a batch_size cannot be divided among replicas that differ; give it one.")
    sampler: Any = dataloader.batch_sampler
    if is_of_rank and type(sampler) is BatchSampler:
        sampler = BatchSampler(sampler.sampler, sum(split.micro_batch_sizes), sampler.drop_last)
    return DataLoader(dataset, batch_sampler=ReplicaSampler(sampler, split, replica), **copied_arguments)


def all_samples(dataloader: Any) -> DataLoader[Any]:
    """Return the loader of all samples from which `replica_samples` made ``dataloader``."""
    reader = reader_of(dataloader)
    copied_arguments: Entries = {name: getattr(dataloader, name) for name in COPIED_ARGUMENTS}
    if isinstance(reader, ReplicaStream):
        return DataLoader(reader.dataset, reader.batch_size, drop_last=reader.drop_last, **copied_arguments)
    assert reader is not None
    return DataLoader(dataloader.dataset, batch_sampler=reader.batch_sampler, **copied_arguments)


def reader_of(dataloader: Any) -> ReplicaSampler | ReplicaStream | None:
    """Return the sampler or dataset that `replica_samples` put into a loader; None for any other loader.

    Finds it also after accelerate has made another loader from that one.
    """
    for part in (getattr(dataloader, "batch_sampler", None), getattr(dataloader, "dataset", None)):
        if isinstance(part, ReplicaSampler | ReplicaStream):
            return part
    return None


def reader_inside(dataloader: Any) -> ReplicaSampler | ReplicaStream | None:
    """Return the result of `reader_of`, also for a loader in which other batch samplers wrap the sampler.

    accelerate wraps batch samplers to skip batches.
    """
    part = getattr(dataloader, "batch_sampler", None)
    while part is not None and not isinstance(part, ReplicaSampler):
        part = getattr(part, "batch_sampler", None)
    return part if isinstance(part, ReplicaSampler) else reader_of(dataloader)


def steps_in_epoch(reader: ReplicaSampler | ReplicaStream) -> int:
    """Return the optimizer steps of an epoch. Raises ``TypeError``: the number of samples is not known."""
    return -(-reader.num_samples // reader.split.samples)


def micro_steps_in_epoch(reader: ReplicaSampler | ReplicaStream) -> int:
    """Return the micro-steps of an epoch.

    If all replicas have the same number of micro-batches in a step, a short last step has only as many micro-steps as
    the replicas need for its samples, as in one process. Else every step counts `BatchSplit.micro_steps`.

    Raises:
        TypeError: the number of samples is not known.
    """
    split = reader.split
    if len(set(split.micro_batches)) > 1:
        return steps_in_epoch(reader) * split.micro_steps
    full, num_rest = divmod(reader.num_samples, split.samples)
    replicas = range(len(split.micro_batches))
    return full * split.micro_steps + max(len(split.micro_batches_of(replica, num_rest)) for replica in replicas)


def _number_and_checksum(samples_of_step: list[Any]) -> Drawn:
    """Return number and checksum of the samples of a step: of all indices, or of the first sample of a stream.

    One sample of a stream costs less than all, and is enough to notice another order.
    """
    are_indices = all(isinstance(sample, int) for sample in samples_of_step)
    checksum = zlib.crc32(repr(samples_of_step).encode()) if are_indices else add_to_checksum(0, samples_of_step[:1])
    return Drawn(len(samples_of_step), checksum)


def _chunks(items: Iterable[Any], size: int) -> Iterator[list[Any]]:
    """Yield lists of ``size`` items, the last one perhaps shorter."""
    items = iter(items)
    while chunk := list(islice(items, size)):
        yield chunk
