"""Let the samplers of a model's loaders read other batch sizes when re-planning changes the ranks' batches."""

from __future__ import annotations

import weakref

from ds_hetero.errors import BatchError
from ds_hetero.runtime.collectives import on_all_ranks
from ds_hetero.runtime.data.sampling import ReplicaSampler, ReplicaStream
from ds_hetero.values.plans import BatchSplit
from ds_hetero.values.section import SECTION

SampleReader = ReplicaSampler | ReplicaStream


class SampleReaders:
    """The readers of all loaders of one model, as long as the loaders keep them alive.

    Attributes:
        follow_speeds: True if the batches of the ranks change with their speeds, which not all readers can follow.
    """

    def __init__(self) -> None:
        self.follow_speeds = False
        self._references: list[weakref.ref[SampleReader]] = []

    def add(self, reader: SampleReader | None, split: BatchSplit) -> None:
        """Let a loader's reader follow changes, and read by ``split`` from now on.

        Args:
            reader: None for a loader whose batches are made elsewhere, as by a batch sampler.

        Raises:
            BatchError: batches follow the ranks' speeds, but the reader cannot change: only a `ReplicaSampler` can.
        """
        if self.follow_speeds and not isinstance(reader, ReplicaSampler):
            raise BatchError(
                "batches that follow the speeds of the ranks need samples that can be indexed, but this loader reads "
                f"{'a stream' if reader is not None else 'batches that it makes itself'}. Give a DataLoader over a "
                f'dataset with a length, or fix the batch of every rank: "{SECTION}": {{"batch": [6, 2]}}.'
            )
        if reader is None or any(known is reader for known in self._living()):
            return
        self._references.append(weakref.ref(reader))
        if reader.split != split:
            reader.change(split, reader.newest_step + 1)

    def change(self, split: BatchSplit) -> None:
        """Read by ``split`` from the first optimizer step of which no rank has read a batch yet.

        Caller: every rank of the world.
        Collectives: one `on_all_ranks`.
        """
        readers = self._living()
        newest = on_all_ranks(lambda: max((reader.newest_step for reader in readers), default=-1))
        for reader in readers:
            reader.change(split, max(newest) + 1)

    def _living(self) -> list[SampleReader]:
        """Return the readers whose loaders still exist."""
        readers = [reference() for reference in self._references]
        return [reader for reader in readers if reader is not None]
