"""Reads the batches of the next fetch before the present ones are trained on, and places them in a thread meanwhile.

Reading stays in the caller's thread: it is the user's code, and may draw random numbers. Placing is a pure function of
a batch. What goes wrong in either is raised when the batch is due, where all ranks learn of it together.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import islice

from torch.utils.data import DataLoader

from ds_hetero.runtime.data.loading.whole_batches import WholeBatches
from ds_hetero.runtime.data.shards import PlacedBatch, WholeBatch, place
from ds_hetero.values.placement import Placer
from ds_hetero.values.schedule import Schedule

PlacerOfNow = Callable[[], Placer]


@dataclass(frozen=True)
class _Prepared:
    """The batches of one fetch, and who places them for which schedule; or why they could not be read."""

    batches: list[WholeBatch]
    placer: Placer
    schedule: Schedule
    placed: Future[list[PlacedBatch]] | None
    error: Exception | None = None


class PlanningAhead:
    """The placed batches of one epoch, those of at most one fetch ahead.

    Args:
        batches: the loader that they are read from.
        epoch: its batches.
        placer: gives what places a batch that is drawn now; every rank of a replica changes it between the same steps.

    Attributes:
        batches: as given.
    """

    def __init__(self, batches: WholeBatches, epoch: Iterator[WholeBatch], placer: PlacerOfNow) -> None:
        self.batches, self._epoch, self._placer = batches, epoch, placer
        self._prepared: _Prepared | None = None

    def take(self, count: int, schedule: Schedule) -> list[PlacedBatch]:
        """The next ``count`` batches, fewer at the epoch's end; placed anew if placer or schedule have changed.

        Raises:
            BatchError: a batch could not be read or placed; or whatever the wrapped loader raises.
        """
        placer, prepared = self._placer(), self._prepared
        self._prepared = None
        if prepared is None:
            return [place(placer, schedule, batch) for batch in islice(self._epoch, count)]
        self.batches.come_up()
        if prepared.error is not None:
            raise prepared.error
        if prepared.placed is not None and prepared.placer is placer and prepared.schedule == schedule:
            return prepared.placed.result()
        return [place(placer, schedule, batch) for batch in prepared.batches]

    def prepare(self, count: int, schedule: Schedule) -> None:
        """Read what the next `take` returns, and begin to place it; nothing for a loader that might not like it.

        A loader of torch reads ahead by itself where it has workers. Any other iterable may make its next batch of
        what the model has learned by then, so that it is not asked before its time.
        """
        if not isinstance(self.batches.dataloader, DataLoader) or self.batches.is_at_end:
            return
        placer = self._placer()
        with self.batches.running_ahead():
            try:
                taken = list(islice(self._epoch, count))
            except Exception as error:
                self._prepared = _Prepared([], placer, schedule, None, error)
                return
        placed = _thread.submit(lambda: [place(placer, schedule, batch) for batch in taken]) if taken else None
        self._prepared = _Prepared(taken, placer, schedule, placed)


_thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="ds_hetero.planning")
