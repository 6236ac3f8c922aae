"""The order in which a loader draws its samples in an epoch: noted, and compared where the epoch is begun again.

A job that goes on amid an epoch begins it again and leaves out what was trained on. That is right only if the loader
draws the same order again. Here every batch of sample numbers goes into a checksum as it is drawn; a checkpoint keeps
the checksum of what was trained on, and the epoch that is begun again is held to it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from torch.utils.data import IterableDataset, Sampler

from ds_hetero.errors import SamplingError
from ds_hetero.runtime.data.epochs import add_to_checksum
from ds_hetero.runtime.data.sampling import ReplicaSampler, reader_of


class DrawnOrder:
    """The order of one epoch: how many samples were drawn with each of its batches, and a checksum of all so far."""

    def __init__(self) -> None:
        self._after: list[tuple[int, int]] = [(0, 0)]  # samples and checksum, by the batches drawn
        self._expected: tuple[int, int] | None = None
        self._drawn_by = "the loader"

    def begin(self, drawn_by: str) -> None:
        """Note that an epoch begins whose order is drawn by an object of this class."""
        self._after, self._drawn_by = [(0, 0)], drawn_by

    def add(self, drawn: Any) -> None:
        """Note a batch. Raises `SamplingError`: the samples so far are others than those expected."""
        num_samples, checksum = self._after[-1]
        # The checksum of two batches is that of one with the samples of both: a job may go on with other batches.
        self._after.append((num_samples + len(drawn), add_to_checksum(checksum, drawn)))
        if self._expected is None or self._after[-1][0] < self._expected[0]:
            return
        expected, self._expected = self._expected, None
        if self._after[-1][0] == expected[0] and self._after[-1] != expected:
            raise SamplingError(
                f"{self._drawn_by} does not draw again what it drew before the checkpoint: the first {expected[0]} "
                "samples of the epoch are others now, so that some would be trained on twice and others never. "
                "Let it draw the order of an epoch when the epoch begins, from torch's generator or from one that it "
                "keeps as an attribute (torch.Generator, random.Random). Or begin the epoch anew: "
                "ignore_data_skip=True."
            )

    def after(self, num_batches: int) -> tuple[int, int] | None:
        """Return samples and checksum of the first batches; None where they were not noted, as by another process."""
        return self._after[num_batches] if 0 < num_batches < len(self._after) else None

    def expect(self, after: tuple[int, int] | None) -> None:
        """Hold the next epoch to what `after` returned."""
        self._expected = None if after is None else (after[0], after[1])


class NotedBatchSampler(Sampler[Any]):
    """A batch sampler whose batches go into a `DrawnOrder`; whatever else is asked of it, the one inside answers."""

    noted: Any
    _order: DrawnOrder

    def __init__(self, batch_sampler: Any, order: DrawnOrder) -> None:
        self.__dict__.update(noted=batch_sampler, _order=order)

    def __iter__(self) -> Iterator[Any]:
        sampler = getattr(self.noted, "sampler", None)
        self._order.begin(type(self.noted if sampler is None else sampler).__name__)
        for drawn in self.noted:
            self._order.add(drawn)
            yield drawn

    def __len__(self) -> int:
        return len(self.noted)

    def follow(self, order: DrawnOrder) -> None:
        """Note into another order from now on."""
        self.__dict__["_order"] = order

    def __getattr__(self, name: str) -> Any:
        if name == "noted":  # looked up by copy and pickle before there is any attribute
            raise AttributeError(name)
        return getattr(self.noted, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self.noted, name, value)


class NotedCollate:
    """A collate function that notes the samples of a stream, which has no sampler; in workers it notes nothing here."""

    def __init__(self, collate: Callable[[Any], Any], order: DrawnOrder) -> None:
        self.noted, self._order = collate, order

    def __call__(self, samples: Any) -> Any:
        """Collate ``samples``."""
        self._order.add(samples)
        return self.noted(samples)


def note_order(dataloader: Any) -> DrawnOrder:
    """Note the order in which a ``DataLoader``, or accelerate's around one, draws from now on: that of all replicas.

    Of any other loader, and of a stream that is read by workers, nothing is noted.
    """
    order = DrawnOrder()
    loader = getattr(dataloader, "base_dataloader", dataloader)
    around, name = _place_of_sampler(loader)
    batch_sampler = getattr(around, name, None)
    if isinstance(getattr(loader, "dataset", None), IterableDataset):
        if reader_of(loader) is None and getattr(loader, "num_workers", 1) == 0:
            loader.collate_fn = NotedCollate(loader.collate_fn, order)
    elif isinstance(batch_sampler, NotedBatchSampler):
        batch_sampler.follow(order)
    elif batch_sampler is not None:
        # torch's loaders refuse a batch sampler that is set later, since they may have begun to iterate.
        object.__setattr__(around, name, NotedBatchSampler(batch_sampler, order))
    return order


def batches_drawn(dataloader: Any, num_used: int) -> int:
    """Return how many batches the noted sampler has drawn for the ``num_used`` that this rank was given."""
    loader = getattr(dataloader, "base_dataloader", dataloader)
    reader = reader_of(loader)
    if isinstance(reader, ReplicaSampler):
        size = getattr(reader.batch_sampler, "batch_size", None)
        num_samples = num_used // reader.split.micro_steps * reader.split.samples
        return num_samples // size if isinstance(size, int) and size else 0
    around, _ = _place_of_sampler(loader)
    in_turn = around is not loader and not getattr(around, "split_batches", False)
    return num_used * (int(around.num_processes) if in_turn else 1)


def _place_of_sampler(loader: Any) -> tuple[Any, str]:
    """Return the object that holds the batch sampler of one process, and the attribute's name."""
    name, around = "batch_sampler", loader
    while (inner := getattr(around, name, None)) is not None and hasattr(type(inner), "__iter__"):
        shares_out = isinstance(inner, ReplicaSampler) or type(inner).__name__ == "BatchSamplerShard"
        if not shares_out:
            break
        around = inner
    return around, name
