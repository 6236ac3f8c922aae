"""The wrapped loader: its batches, read and still whole, its first batch, and where it is resumed."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import chain, islice
from typing import Any

from ds_hetero.plans import BatchSplit
from ds_hetero.runtime.data.batch_documents import with_documents
from ds_hetero.runtime.data.loader_names import LoaderNames
from ds_hetero.runtime.data.sampling import ReplicaSampler, ReplicaStream, all_samples, reader_of, replica_samples
from ds_hetero.runtime.data.shards import WholeBatch, read_batch

__all__ = ["WholeBatches"]


class WholeBatches:
    """The batches of one loader, before they are cut.

    Args:
        dataloader: yields mappings.
        keep_labels: see `ds_hetero.runtime.data.shards.read_batch`.
        names: by which loaders show their parts.
        by_documents: have batches know their documents, see `ds_hetero.runtime.data.batch_documents`.
        keep_inputs: see `ds_hetero.runtime.data.shards.read_batch`.
        complete: adds to a batch what its model would make of the whole of it.
    """

    def __init__(
        self,
        dataloader: Any,
        keep_labels: bool,
        names: LoaderNames,
        by_documents: bool = False,
        keep_inputs: bool = False,
        complete: Callable[[Any], Any] = lambda batch: batch,
    ) -> None:
        self.dataloader, self.names = dataloader, names
        self.reader: ReplicaSampler | ReplicaStream | None = reader_of(dataloader)
        self.epoch: int | None = None  # as `set_epoch` was called
        self._keep_labels, self._keep_inputs, self._by_documents = keep_labels, keep_inputs, by_documents
        self._complete = complete
        self._begun: Iterator[WholeBatch] | None = None  # an epoch that was begun to look at its first batch
        self._num_dropped = 0  # batches that the next epoch reads and drops
        self._keeps_next, self._kept = True, None  # the first batch is kept too, see `keep_next`
        self._loaded_state: Any = None  # until the loader has given a batch: accelerate's do not know it before
        self._is_ahead = False  # more is read than has been drawn, see `running_ahead`
        self._state_behind: Any = None  # of the loader, when that began
        self._raw_ahead: Any = None  # the first batch that was read since then
        self._ends_ahead: list[str] = []  # the loader's marks of the epoch's end that are not due yet

    @property
    def all_samples(self) -> Any:
        """The loader; where the replicas take different batches, with the samples of all of them."""
        return self.dataloader if self.reader is None else all_samples(self.dataloader)

    def divide(self, split: BatchSplit, replica_id: int) -> None:
        """Read only the samples of one replica from now on."""
        self.dataloader = replica_samples(self.dataloader, split, replica_id)
        self.reader = reader_of(self.dataloader)

    def read_epoch(self, first_step: int = 0) -> Iterator[WholeBatch]:
        """The batches of the next epoch; the loader is opened, and may fail, when the first is taken.

        Args:
            first_step: optimizer steps that are left out, where this loader's samples are divided among replicas.
        """
        self._draw_level()  # an epoch that was left may have been ahead
        begun, self._begun = self._begun, None
        num_dropped, self._num_dropped = self._num_dropped, 0
        if begun is not None:
            yield from begun
            return
        if self.reader is not None:
            self.reader.first_step = first_step
        for batch in islice(self.dataloader, num_dropped, None):
            self._loaded_state = None
            if self.reader is not None:
                self.reader.first_step = 0
            self._keep(batch)
            read = read_batch(self._complete(batch), self._keep_labels, self._keep_inputs)
            yield with_documents(read) if self._by_documents else read
        self._loaded_state = None

    def peek(self) -> WholeBatch | None:
        """The first batch of the next epoch, which will still have it; None if there is none."""
        batches = self.read_epoch()
        first = next(batches, None)
        self._begun = batches if first is None else chain([first], batches)
        return first

    def keep_next(self) -> None:
        """Keep the next batch that is read as the loader gives it, until `take_kept`."""
        self._keeps_next = True

    def take_kept(self) -> Any:
        """Return the batch that was kept, once; None if there is none."""
        kept, self._kept = self._kept, None
        return kept

    def _keep(self, batch: Any) -> None:
        if self._is_ahead:
            self._raw_ahead = batch if self._raw_ahead is None else self._raw_ahead
        elif self._keeps_next:
            self._kept, self._keeps_next = batch, False

    @contextmanager
    def running_ahead(self) -> Iterator[None]:
        """What is read inside is drawn with `come_up`: until then `state` and the loader's marks stay as they are."""
        self._state_behind = self.state()
        self._is_ahead, self._raw_ahead = True, None
        yield
        self._ends_ahead = self._end_marks()
        for name in self._ends_ahead:
            setattr(self.dataloader, name, False)

    def come_up(self) -> None:
        """What was read ahead is drawn now."""
        for name in self._ends_ahead:
            setattr(self.dataloader, name, True)
        raw = self._raw_ahead
        self._draw_level()
        if raw is not None:
            self._keep(raw)

    @property
    def is_at_end(self) -> bool:
        """Whether the loader says that the batch that was read last is the epoch's last."""
        return bool(self._end_marks())

    def _end_marks(self) -> list[str]:
        return [name for name in self.names.at_end if getattr(self.dataloader, name, False)]

    def _draw_level(self) -> None:
        """Nothing is read that has not been drawn."""
        self._is_ahead, self._state_behind, self._raw_ahead = False, None, None
        self._ends_ahead = []

    def set_epoch(self, epoch: int) -> None:
        """Tell the loader, or else its sampler and dataset, which epoch comes next."""
        self.epoch, self._begun = epoch, None
        self.names.set_epoch(self.dataloader, epoch)

    def state(self) -> Any:
        """The loader's own state; None if it has none."""
        if self._is_ahead:
            return self._state_behind
        if self._loaded_state is not None or not self.names.has_state(self.dataloader):
            return self._loaded_state
        return self.dataloader.state_dict()

    def resume(self, num_batches: int, state: Any) -> None:
        """Begin the next epoch after ``num_batches`` batches, by the loader's own ``state`` if there is one."""
        self._begun = self._loaded_state = None
        self._draw_level()
        self._num_dropped = num_batches if self.reader is None else 0
        if state is not None and self.names.has_state(self.dataloader):
            self.dataloader.load_state_dict(state)
            self._loaded_state = state
            self._num_dropped = 0

    def skipping(self, num_batches: int, skip: Callable[[Any, int], Any]) -> WholeBatches:
        """The same batches without the first ``num_batches`` of the next epoch, left out by ``skip``."""
        batches = copy.copy(self)
        if self.reader is None:
            batches.dataloader = skip(self.dataloader, num_batches)
        batches._begun = batches._loaded_state = None
        batches._draw_level()
        return batches
