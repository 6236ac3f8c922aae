"""Record the order in which a loader draws the samples of an epoch, and check it when the epoch is begun again.

A job that resumes in the middle of an epoch begins it again and leaves out the samples that were trained on. That is
right only if the loader draws the same order again. So every batch of sample indices is added to a checksum as it is
drawn, a checkpoint has the checksum of the batches that were trained on, and the resumed epoch must reach the same
checksum.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from torch.utils.data import IterableDataset, Sampler

from ds_hetero.errors import SamplingError
from ds_hetero.runtime.data.epochs import add_to_checksum
from ds_hetero.runtime.data.sampling import ReplicaSampler, reader_of


class DrawnOrder:
    """Record of the order of one epoch: after each batch, the number of samples so far and their checksum."""

    def __init__(self) -> None:
        self._after: list[tuple[int, int]] = [(0, 0)]  # (samples, checksum), by the number of batches drawn
        self._expected: tuple[int, int] | None = None
        self._drawn_by = "the loader"

    def begin(self, drawn_by: str) -> None:
        """Begin the record of an epoch; ``drawn_by`` is the class that draws its order, for messages."""
        self._after, self._drawn_by = [(0, 0)], drawn_by

    def add(self, drawn: Any) -> None:
        """Add a batch of sample indices to the record.

        Raises:
            SamplingError: the epoch now has as many samples as that of `expect`, but another checksum.
        """
        num_samples, checksum = self._after[-1]
        # The checksum of two batches is that of one batch with the samples of both, so a job may resume with another
        # batch size.
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
        """Return (samples, checksum) of the first ``num_batches``; None if they were not recorded in this process."""
        return self._after[num_batches] if 0 < num_batches < len(self._after) else None

    def expect(self, after: tuple[int, int] | None) -> None:
        """Let `add` check the next epoch against the (samples, checksum) ``after``; None: let it check nothing."""
        self._expected = None if after is None else (after[0], after[1])


class RecordedBatchSampler(Sampler[Any]):
    """Wraps a batch sampler and adds its batches to a `DrawnOrder`; has all attributes of the wrapped sampler."""

    recorded: Any
    _order: DrawnOrder

    def __init__(self, batch_sampler: Any, order: DrawnOrder) -> None:
        self.__dict__.update(recorded=batch_sampler, _order=order)

    def __iter__(self) -> Iterator[Any]:
        sampler = getattr(self.recorded, "sampler", None)
        self._order.begin(type(self.recorded if sampler is None else sampler).__name__)
        for drawn in self.recorded:
            self._order.add(drawn)
            yield drawn

    def __len__(self) -> int:
        return len(self.recorded)

    def follow(self, order: DrawnOrder) -> None:
        """Add batches to another `DrawnOrder` from now on."""
        self.__dict__["_order"] = order

    def __getattr__(self, name: str) -> Any:
        if name == "recorded":  # looked up by copy and pickle before there is any attribute
            raise AttributeError(name)
        return getattr(self.recorded, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self.recorded, name, value)


class RecordedCollate:
    """Wraps a collate function and adds samples to a `DrawnOrder`, for streams, which have no sampler.

    In a worker process it would add them to the worker's copy, so it is used only without workers.
    """

    def __init__(self, collate: Callable[[Any], Any], order: DrawnOrder) -> None:
        self.recorded, self._order = collate, order

    def __call__(self, samples: Any) -> Any:
        """Add ``samples`` to the order, and collate them."""
        self._order.add(samples)
        return self.recorded(samples)


def record_order(dataloader: Any) -> DrawnOrder:
    """Record the order in which a ``DataLoader``, alone or in accelerate's, draws the samples of all replicas.

    For any other loader, and a stream that is read by workers, the returned order stays empty.
    """
    order = DrawnOrder()
    loader = getattr(dataloader, "base_dataloader", dataloader)
    holder, name = _holder_of_sampler(loader)
    batch_sampler = getattr(holder, name, None)
    if isinstance(getattr(loader, "dataset", None), IterableDataset):
        if reader_of(loader) is None and getattr(loader, "num_workers", 1) == 0:
            loader.collate_fn = RecordedCollate(loader.collate_fn, order)
    elif isinstance(batch_sampler, RecordedBatchSampler):
        batch_sampler.follow(order)
    elif batch_sampler is not None:
        # torch's loaders refuse a batch sampler that is set later, since they may have begun to iterate.
        object.__setattr__(holder, name, RecordedBatchSampler(batch_sampler, order))
    return order


def num_batches_drawn(dataloader: Any, num_used: int) -> int:
    """Return how many batches the recorded sampler has drawn when this rank has got ``num_used`` batches."""
    loader = getattr(dataloader, "base_dataloader", dataloader)
    reader = reader_of(loader)
    if isinstance(reader, ReplicaSampler):
        size = getattr(reader.batch_sampler, "batch_size", None)
        num_samples = num_used // reader.split.micro_steps * reader.split.samples
        return num_samples // size if isinstance(size, int) and size else 0
    holder, _ = _holder_of_sampler(loader)
    in_turn = holder is not loader and not getattr(holder, "split_batches", False)
    return num_used * (int(holder.num_processes) if in_turn else 1)


def _holder_of_sampler(loader: Any) -> tuple[Any, str]:
    """Return the object that holds the batch sampler of all samples, and the name of its attribute."""
    name, holder = "batch_sampler", loader
    while (inner_sampler := getattr(holder, name, None)) is not None and hasattr(type(inner_sampler), "__iter__"):
        shares_out = isinstance(inner_sampler, ReplicaSampler) or type(inner_sampler).__name__ == "BatchSamplerShard"
        if not shares_out:
            break
        holder = inner_sampler
    return holder, name
