"""Micro-batches for a module that every rank runs whole, where the ranks take different ones.

    for images, classes in SampleLoader(dataloader, trainee, device):    # this rank's, of as many samples as it takes

An optimizer step takes the next `BatchSplit.samples` samples of the order in which one process reads them, and is
`BatchSplit.micro_steps` micro-batches on every rank. A rank that takes fewer is given its last one again, whose loss
counts nothing. The trainee is told how many samples and labels every micro-batch has, and the step, by which its loss
is weighed.
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
from ds_hetero.runtime.data.batch_mode import (
    TORCH_LOADERS,
    LoaderAround,
    LoaderNames,
    describe_loader,
    expect_unsharded,
)
from ds_hetero.runtime.data.epochs import STATE_VERSION, Epochs, expect_compatible
from ds_hetero.runtime.data.fetch import FetchReport, Progress, ShortStep, exchange_reports
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
class MicroBatchWeights:
    """Counts of a micro-batch and of its step, from which its loss is weighted."""

    index: int  # among those of its optimizer step
    counts: UnitCounts  # of the micro-batch; zeros where it only fills the step up
    counts_of_step: UnitCounts  # of all micro-batches of all ranks
    micro_batches: int  # of the step, without those that only fill it up on every rank


class Trainee(Protocol):
    """The module that a loader reads for."""

    @property
    def replica(self) -> Replica:
        """This rank's replica, which it is alone in."""

    @property
    def training(self) -> bool:
        """Whether batches are trained on, not evaluated."""

    def note_reader(self, reader: ReplicaSampler | ReplicaStream | None) -> None:
        """Let a reader of samples follow the batches of the ranks; None: there is one that cannot."""

    def give(self, batch: MicroBatchWeights | None) -> None:
        """Note that the next loss will be of this micro-batch; None: of an unknown one."""

    def expect_used(self) -> None:
        """Raise `StepError` if the micro-batch that was given last had no backward."""


class SampleLoader(LoaderAround):
    """Wraps a loader of all samples; yields this rank's micro-batches, of the structure that the loader gives them.

    An epoch whose first batch is drawn in ``eval()`` yields the wrapped loader's batches as they are.

    Args:
        dataloader: a ``DataLoader`` of all samples, the same on every rank, whose batch size does not matter; any other
            iterable is taken to hold this rank's micro-batches, all full.
        trainee: the module, with the batches of all ranks.
        is_of_rank: see `replica_samples`.

    Caller: every rank of the world.
    Collectives: once, a short description of every rank's loader; per optimizer step, one all_gather of 128 integers.

    Raises:
        BatchError: on every rank. When made: loaders are sharded. In iteration: the ranks draw different samples, or
            run out at different steps; a batch does not show its samples.
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
        self._has_read, self._latest = False, None  # a micro-batch, which fills up the steps that have too few
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
        """Begin the next epoch after these steps, whatever their samples were."""
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
        """Begin the next epoch where ``state`` was taken; the one after that is whole.

        Raises:
            BatchError: the state is of another version, or of another global batch. The next epoch raises it on every
                rank where the loader gives other samples than before.
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
        """Return a checksum of what the epoch has given so far; None where that cannot be compared."""
        return self._epochs.checksum if self._reader is None else self._reader.checksum

    def __iter__(self) -> Iterator[Any]:
        if not self._trainee.training:
            whole = self.dataloader if self._reader is None else all_samples(self.dataloader)
            yield from (on_device(batch, self._device) for batch in whole)
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
                if index < progress.used and number == progress.fetches:
                    continue
                is_last = index + 1 == len(micro_batches)
                self._progress = Progress(number + 1) if is_last else Progress(number, index + 1)
                self._trainee.give(weight)
                yield from own_calls.giving(on_device(batch, self._device))
        self._progress = Progress()

    @property
    def _split(self) -> tuple[BatchSplit, int]:
        """The batches of all ranks, and this rank's index among them."""
        replica = self._trainee.replica
        assert replica.batch_split is not None
        return replica.batch_split, replica.replica_id

    def _open(self, first_step: int) -> Iterator[Any]:
        """Return the wrapped loader's batches; it is opened, and may fail, when the first is taken."""
        if self._reader is None:
            yield from self._epochs.read()
            return
        self._reader.first_step = first_step
        for batch in self._epochs.read():
            self._reader.first_step = 0
            yield batch
        self._reader.first_step = 0

    def _fetch(self, batches: Iterator[Any], number: int) -> list[tuple[MicroBatchWeights, Any]]:
        """Return this rank's micro-batches of the step of that number in the epoch; none at its end."""
        split, replica_id = self._split
        if self._reader is not None:
            split = self._reader.split_at(number)
        taken: list[Any] = []
        counts: list[UnitCounts] = []
        checksum, error = 0, None
        try:
            self._trainee.expect_used()
            taken = list(islice(batches, split.micro_batches[replica_id]))
            drawn, checksum = (None, 0) if self._reader is None else self._reader.take_drawn(number)
            ranges = split.micro_batches_of(replica_id, split.samples if drawn is None else drawn)
            sizes = [stop - start for start, stop in ranges][: len(taken)]
            for batch, size in zip(taken, sizes, strict=True):
                _expect_samples(batch, size)
            counts = [UnitCounts.of(batch, size) for batch, size in zip(taken, sizes, strict=True)]
        except Exception as raised:
            error = raised
        report = FetchReport(replica_id, len(taken), samples=checksum)
        reports = exchange_reports(number, report, json.dumps(UnitCounts.total(counts)).encode(), error)
        reports.expect_same_samples()
        if not any(of_rank.batches for of_rank in reports.by_rank):
            self._short_step.end_epoch()
            return []
        self._short_step.expect_end_after(reports, split)
        idle = [rank for rank, of_rank in enumerate(reports.by_rank) if not of_rank.batches]
        counts_of_step = UnitCounts.total(map(json.loads, reports.payloads))
        if idle and not self._has_read:
            raise BatchError(
                f"the first step has {counts_of_step.sample_mean} samples, too few for ranks {idle} to get one: the "
                f"ranks take {split} per optimizer step. Give the loader more samples, or drop_last=True."
            )
        self._has_read, self._latest = True, taken[-1] if taken else self._latest
        micro_batches = max(of_rank.batches for of_rank in reports.by_rank)
        num_fillers = split.micro_steps - len(taken)
        counts, taken = [*counts, *[UnitCounts(0)] * num_fillers], [*taken, *[self._latest] * num_fillers]
        return [
            (MicroBatchWeights(index=i, counts=own, counts_of_step=counts_of_step, micro_batches=micro_batches), batch)
            for i, (own, batch) in enumerate(zip(counts, taken, strict=True))
        ]


def _expect_samples(batch: Any, samples: int) -> None:
    """Refuse a micro-batch in which nothing has one row per sample: collate dropped some. Raises `BatchError`."""
    rows = sorted(set(_rows(batch)))
    if samples not in rows:
        raise BatchError(
            f"this rank's micro-batch has {samples} samples, but nothing in it has as many rows: they are {rows}. "
            "ranks that take different batches are weighed by what is in theirs. Have the collate function put "
            "a tensor of one row per sample into the batch; a loader that makes its batches itself gives full ones."
        )


def _rows(entry: Any) -> Iterator[int]:
    """Rows of every tensor in a batch, and of every list of strings or numbers."""
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
    """Return the same batch with its tensors on ``device``; objects of the user's own are left as they are."""
    if isinstance(entry, Tensor):
        return entry.to(device)
    if isinstance(entry, Mapping):
        return {name: on_device(part, device) for name, part in entry.items()}
    if isinstance(entry, tuple) and hasattr(entry, "_fields"):
        return type(entry)(*(on_device(part, device) for part in entry))
    if isinstance(entry, list | tuple):
        return type(entry)(on_device(part, device) for part in entry)
    return entry
