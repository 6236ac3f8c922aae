"""The wrapped loader: its batches, read and still whole, its first batch, and where it is resumed.

The documents of a whole batch, for placements that go by documents; padded rows become one row of real tokens.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from ds_hetero.runtime.data.batch_mode import LoaderNames
from ds_hetero.runtime.data.epochs import Epochs
from ds_hetero.runtime.data.sampling import ReplicaSampler, ReplicaStream, all_samples, reader_of, replica_samples
from ds_hetero.runtime.data.shards import IGNORE_INDEX, Batch, Entries, WholeBatch, read_batch
from ds_hetero.runtime.documents import (
    BOUNDARIES,
    MASK,
    POSITIONS,
    Documents,
    documents_from_cu_seqlens,
    documents_from_mask,
    documents_from_positions,
    position_runs,
    rows_of,
)
from ds_hetero.values.plans import BatchSplit


@dataclass(frozen=True, kw_only=True)
class BatchReading:
    """How batches are read before they are cut."""

    keep_labels: bool = False  # keep ``labels`` beside ``shift_labels``, see `ds_hetero.runtime.data.shards.read_batch`
    keep_inputs: bool = False  # cut labels only, see there
    by_documents: bool = False  # have batches know their documents, see `ds_hetero.runtime.data.whole_batches`
    joins_rows: bool = True  # make such batches one row where they can be
    complete: Callable[[Any], Any] = lambda batch: batch  # adds to a batch what its model would make of the whole of it
    keeps: Callable[[Any], bool] = lambda batch: False  # whether a drawn batch is kept for `WholeBatches.take_kept`


class WholeBatches:
    """The batches of one loader, before they are cut."""

    def __init__(self, dataloader: Any, names: LoaderNames, reading: BatchReading) -> None:
        self.names, self._epochs = names, Epochs(dataloader, names)
        self.reader: ReplicaSampler | ReplicaStream | None = reader_of(dataloader)
        self.epoch: int | None = None  # as `set_epoch` was called
        self._reading = reading
        self._begun: Iterator[WholeBatch] | None = None  # an epoch that was begun to look at its first batch
        self._before_peek: Entries | None = None  # states with which that epoch began
        self._kept: list[Any] = []
        self.keeps_on_a_rank = False  # for the present fetch; the same on every rank
        self._loaded_state: Any = None  # until the loader has given a batch: accelerate's do not know it before
        self._is_ahead = False  # more is read than has been drawn, see `running_ahead`
        self._state_behind: Any = None  # of the loader, when that began
        self._checksum_behind: int | None = None  # what `checksum` was then
        self._raw_ahead: list[Any] = []  # the batches that were read since then
        self._ends_ahead: list[str] = []  # the loader's marks of the epoch's end that are not due yet

    @property
    def dataloader(self) -> Any:
        """The wrapped loader."""
        return self._epochs.dataloader

    @property
    def all_samples(self) -> Any:
        """The loader; where the replicas take different batches, with the samples of all of them."""
        return self.dataloader if self.reader is None else all_samples(self.dataloader)

    def divide(self, split: BatchSplit, replica_id: int) -> None:
        """Read only the samples of one replica from now on."""
        self._epochs = Epochs(replica_samples(self.dataloader, split, replica_id), self.names)
        self.reader = reader_of(self.dataloader)

    def read_epoch(self, first_step: int = 0) -> Iterator[WholeBatch]:
        """Yield the batches of the next epoch; the loader is opened, and may fail, when the first is taken.

        Args:
            first_step: optimizer steps that are left out, where this loader's samples are divided among replicas.
        """
        self._draw_level()  # an epoch that was left may have been ahead
        begun, self._begun = self._begun, None
        if begun is not None:
            yield from begun
            return
        if self.reader is not None:
            self.reader.first_step = first_step
        for batch in self._epochs.read():
            self._loaded_state = None
            if self.reader is not None:
                self.reader.first_step = 0
            read = read_batch(self._reading.complete(batch), self._reading.keep_labels, self._reading.keep_inputs)
            self._keep(batch)
            yield with_documents(read, joins_rows=self._reading.joins_rows) if self._reading.by_documents else read
        self._loaded_state = None

    def peek(self) -> WholeBatch | None:
        """Return the first batch of the next epoch, which will still have it; None if there is none."""
        self._before_peek = self._epochs.states_now()
        batches = self.read_epoch()
        first = next(batches, None)
        self._begun = batches if first is None else chain([first], batches)
        return first

    @property
    def keeps_some(self) -> bool:
        """Whether this rank keeps a batch of those that were drawn."""
        return bool(self._kept)

    def take_kept(self) -> list[Any]:
        """Return the batches that were kept, once."""
        kept, self._kept, self.keeps_on_a_rank = self._kept, [], False
        return kept

    def _keep(self, batch: Any) -> None:
        if self._is_ahead:
            self._raw_ahead.append(batch)
        elif self._reading.keeps(batch):
            self._kept.append(batch)

    @contextmanager
    def running_ahead(self) -> Iterator[None]:
        """Read ahead inside; `come_up` draws the batches: until then `state` and the loader's marks stay the same."""
        self._state_behind, self._checksum_behind = self.state(), self.checksum
        self._is_ahead, self._raw_ahead = True, []
        yield
        self._ends_ahead = self._end_marks()
        for name in self._ends_ahead:
            setattr(self.dataloader, name, False)

    def come_up(self) -> None:
        """Draw the batch that was read ahead."""
        for name in self._ends_ahead:
            setattr(self.dataloader, name, True)
        raw = self._raw_ahead
        self._draw_level()
        for batch in raw:
            self._keep(batch)

    @property
    def is_at_end(self) -> bool:
        """Whether the loader says that the batch that was read last is the epoch's last."""
        return bool(self._end_marks())

    def _end_marks(self) -> list[str]:
        return [name for name in self.names.at_end if getattr(self.dataloader, name, False)]

    def _draw_level(self) -> None:
        """Nothing is read that has not been drawn."""
        self._is_ahead, self._state_behind, self._raw_ahead = False, None, []
        self._ends_ahead = []

    def set_epoch(self, epoch: int) -> None:
        """Tell the loader, or else its sampler and dataset, which epoch comes next."""
        if self._begun is not None and self._before_peek is not None:
            self._epochs.put_back(self._before_peek)  # the epoch that was looked at is begun again
        self.epoch, self._begun, self._before_peek = epoch, None, None
        self.names.set_epoch(self.dataloader, epoch)

    def state(self) -> Any:
        """Return the loader's own state; None if it has none."""
        if self._is_ahead:
            return self._state_behind
        if self._loaded_state is not None or not self.names.has_state(self.dataloader):
            return self._loaded_state
        if self._epochs.is_under_way:
            return self._own_state()
        # It may begin the next epoch for the sake of its state, and draw; both jobs are to begin it from the state.
        with self._epochs.drawing_nothing():
            self._loaded_state = self._own_state()
            self.dataloader.load_state_dict(self._loaded_state["own"])
        return self._loaded_state

    def _own_state(self) -> Entries:
        return {"own": self.dataloader.state_dict(), "generators": self._epochs.generator_states()}

    @property
    def checksum(self) -> int | None:
        """Return a checksum of what the epoch has given so far; None where that cannot be compared."""
        if self.reader is not None:
            return self.reader.checksum
        return self._checksum_behind if self._is_ahead else self._epochs.checksum

    def start_of_epoch(self, *, is_begun: bool, checksum: int | None) -> Entries:
        """Random states with which the epoch began, or the next will, if it is not begun; see `Epochs.state`."""
        return self._epochs.state(amid_epoch=is_begun or self._begun is not None, checksum=checksum)

    def resume(self, num_batches: int, num_again: int, state: Any, start: Batch) -> None:
        """Begin the next epoch after ``num_batches`` batches, by the loader's own ``state`` if there is one.

        Args:
            num_again: that were read after those, and are to be used.
            start: from `start_of_epoch`.
        """
        self._begun = self._loaded_state = None
        self._draw_level()
        if self.reader is not None:
            self.reader.checksum = self.reader.expected = start["checksum"]
            num_batches = 0
        if state is not None and self.names.has_state(self.dataloader):
            self.dataloader.load_state_dict(state["own"])
            self._loaded_state = state
            self._epochs.resume(start, 0, num_again, state["generators"])
            return
        self._epochs.resume(start, num_batches, num_again)

    def skipping(self, num_batches: int, skip: Callable[[Any, int], Any]) -> WholeBatches:
        """Return the same batches without the first ``num_batches`` of the next epoch, left out by ``skip``."""
        batches = copy.copy(self)
        if self.reader is None:
            batches._epochs = Epochs(skip(self.dataloader, num_batches), self.names, compares=False)
        batches._begun = batches._loaded_state = None
        batches._kept = []
        batches._draw_level()
        return batches


def with_documents(batch: WholeBatch, *, joins_rows: bool = True) -> WholeBatch:
    """Return the batch with its documents, in one row where possible. Raises `BatchError`: it does not show them.

    Several rows, or one with padding, become one row of the real tokens, so that padding is not computed, if every
    entry has one value per token and no label counts at the padding. A label at the last token of a row stays there.

    Args:
        joins_rows: False leaves rows and padding as they are.
    """
    source, documents = _documents(batch)
    if joins_rows and (flat := _flattened(batch, documents)):
        batch, documents = flat
        source = POSITIONS
    runs = position_runs(batch.sequences["position_ids"])
    return replace(batch, rows=rows_of(documents), documents_from=source, position_runs=runs)


def _documents(batch: WholeBatch) -> tuple[str, Sequence[Documents]]:
    """Return the entry that the batch's documents are read from, and the documents of every row."""
    boundaries, mask = batch.constants.get(BOUNDARIES), batch.sequences.get(MASK)
    if boundaries is not None:
        return BOUNDARIES, documents_from_cu_seqlens(boundaries.tolist(), batch.length, batch.batch_size)
    if mask is not None:
        return MASK, documents_from_mask(mask)
    return POSITIONS, documents_from_positions(batch.sequences[POSITIONS])


def _flattened(batch: WholeBatch, documents: Sequence[Documents]) -> tuple[WholeBatch, Sequence[Documents]] | None:
    """Return the real tokens of all rows in one row, with their documents; None if the batch has to stay as it is."""
    mask = batch.sequences.get(MASK)
    real = torch.ones(batch.batch_size, batch.length, dtype=torch.bool) if mask is None else mask.ne(0).cpu()
    is_flat = batch.batch_size == 1 and bool(real.all())
    if is_flat or batch.constants or any(entry is not None for entry in batch.objects.values()) or not real.any():
        return None
    labels = [batch.sequences[name] for name in ("labels", "shift_labels") if name in batch.sequences]
    if any(bool((entry.cpu().ne(IGNORE_INDEX) & ~real).any()) for entry in labels):
        return None
    sequences = {name: _real_tokens(entry, real) for name, entry in batch.sequences.items() if name != MASK}
    places = (real.flatten().cumsum(0) - 1).view_as(real)
    flat = tuple(
        (start, start + stop - first)
        for row, of_row in enumerate(documents)
        for first, stop in of_row
        for start in (int(places[row, first]),)
    )
    length = int(real.sum())
    return replace(batch, batch_size=1, length=length, sequences=sequences), [flat]


def _real_tokens(entry: Tensor, real: Tensor) -> Tensor:
    """[B, L, ...] -> [1, T, ...], the tokens where ``real`` [B, L] holds."""
    return entry[real.to(entry.device)].unsqueeze(0)
