"""Read the full batches of a wrapped loader, before they are cut, and resume the loader at a saved position."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from typing import Any

from ds_hetero.runtime.data.batch_documents import with_documents
from ds_hetero.runtime.data.epochs import Epochs
from ds_hetero.runtime.data.loader_names import LoaderNames
from ds_hetero.runtime.data.sampling import ReplicaSampler, ReplicaStream, all_samples, reader_of, replica_samples
from ds_hetero.runtime.data.shards import Batch, Entries, WholeBatch, read_batch
from ds_hetero.values.plans import BatchSplit


@dataclass(frozen=True, kw_only=True)
class BatchReading:
    """Options by which `WholeBatches` reads batches.

    Attributes:
        keep_labels: keep ``labels`` beside ``shift_labels``, see `ds_hetero.runtime.data.shards.read_batch`.
        keep_inputs: leave everything but labels whole, see `ds_hetero.runtime.data.shards.read_batch`.
        by_documents: find the documents of batches, see `ds_hetero.runtime.data.batch_documents`.
        joins_rows: join the rows of such batches to one row where possible.
        complete: adds entries to a batch that the model would compute from the full batch.
        keeps: returns whether a batch is to be stored, as the loader gave it, for `WholeBatches.take_kept_batches`: a
            comparison with one process needs the whole batch.
    """

    keep_labels: bool = False
    keep_inputs: bool = False
    by_documents: bool = False
    joins_rows: bool = True
    complete: Callable[[Any], Any] = lambda batch: batch
    keeps: Callable[[Any], bool] = lambda batch: False


class WholeBatches:
    """Reads the batches of one loader; may read batches before they are drawn.

    A batch is *drawn* when training takes it. It can be read before that: the first batch by `peek`, the batches of the
    next fetch inside `reading_ahead`. The values of a checkpoint (`state`, `checksum`) always belong to drawn batches.
    """

    def __init__(self, dataloader: Any, names: LoaderNames, reading: BatchReading) -> None:
        self.names, self._epochs = names, Epochs(dataloader, names)
        self.reader: ReplicaSampler | ReplicaStream | None = reader_of(dataloader)
        self.epoch: int | None = None  # the argument of the latest `set_epoch`
        self._reading = reading
        self._peeked_epoch: Iterator[WholeBatch] | None = None  # the epoch that `peek` began, with its first batch
        self._before_peek: Entries | None = None  # random states with which that epoch began
        self._kept_batches: list[Any] = []
        self.keeps_on_a_rank = False  # a rank keeps a batch of the present fetch; the same on every rank
        # State that was loaded, until the loader has given a batch: accelerate's loaders cannot save it before.
        self._loaded_state: Any = None
        self._is_ahead = False  # batches were read that have not been drawn yet, see `reading_ahead`
        self._drawn_state: Any = None  # `state` when `reading_ahead` was entered
        self._drawn_checksum: int | None = None  # `checksum` then
        self._raw_ahead: list[Any] = []  # the batches that were read since then, as the loader gave them
        self._hidden_end_marks: list[str] = []  # attributes that mark the epoch's end, set to False until it is drawn

    @property
    def dataloader(self) -> Any:
        """The wrapped loader."""
        return self._epochs.dataloader

    @property
    def all_samples(self) -> Any:
        """The loader of all samples, even if the replicas take different batches."""
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
        self._end_reading_ahead()  # the epoch before may have been left while batches were read ahead
        peeked_epoch, self._peeked_epoch = self._peeked_epoch, None
        if peeked_epoch is not None:
            yield from peeked_epoch
            return
        if self.reader is not None:
            self.reader.first_step = first_step
        for batch in self._epochs.read():
            self._loaded_state = None
            if self.reader is not None:
                self.reader.first_step = 0
            read = read_batch(self._reading.complete(batch), self._reading.keep_labels, self._reading.keep_inputs)
            self._note_raw_batch(batch)
            yield with_documents(read, joins_rows=self._reading.joins_rows) if self._reading.by_documents else read
        self._loaded_state = None

    def peek(self) -> WholeBatch | None:
        """Return the first batch of the next epoch, and leave it in that epoch; None if the epoch has no batch."""
        self._before_peek = self._epochs.states_now()
        batches = self.read_epoch()
        first = next(batches, None)
        self._peeked_epoch = batches if first is None else chain([first], batches)
        return first

    @property
    def keeps_some(self) -> bool:
        """Whether this rank has kept a drawn batch, see `BatchReading.keeps`."""
        return bool(self._kept_batches)

    def take_kept_batches(self) -> list[Any]:
        """Return the batches that were kept, and forget them."""
        kept_batches, self._kept_batches, self.keeps_on_a_rank = self._kept_batches, [], False
        return kept_batches

    def _note_raw_batch(self, batch: Any) -> None:
        """Store a batch as the loader gave it, if `BatchReading.keeps` returns True for it.

        A batch that is read ahead is set aside; the decision is made when it is drawn.
        """
        if self._is_ahead:
            self._raw_ahead.append(batch)
        elif self._reading.keeps(batch):
            self._kept_batches.append(batch)

    @contextmanager
    def reading_ahead(self) -> Iterator[None]:
        """Let batches that are read inside count as not drawn until `draw_batches_ahead`.

        Until then `state`, `checksum` and the loader's marks of the epoch's end stay what they are.
        """
        self._drawn_state, self._drawn_checksum = self.state(), self.checksum
        self._is_ahead, self._raw_ahead = True, []
        yield
        self._hidden_end_marks = self._end_marks()
        for name in self._hidden_end_marks:
            setattr(self.dataloader, name, False)

    def draw_batches_ahead(self) -> None:
        """Count the batches that were read ahead as drawn."""
        for name in self._hidden_end_marks:
            setattr(self.dataloader, name, True)
        raw = self._raw_ahead
        self._end_reading_ahead()
        for batch in raw:
            self._note_raw_batch(batch)

    @property
    def is_at_end(self) -> bool:
        """Whether the loader marks the batch that was read last as the epoch's last one."""
        return bool(self._end_marks())

    def _end_marks(self) -> list[str]:
        """Return the attributes of the loader that mark the epoch's end now."""
        return [name for name in self.names.at_end if getattr(self.dataloader, name, False)]

    def _end_reading_ahead(self) -> None:
        """Note that all batches that were read have been drawn."""
        self._is_ahead, self._drawn_state, self._raw_ahead = False, None, []
        self._hidden_end_marks = []

    def set_epoch(self, epoch: int) -> None:
        """Tell the loader, or else its sampler and dataset, which epoch comes next."""
        if self._peeked_epoch is not None and self._before_peek is not None:
            self._epochs.put_back(self._before_peek)  # the epoch that `peek` began is begun again
        self.epoch, self._peeked_epoch, self._before_peek = epoch, None, None
        self.names.set_epoch(self.dataloader, epoch)

    def state(self) -> Any:
        """Return the loader's own state after the drawn batches; None if loaders of its class have none."""
        if self._is_ahead:
            return self._drawn_state
        if self._loaded_state is not None or not self.names.has_state(self.dataloader):
            return self._loaded_state
        if self._epochs.is_under_way:
            return self._own_state()
        # Some loaders begin the next epoch to save their state, and draw random numbers for it. This job and the
        # resumed one have to begin that epoch alike: undo the draws, and begin it from the state in both.
        with self._epochs.drawing_nothing():
            self._loaded_state = self._own_state()
            self.dataloader.load_state_dict(self._loaded_state["own"])
        return self._loaded_state

    def _own_state(self) -> Entries:
        return {"own": self.dataloader.state_dict(), "generators": self._epochs.generator_states()}

    @property
    def checksum(self) -> int | None:
        """Return a checksum of the epoch's drawn batches so far; None if it cannot be compared."""
        if self.reader is not None:
            return self.reader.checksum
        return self._drawn_checksum if self._is_ahead else self._epochs.checksum

    def start_of_epoch(self, *, is_begun: bool, checksum: int | None) -> Entries:
        """Return the random states with which this epoch began, or the next one will; see `Epochs.state`."""
        return self._epochs.state(amid_epoch=is_begun or self._peeked_epoch is not None, checksum=checksum)

    def resume(self, num_batches: int, num_again: int, state: Any, start: Batch) -> None:
        """Begin the next epoch after ``num_batches`` batches, by the loader's own ``state`` if there is one.

        Args:
            num_again: number of batches behind these that the earlier job had read as well, but not used.
            start: from `start_of_epoch`.
        """
        self._peeked_epoch = self._loaded_state = None
        self._end_reading_ahead()
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
        """Return a copy whose next epoch lacks the first ``num_batches``, which ``skip(dataloader, n)`` leaves out."""
        batches = copy.copy(self)
        if self.reader is None:
            batches._epochs = Epochs(skip(self.dataloader, num_batches), self.names, compares=False)
        batches._peeked_epoch = batches._loaded_state = None
        batches._kept_batches = []
        batches._end_reading_ahead()
        return batches
