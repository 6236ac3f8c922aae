"""Read the batches of the next fetch before the present batches are trained on, and place them in a thread meanwhile.

Reading stays in the caller's thread, because it is the user's code and may draw random numbers. Placing is a pure
function of a batch. An exception in either is raised when the batch is due, where all ranks learn of it together.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import islice

from torch.utils.data import DataLoader

from ds_hetero.runtime.data.shards import PlacedBatch, WholeBatch, place
from ds_hetero.runtime.data.whole_batches import WholeBatches
from ds_hetero.values.placement import Placer
from ds_hetero.values.schedule import Schedule

CurrentPlacer = Callable[[], Placer]


@dataclass(frozen=True)
class _Prepared:
    """The batches of one fetch that were read ahead, or the error that reading them raised."""

    batches: list[WholeBatch]
    placer: Placer  # that places them in the thread
    schedule: Schedule  # for which they are placed
    placed: Future[list[PlacedBatch]] | None  # None without batches
    error: Exception | None = None


class PlanningAhead:
    """Yields the placed batches of one epoch, and prepares the batches of at most one fetch ahead.

    Args:
        batches: the wrapped loader.
        epoch: its batches of this epoch.
        placer: returns the present placer; every rank of a replica changes it between the same two steps.
    """

    def __init__(self, batches: WholeBatches, epoch: Iterator[WholeBatch], placer: CurrentPlacer) -> None:
        self.batches, self._epoch, self._placer = batches, epoch, placer
        self._prepared: _Prepared | None = None

    def take(self, count: int, schedule: Schedule) -> list[PlacedBatch]:
        """Return the next ``count`` batches, fewer at the epoch's end.

        Batches that were prepared for another schedule or placer are placed again. An error of reading is raised here.
        """
        placer, prepared = self._placer(), self._prepared
        self._prepared = None
        if prepared is None:
            return [place(placer, schedule, batch) for batch in islice(self._epoch, count)]
        self.batches.draw_batches_ahead()
        if prepared.error is not None:
            raise prepared.error
        if prepared.placed is not None and prepared.placer is placer and prepared.schedule == schedule:
            return prepared.placed.result()
        return [place(placer, schedule, batch) for batch in prepared.batches]

    def prepare(self, count: int, schedule: Schedule) -> None:
        """Read the batches that the next `take` returns, and begin to place them.

        Does so for a ``DataLoader`` only, which reads ahead by itself if it has workers. Any other iterable may make
        its next batch with the model, which the present step still changes, so it must not be read early.
        """
        if not isinstance(self.batches.dataloader, DataLoader) or self.batches.is_at_end:
            return
        placer = self._placer()
        with self.batches.reading_ahead():
            try:
                read_batches = list(islice(self._epoch, count))
            except Exception as error:
                self._prepared = _Prepared([], placer, schedule, None, error)
                return
        placed = None
        if read_batches:
            placed = _thread.submit(lambda: [place(placer, schedule, batch) for batch in read_batches])
        self._prepared = _Prepared(read_batches, placer, schedule, placed)


_thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="ds_hetero.planning")
