"""The batch of an optimizer step: the same on every rank, and cut into the micro-batches of the pipelines."""

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
from ds_hetero.runtime.data.batch_mode import TORCH_LOADERS, LoaderAround, LoaderNames
from ds_hetero.runtime.data.epochs import STATE_VERSION, Epochs, expect_compatible
from ds_hetero.runtime.data.shards import Entries, WholeBatch, read_batch
from ds_hetero.runtime.peers.calls import Counts, expect_same_counts, own_calls
from ds_hetero.runtime.peers.watch import waiting_for_peers
from ds_hetero.values.plans import Plan


@dataclass(frozen=True, kw_only=True, eq=False)
class StageBatch:
    """A micro-batch of whole sequences, the same on every rank of a pipeline."""

    whole: WholeBatch  # from `ds_hetero.runtime.data.shards.read_batch`
    scale: float  # by which the sum of its token losses counts in the loss of the step

    @property
    def rows(self) -> int:
        """Sequences: b."""
        return self.whole.batch_size

    @property
    def length(self) -> int:
        """Tokens of each: L."""
        return self.whole.length


def samples_of_step(plan: Plan) -> int:
    """Sequences of an optimizer step over all pipelines: the global batch."""
    split = plan.batch_split
    assert split is not None, "a plan of several stages has batches"
    return split.samples


def micro_batches(plan: Plan, pipeline: int, batch: WholeBatch) -> list[WholeBatch]:
    """Micro-batches of a pipeline: its run of a global batch's rows. Raises `BatchError`: it has too many.

    A global batch with fewer rows than the plan's, as the last one of an epoch, leaves the last pipelines with less.
    """
    if batch.batch_size > samples_of_step(plan):
        taken = " + ".join(f"{p.micro_batches} x {p.micro_batch_size}" for p in plan.pipelines)
        raise BatchError(
            f"the batch has {batch.batch_size} sequences, the pipelines of the plan take {samples_of_step(plan)} "
            f"({taken}) in an optimizer step. Give the engine the batch of a whole step, no more."
        )
    before = sum((p.micro_batch_size or 0) * (p.micro_batches or 0) for p in plan.pipelines[:pipeline])
    size, count = plan.pipelines[pipeline].micro_batch_size or 0, plan.pipelines[pipeline].micro_batches or 0
    starts = range(before, min(before + size * count, batch.batch_size), size)
    return [_rows(batch, start, min(start + size, before + size * count, batch.batch_size)) for start in starts]


def of_at_most(batch: WholeBatch, rows: int) -> Iterator[WholeBatch]:
    """Yield the batch in parts of at most ``rows`` rows, in order."""
    for start in range(0, batch.batch_size, rows):
        yield _rows(batch, start, min(start + rows, batch.batch_size))


def _rows(batch: WholeBatch, start: int, stop: int) -> WholeBatch:
    sequences = {name: tensor[start:stop] for name, tensor in batch.sequences.items()}
    return replace(batch, batch_size=stop - start, sequences=sequences)


class SameBatches(LoaderAround):
    """A loader of global batches that every rank reads alike; yields them on ``device`` when all ranks agree.

    Args:
        dataloader: yields mappings with ``input_ids`` and ``labels``.
    """

    def __init__(self, dataloader: Iterable[Any], device: torch.device, names: LoaderNames = TORCH_LOADERS) -> None:
        self.dataloader = dataloader
        self._device, self._names = device, names
        self._epochs = Epochs(dataloader, names)
        self._epoch: int | None = None
        self._start = self._used = 0  # batches of the epoch that are left out, and that were given

    def set_epoch(self, epoch: int) -> None:
        """Tell the wrapped loader, or else its sampler and dataset, which epoch comes next."""
        self._epoch = epoch
        self._names.set_epoch(self.dataloader, epoch)

    def state_dict(self) -> Entries:
        """Return the position in the epoch, for `load_state_dict` on any rank: used batches are read again."""
        start = self._epochs.state(amid_epoch=self._used > 0, checksum=self._epochs.checksum)
        return {"version": STATE_VERSION, "epoch": self._epoch, "used": self._used, "start": start}

    def load_state_dict(self, state: Entries) -> None:
        """Begin the next epoch where ``state`` was taken; the one after that is whole.

        Raises:
            BatchError: the state is of another version. The next epoch raises it where the loader gives other batches
                than before.
        """
        expect_compatible(state, {"version": STATE_VERSION})
        if state["epoch"] is not None:
            self.set_epoch(state["epoch"])
        self._start = self._used = state["used"]
        self._epochs.resume(state["start"], state["used"], 0)

    def skipping(self, num_batches: int, skip: Callable[[Iterable[object], int], Iterable[object]]) -> SameBatches:
        """A loader without the first ``num_batches``; see `ds_hetero.runtime.data.loader.ShardedLoader.skipping`."""
        return SameBatches(skip(self.dataloader, num_batches), self._device, self._names)

    def __iter__(self) -> Iterator[Entries]:
        """Yield batches.

        Caller: every rank of the world.
        Collectives: one `on_all_ranks` per batch, and one at the end.

        Raises:
            BatchError: on every rank, when ranks were given different batches, or some have run out.
            StepError: on every rank, when one has left out a forward, a backward or a step, or is elsewhere.
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
            yield from own_calls.giving(on_device)
        self._used = 0


def _fetch(batches: Iterator[Any], number: int) -> Any:
    """Return the batch of that number in the epoch, the same on all ranks; None at the epoch's end."""
    batch: Any = None
    counts = own_calls.begin_fetch(number)

    def read() -> tuple[Counts, dict[str, str] | None]:
        nonlocal batch
        batch = next(batches, None)
        return counts, None if batch is None else read_batch(batch).fingerprints()

    with waiting_for_peers("reading the next batch"):
        by_rank = on_all_ranks(read)
    expect_same_counts([did for did, _ in by_rank])
    _expect_same([fingerprints for _, fingerprints in by_rank])
    return batch


def _expect_same(by_rank: list[dict[str, str] | None]) -> None:
    if all(fingerprints == by_rank[0] for fingerprints in by_rank):
        return
    out = [rank for rank, fingerprints in enumerate(by_rank) if fingerprints is None]
    if out:
        raise BatchError(f"the loaders of ranks {out} have no more batches, those of the others have.")
    first = by_rank[0] or {}
    rank = next(rank for rank, fingerprints in enumerate(by_rank) if fingerprints != first)
    other = by_rank[rank] or {}
    name = next(name for name in sorted({*first, *other}) if first.get(name) != other.get(name))
    raise BatchError(
        f"all {dist.get_world_size()} ranks must be given the same batches, and the pipelines take their rows "
        f"from these, but {name} is {first.get(name)} on rank 0 and {other.get(name)} on rank {rank}. "
        "Seed the loader alike on all ranks, and use no sampler that shares the data out."
    )
