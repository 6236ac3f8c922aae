"""Read the batch of an optimizer step, the same on every rank, and cut it into the pipelines' micro-batches."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import count
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ds_hetero.errors import BatchError
from ds_hetero.runtime.collectives import on_all_ranks
from ds_hetero.runtime.data.epochs import STATE_VERSION, Epochs, expect_compatible
from ds_hetero.runtime.data.loader_around import LoaderAround
from ds_hetero.runtime.data.loader_names import TORCH_LOADERS, LoaderNames
from ds_hetero.runtime.data.shards import Entries, WholeBatch, read_batch
from ds_hetero.runtime.peers.calls import Counts, expect_same_counts, own_calls
from ds_hetero.runtime.peers.watch import waiting_for_peers
from ds_hetero.values.plans import Plan


@dataclass(frozen=True, kw_only=True, eq=False)
class StageBatch:
    """A micro-batch of whole sequences, the same on every rank of a pipeline."""

    batch: WholeBatch  # the micro-batch, from `ds_hetero.runtime.data.shards.read_batch`
    scale: float  # factor of the sum of the micro-batch's token losses in the loss of the step

    @property
    def rows(self) -> int:
        """Number of sequences, b."""
        return self.batch.batch_size

    @property
    def length(self) -> int:
        """Number of tokens of each sequence, L."""
        return self.batch.length


def samples_of_step(plan: Plan) -> int:
    """Return the number of sequences of an optimizer step over all pipelines, the global batch."""
    split = plan.batch_split
    assert split is not None, "a plan of several stages has batches"
    return split.samples


def micro_batches(plan: Plan, pipeline: int, batch: WholeBatch) -> list[WholeBatch]:
    """Return the micro-batches of a pipeline, which takes consecutive rows of a global batch.

    If the batch has fewer rows than the plan's, as the last one of an epoch may, the last pipelines get fewer or none.
    Example: pipelines of 2 x 3 and 2 x 1 rows; a batch of 7 rows gives 3 + 3 rows to the first, and 1 to the second.

    Raises:
        BatchError: the batch has more rows than the plan takes.
    """
    if batch.batch_size > samples_of_step(plan):
        sizes = " + ".join(f"{p.micro_batches} x {p.micro_batch_size}" for p in plan.pipelines)
        raise BatchError(
            f"the batch has {batch.batch_size} sequences, the pipelines of the plan take {samples_of_step(plan)} "
            f"({sizes}) in an optimizer step. Give the engine the batch of one step."
        )
    size = plan.pipelines[pipeline].micro_batch_size
    assert size is not None, "a plan of several stages has batches"
    first_row = sum(earlier.samples for earlier in plan.pipelines[:pipeline])
    stop_row = min(first_row + plan.pipelines[pipeline].samples, batch.batch_size)
    return [_rows(batch, row, min(row + size, stop_row)) for row in range(first_row, stop_row, size)]


def parts_of_rows(batch: WholeBatch, rows: int) -> Iterator[WholeBatch]:
    """Yield parts of at most ``rows`` rows of the batch, in order."""
    for start in range(0, batch.batch_size, rows):
        yield _rows(batch, start, min(start + rows, batch.batch_size))


def _rows(batch: WholeBatch, start: int, stop: int) -> WholeBatch:
    """Return the rows ``[start, stop)`` of a batch."""
    sequences = {name: tensor[start:stop] for name, tensor in batch.sequences.items()}
    return replace(batch, batch_size=stop - start, sequences=sequences)


class SameBatches(LoaderAround):
    """Wraps a loader of global batches that every rank reads; yields them on ``device`` if they are the same on all.

    Args:
        dataloader: yields mappings with ``input_ids`` and ``labels``.
    """

    def __init__(self, dataloader: Iterable[Any], device: torch.device, names: LoaderNames = TORCH_LOADERS) -> None:
        self.dataloader = dataloader
        self._device, self._names = device, names
        self._epochs = Epochs(dataloader, names)
        self._epoch: int | None = None
        self._start = 0  # batches of the next epoch that are left out
        self._used = 0  # batches of this epoch that were yielded

    def set_epoch(self, epoch: int) -> None:
        """Tell the wrapped loader, or else its sampler and dataset, which epoch comes next."""
        self._epoch = epoch
        self._names.set_epoch(self.dataloader, epoch)

    def state_dict(self) -> Entries:
        """Return the position in the epoch, for `load_state_dict` on any rank."""
        start = self._epochs.state(amid_epoch=self._used > 0, checksum=self._epochs.checksum)
        return {"version": STATE_VERSION, "epoch": self._epoch, "used": self._used, "start": start}

    def load_state_dict(self, state: Entries) -> None:
        """Begin the next epoch where ``state`` was taken; the epochs after that are whole.

        The batches that were used are read again and dropped.

        Raises:
            BatchError: the state has another version. The next epoch raises it if the loader gives other batches than
                before.
        """
        expect_compatible(state, {"version": STATE_VERSION})
        if state["epoch"] is not None:
            self.set_epoch(state["epoch"])
        self._start = self._used = state["used"]
        self._epochs.resume(state["start"], state["used"], 0)

    def skipping(self, num_batches: int, skip: Callable[[Iterable[object], int], Iterable[object]]) -> SameBatches:
        """Return a loader without the first ``num_batches``, which ``skip(dataloader, n)`` leaves out."""
        return SameBatches(skip(self.dataloader, num_batches), self._device, self._names)

    def __iter__(self) -> Iterator[Entries]:
        """Yield batches.

        Caller: every rank of the world.
        Collectives: one `on_all_ranks` per batch, and one at the end.

        Raises:
            BatchError: on every rank: the ranks have read different batches, or some have run out of them.
            StepError: on every rank: a rank has left out a forward, a backward or a step, or is at another point of the
                loop.
            PeerError: another rank could not read its batch.
        """
        start, self._start = self._start, 0
        self._used = start
        batches = self._epochs.read()
        for number in count(start):
            batch = _fetch(batches, number)
            if batch is None:
                break
            self._used = number + 1
            on_device = {name: e.to(self._device) if isinstance(e, Tensor) else e for name, e in batch.items()}
            yield from own_calls.yield_batch(on_device)
        self._used = 0


def _fetch(batches: Iterator[Any], number: int) -> Any:
    """Return batch ``number`` of the epoch, which all ranks have compared; None at the epoch's end.

    Collectives: one `on_all_ranks`.
    """
    batch: Any = None
    counts = own_calls.begin_fetch(number)

    def read() -> tuple[Counts, dict[str, str] | None]:
        nonlocal batch
        batch = next(batches, None)
        return counts, None if batch is None else read_batch(batch).fingerprints()

    with waiting_for_peers("reading the next batch"):
        by_rank = on_all_ranks(read)
    expect_same_counts([counts_of_rank for counts_of_rank, _ in by_rank])
    _expect_same([fingerprints for _, fingerprints in by_rank])
    return batch


def _expect_same(by_rank: list[dict[str, str] | None]) -> None:
    """Raise `BatchError` if ranks read different batches.

    Args:
        by_rank: fingerprints of each rank's batch; None on a rank whose epoch has ended.
    """
    if all(fingerprints == by_rank[0] for fingerprints in by_rank):
        return
    ranks_at_end = [rank for rank, fingerprints in enumerate(by_rank) if fingerprints is None]
    if ranks_at_end:
        raise BatchError(
            f"the loaders of ranks {ranks_at_end} have no more batches, those of the others have. Give every rank the "
            "same loader of global batches, without a sampler that shards."
        )
    first = by_rank[0] or {}
    rank = next(rank for rank, fingerprints in enumerate(by_rank) if fingerprints != first)
    other = by_rank[rank] or {}
    name = next(name for name in sorted({*first, *other}) if first.get(name) != other.get(name))
    raise BatchError(
        f"all {dist.get_world_size()} ranks must be given the same batches, and the pipelines take their rows "
        f"from these, but {name} is {first.get(name)} on rank 0 and {other.get(name)} on rank {rank}. "
        "Seed the loader alike on all ranks, and use no sampler that shares the data out."
    )
