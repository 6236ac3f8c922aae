"""A loader of micro-batches for a module that every rank runs whole, where the ranks take different micro-batches.

    for images, classes in SampleLoader(dataloader, trainee, device):    # this rank's micro-batches

An optimizer step takes the next `BatchSplit.samples` samples in the order in which one process would read them, and has
`BatchSplit.micro_steps` micro-batches on every rank. A rank with fewer micro-batches gets its last one again, as a
filler whose loss has weight zero. The trainee gets the number of samples and labels of each micro-batch and of the
step, from which it weighs the loss.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import count, islice
from typing import Any, Literal, Protocol

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from ds_hetero.errors import BatchError
from ds_hetero.runtime.collectives import on_all_ranks
from ds_hetero.runtime.data.batch_mode import describe_loader, expect_unsharded
from ds_hetero.runtime.data.epochs import STATE_VERSION, Epochs, expect_compatible
from ds_hetero.runtime.data.fetch import FetchReport, Progress, ShortStep, exchange_reports
from ds_hetero.runtime.data.loader_around import LoaderAround
from ds_hetero.runtime.data.loader_names import TORCH_LOADERS, LoaderNames
from ds_hetero.runtime.data.loss_units import UnitCounts
from ds_hetero.runtime.data.sampling import (
    ReplicaSampler,
    ReplicaStream,
    all_samples,
    reader_of,
    replica_samples,
    steps_in_epoch,
)
from ds_hetero.runtime.data.shards import Batch, Entries
from ds_hetero.runtime.peers.calls import own_calls
from ds_hetero.runtime.peers.watch import waiting_for_peers
from ds_hetero.runtime.replica import Replica
from ds_hetero.values.plans import BatchSplit


@dataclass(frozen=True, kw_only=True, slots=True)
class MicroBatchCounts:
    """Numbers of samples and labels of a micro-batch and of its step, by which the micro-batch's loss is weighed."""

    index: int  # among the micro-batches of its optimizer step
    counts: UnitCounts  # of the micro-batch; zeros for a filler
    counts_of_step: UnitCounts  # of all micro-batches of all ranks
    micro_batches: int  # the largest number on any rank in the step, without fillers


class Trainee(Protocol):
    """The module for which a `SampleLoader` reads."""

    @property
    def replica(self) -> Replica:
        """The replica of this rank; it has no other rank."""

    @property
    def training(self) -> bool:
        """Whether the module trains on the batches, and does not evaluate them."""

    def note_reader(self, reader: ReplicaSampler | ReplicaStream | None) -> None:
        """Remember the reader, whose split changes with the replica's; None for a loader without such a reader."""

    def give(self, batch: MicroBatchCounts | None) -> None:
        """Note that the next loss belongs to this micro-batch; None if it is not known to which."""

    def expect_used(self) -> None:
        """Raise `StepError` if no backward followed the latest `give`."""


class SampleLoader(LoaderAround):
    """Wraps a loader of all samples; yields this rank's micro-batches, with the structure of the wrapped loader's.

    An epoch whose first batch is drawn in ``eval()`` yields the wrapped loader's batches as they are.

    Args:
        dataloader: a ``DataLoader`` of all samples, the same on every rank, whose batch size does not matter; any other
            iterable must yield this rank's micro-batches, all full.
        trainee: the module; its replica has the split of the batches among all ranks.
        batches: the mode that the user requested, if any; ``"own"`` is refused.
        is_of_rank: see `replica_samples`.

    Caller: every rank of the world.
    Collectives: once, a short description of every rank's loader; per optimizer step, one all_gather of 128 integers.

    Raises:
        BatchError: on every rank. When made: loaders are sharded. In iteration: the ranks draw different samples, or
            run out of them at different steps; nothing in a batch has one row per sample.
        StepError: in iteration, on every rank: a rank has left out a forward, backward or step.
        PeerError: another rank could not read its batch; that rank raises what happened to it.
    """

    def __init__(
        self,
        dataloader: Iterable[Any],
        trainee: Trainee,
        device: torch.device,
        batches: Literal["same", "own"] | None = None,
        names: LoaderNames = TORCH_LOADERS,
        *,
        is_of_rank: bool = False,
    ) -> None:
        replica = trainee.replica
        assert replica.batch_split is not None and replica.sp_size == 1, replica
        self._trainee, self._device, self._names = trainee, device, names
        report = describe_loader(dataloader, names, replica.replica_id, batches)
        with waiting_for_peers("comparing the loaders of all ranks"):
            reports = on_all_ranks(lambda: report)
        expect_unsharded(reports, isinstance(dataloader, DataLoader))
        if isinstance(dataloader, DataLoader):
            dataloader = replica_samples(dataloader, replica.batch_split, replica.replica_id, is_of_rank=is_of_rank)
        self.dataloader = dataloader
        self._epochs = Epochs(dataloader, names)
        self._checksum_before_step: int | None = 0
        self._epoch: int | None = None
        self._reader = reader_of(self.dataloader)
        trainee.note_reader(self._reader)
        self._short_step = ShortStep()
        self._has_read = False  # every rank has read a micro-batch
        self._latest: Any = None  # the latest micro-batch of this rank, which is its filler
        self._start = self._progress = Progress()

    def __len__(self) -> int:
        split, replica_id = self._split
        if self._reader is not None:
            return steps_in_epoch(self._reader) * split.micro_steps
        return -(-len(self.dataloader) // split.micro_batches[replica_id]) * split.micro_steps

    def set_epoch(self, epoch: int) -> None:
        """Tell the wrapped loader, or else its sampler and dataset, which epoch comes next."""
        self._epoch = epoch
        self._names.set_epoch(self.dataloader, epoch)

    def begin_at(self, progress: Progress) -> None:
        """Begin the next epoch after ``progress``, without comparing the samples that are left out."""
        self._start = self._progress = progress
        if self._reader is not None:
            self._reader.expected = None

    def state_dict(self) -> Entries:
        """Return this rank's position in the epoch, for `load_state_dict` on the same rank."""
        checksum = self._checksum_before_step if self._progress.used else self._checksum
        return {
            "version": STATE_VERSION,
            "global_batch": self._split[0].samples,
            "epoch": self._epoch,
            "steps": self._progress.fetches,
            "used": self._progress.used,
            "start": self._epochs.state(amid_epoch=self._progress != Progress(), checksum=checksum),
        }

    def load_state_dict(self, state: Batch) -> None:
        """Begin the next epoch where ``state`` was taken; the epochs after that are whole.

        Raises:
            BatchError: the state has another version, or another global batch. The next epoch raises it on every rank
                if the loader gives other samples than before.
        """
        split, replica_id = self._split
        expect_compatible(state, {"version": STATE_VERSION, "global_batch": split.samples})
        if state["epoch"] is not None:
            self.set_epoch(state["epoch"])
        self._start = self._progress = Progress(state["steps"], state["used"])
        per_step, start = split.micro_batches[replica_id], state["start"]
        self._checksum_before_step = start["checksum"]
        if self._reader is not None:
            self._reader.checksum = self._reader.expected = start["checksum"]
        num_dropped = state["steps"] * per_step if self._reader is None else 0
        self._epochs.resume(start, num_dropped, per_step if state["used"] else 0)

    @property
    def _checksum(self) -> int | None:
        """Return a checksum of the samples of the epoch so far; None if it cannot be compared."""
        return self._epochs.checksum if self._reader is None else self._reader.checksum

    def __iter__(self) -> Iterator[Any]:
        if not self._trainee.training:
            full_loader = self.dataloader if self._reader is None else all_samples(self.dataloader)
            yield from (on_device(batch, self._device) for batch in full_loader)
            return
        progress, self._start = self._start, Progress()
        self._progress = progress
        self._trainee.give(None)
        batches = self._open(progress.fetches)
        for number in count(progress.fetches):
            self._checksum_before_step = self._checksum
            micro_batches = self._fetch(batches, number)
            if not micro_batches:
                break
            for index, (weight, batch) in enumerate(micro_batches):
                was_used = index < progress.used and number == progress.fetches
                if was_used:
                    continue
                is_last = index + 1 == len(micro_batches)
                self._progress = Progress(number + 1) if is_last else Progress(number, index + 1)
                self._trainee.give(weight)
                yield from own_calls.yield_batch(on_device(batch, self._device))
        self._progress = Progress()

    @property
    def _split(self) -> tuple[BatchSplit, int]:
        """The split of the batches among all ranks, and this rank's index in it."""
        replica = self._trainee.replica
        assert replica.batch_split is not None
        return replica.batch_split, replica.replica_id

    def _open(self, first_step: int) -> Iterator[Any]:
        """Yield the wrapped loader's batches from ``first_step`` on; the loader is opened when the first is taken."""
        if self._reader is None:
            yield from self._epochs.read()
            return
        self._reader.first_step = first_step
        for batch in self._epochs.read():
            self._reader.first_step = 0
            yield batch
        self._reader.first_step = 0

    def _fetch(self, batches: Iterator[Any], number: int) -> list[tuple[MicroBatchCounts, Any]]:
        """Return this rank's micro-batches of step ``number`` of the epoch, fillers included; [] at the end.

        Raises:
            BatchError, StepError, PeerError: see `SampleLoader`; on every rank.
        """
        split, replica_id = self._split
        if self._reader is not None:
            split = self._reader.split_at(number)
        micro_batches_read: list[Any] = []
        counts: list[UnitCounts] = []
        checksum, error = 0, None
        try:
            self._trainee.expect_used()
            micro_batches_read = list(islice(batches, split.micro_batches[replica_id]))
            num_samples, checksum = (None, 0) if self._reader is None else self._reader.take_drawn(number)
            ranges = split.micro_batches_of(replica_id, split.samples if num_samples is None else num_samples)
            sizes = [stop - start for start, stop in ranges][: len(micro_batches_read)]
            for batch, size in zip(micro_batches_read, sizes, strict=True):
                _expect_samples(batch, size)
            counts = [UnitCounts.of(batch, size) for batch, size in zip(micro_batches_read, sizes, strict=True)]
        except Exception as raised:
            error = raised
        report = FetchReport(replica_id, len(micro_batches_read), samples=checksum)
        reports = exchange_reports(number, report, json.dumps(UnitCounts.total(counts)).encode(), error)
        reports.expect_same_samples()
        if not any(report.batches for report in reports.by_rank):
            self._short_step.end_epoch()
            return []
        self._short_step.expect_end_after(reports, split)
        idle = [rank for rank, report in enumerate(reports.by_rank) if not report.batches]
        counts_of_step = UnitCounts.total(map(json.loads, reports.payloads))
        if idle and not self._has_read:
            raise BatchError(
                f"the first step has {counts_of_step.sample_mean} samples, too few for ranks {idle} to get one: the "
                f"ranks take {split} per optimizer step. Give the loader more samples, or drop_last=True."
            )
        self._has_read = True
        if micro_batches_read:
            self._latest = micro_batches_read[-1]
        max_micro_batches = max(report.batches for report in reports.by_rank)
        num_fillers = split.micro_steps - len(micro_batches_read)
        counts += [UnitCounts(0)] * num_fillers
        micro_batches_read += [self._latest] * num_fillers
        micro_batches = []
        for index, (counts_of_batch, batch) in enumerate(zip(counts, micro_batches_read, strict=True)):
            described = MicroBatchCounts(
                index=index, counts=counts_of_batch, counts_of_step=counts_of_step, micro_batches=max_micro_batches
            )
            micro_batches.append((described, batch))
        return micro_batches


def _expect_samples(batch: Any, samples: int) -> None:
    """Refuse a micro-batch in which nothing has one row per sample. Raises `BatchError`."""
    rows = sorted(set(_rows(batch)))
    if samples not in rows:
        raise BatchError(
            f"this rank's micro-batch has {samples} samples, but nothing in it has as many rows: they are {rows}. "
            "Losses of ranks that take different batches are weighed by the samples in them. Let the collate "
            "function drop no sample and put a tensor with one row per sample into the batch; a loader that makes its "
            "batches itself must make full ones."
        )


def _rows(entry: Any) -> Iterator[int]:
    """Yield the number of rows of every tensor in a batch, and of every list of strings or numbers."""
    if isinstance(entry, Tensor):
        if entry.dim():
            yield entry.shape[0]
    elif isinstance(entry, Mapping):
        for part in entry.values():
            yield from _rows(part)
    elif isinstance(entry, list | tuple):
        if entry and all(isinstance(part, str | bytes | int | float) for part in entry):
            yield len(entry)
        for part in entry:
            yield from _rows(part)


def on_device(entry: Any, device: torch.device) -> Any:
    """Return a batch with its tensors moved to ``device``; objects of other classes stay the same."""
    if isinstance(entry, Tensor):
        return entry.to(device)
    if isinstance(entry, Mapping):
        return {name: on_device(part, device) for name, part in entry.items()}
    if isinstance(entry, tuple) and hasattr(entry, "_fields"):
        return type(entry)(*(on_device(part, device) for part in entry))
    if isinstance(entry, list | tuple):
        return type(entry)(on_device(part, device) for part in entry)
    return entry
