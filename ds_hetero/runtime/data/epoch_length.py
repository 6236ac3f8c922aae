"""Compute the number of batches in an epoch of a replica from the ranks' samplers, before anything is read.

    same     all ranks of a replica draw the same batches: the number is the length of one rank's loader
    own      each rank draws its own (a DistributedSampler over all ranks): the number is the sum of the ranks' lengths

Every sample has to be read once per epoch, so loaders that read a sample on several replicas, or on none, are refused.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch.utils.data import DataLoader, IterableDataset

from ds_hetero.errors import SamplingError
from ds_hetero.runtime.collectives import on_all_ranks
from ds_hetero.runtime.data.batch_mode import OWN, SHARED, note_mode
from ds_hetero.runtime.data.epochs import Epochs
from ds_hetero.runtime.data.loader_names import LoaderNames


@dataclass(frozen=True, kw_only=True)
class Sharding:
    """How one rank's loader shards the samples, as far as its attributes show."""

    replica: int  # id of the rank's replica
    shards: tuple[tuple[int, int], ...]  # (number of shards, index) of each sampler or dataset that shards
    sampler: str  # the class that draws samples, for messages
    first: int | None  # checksum of the sample indices of the first batch; None if no sampler draws them
    length: int | None  # batches of an epoch on this rank
    is_known: bool  # the attributes show how the loader shards, or that it does not


@dataclass(frozen=True)
class EpochLength:
    """Length of an epoch of one replica."""

    batches: int | None  # None if the loader has no length
    ranks_in_turn: int = 1  # ranks whose own batches are used in turn; 1 if all ranks draw the same


def epoch_length(loader: Any, names: LoaderNames, replica: int, made_in: str) -> EpochLength:
    """Return the number of batches of an epoch of this rank's replica.

    Args:
        loader: this rank's loader, before it is wrapped.
        made_in: the user's function that made the loader, for messages.

    Caller: every rank of the world. Collectives: one `on_all_ranks`.

    Raises:
        SamplingError: on every rank: samples would be read several times in an epoch, or never.
    """
    by_rank = on_all_ranks(lambda: _sharding_of(loader, names, replica))
    local_sharding = by_rank[dist.get_rank() if dist.is_initialized() else 0]
    of_replica = [sharding for sharding in by_rank if sharding.replica == replica]
    _expect_each_sample_once(by_rank, made_in)
    if local_sharding.first is not None:
        note_mode(loader, OWN if _has_own_batches(of_replica) else SHARED)
    if not _has_own_batches(of_replica):
        return EpochLength(local_sharding.length)
    lengths = [sharding.length for sharding in of_replica]
    total = None if None in lengths else sum(length or 0 for length in lengths)
    return EpochLength(total, len(of_replica))


def _sharding_of(loader: Any, names: LoaderNames, replica: int) -> Sharding:
    """Describe how this rank's loader shards the samples; draws its first batch of indices and undoes the draw."""
    shards_or_none = [_shard_of_part(part, names) for part in names.parts(loader)]
    shards = tuple(shard for shard in shards_or_none if shard is not None)
    sampler = getattr(loader, "sampler", None)
    batch_sampler = getattr(loader, "batch_sampler", None)
    drawing = getattr(batch_sampler, "sampler", None) or batch_sampler or sampler or getattr(loader, "dataset", loader)
    try:
        length: int | None = len(loader)
    except TypeError:
        length = None
    return Sharding(
        replica=replica,
        shards=shards,
        sampler=type(drawing).__name__,
        first=_first_drawn(loader, names),
        length=length,
        is_known=bool(shards) or not names.always_shards(loader),
    )


def _shard_of_part(part: Any, names: LoaderNames) -> tuple[int, int] | None:
    """Return (number of shards, index) of a sampler or dataset that shards over several; None of any other part."""
    if isinstance(part, DataLoader):
        return None
    for count_name, index_name in names.shards:
        count, index = getattr(part, count_name, None), getattr(part, index_name, None)
        if isinstance(count, int) and isinstance(index, int) and count > 1:
            return count, index
    return None


def _first_drawn(loader: Any, names: LoaderNames) -> int | None:
    """Return a checksum of the first batch of indices that the loader's sampler draws, and undo the draw."""
    batch_sampler = getattr(loader, "batch_sampler", None)
    if batch_sampler is None or isinstance(getattr(loader, "dataset", None), IterableDataset):
        return None
    epochs = Epochs(loader, names)
    start = epochs.states_now()
    first = next(iter(batch_sampler), None)
    epochs.put_back(start)
    return zlib.crc32(repr(first).encode())


def _has_own_batches(of_replica: Sequence[Sharding]) -> bool:
    """Whether the ranks of a replica draw different batches, as different shards or first batches show."""
    if len(of_replica) == 1:
        return False
    if len({sharding.shards for sharding in of_replica}) > 1:
        return True
    firsts = {sharding.first for sharding in of_replica}
    return None not in firsts and len(firsts) == len(of_replica)


def _expect_each_sample_once(by_rank: Sequence[Sharding], made_in: str) -> None:
    """Refuse loaders that would read samples several times in an epoch, or never. Raises `SamplingError`."""
    distinct_shards = {sharding.shards for sharding in by_rank}
    num_shards = math.prod(count for count, _ in by_rank[0].shards)
    remedy = (
        "Give the loader all samples and let it be prepared (super().get_train_dataloader(), or "
        "self.accelerator.prepare(loader)), or shard it once, over all ranks: DistributedSampler(dataset, "
        "num_replicas=world_size, rank=rank)."
    )
    if len({len(sharding.shards) for sharding in by_rank}) > 1 or len(distinct_shards) != num_shards:
        texts = []
        for rank, sharding in enumerate(by_rank):
            shards = " of ".join(f"{index} of {count}" for count, index in sharding.shards)
            texts.append(f"rank {rank}: {shards or 'all'}")
        listed = "; ".join(texts)
        raise SamplingError(
            f"the loader of {made_in} reads {len(distinct_shards)} of {num_shards} shards of the samples "
            f"({listed}), so that an epoch would leave samples out or read them several times. {remedy}"
        )
    replicas: dict[int, list[Sharding]] = {}
    for sharding in by_rank:
        replicas.setdefault(sharding.replica, []).append(sharding)
    firsts = [frozenset(sharding.first for sharding in of_replica) for of_replica in replicas.values()]
    draw_the_same = None not in firsts[0] and len(set(firsts)) == 1
    if num_shards == 1 and len(replicas) > 1 and draw_the_same:
        raise SamplingError(
            f"the loader of {made_in} reads the same samples on all {len(replicas)} replicas (of "
            f"{len(by_rank) // len(replicas)} ranks each), so that an epoch would read each {len(replicas)} times. "
            f"{remedy}"
        )
    for of_replica in replicas.values():
        if not all(sharding.is_known for sharding in of_replica) and _has_own_batches(of_replica):
            raise SamplingError(
                f"{of_replica[0].sampler} in the loader of {made_in} draws other samples on each rank of a replica, "
                "and does not show how it shares them out. Give it the attributes num_replicas and rank, as torch's "
                "DistributedSampler has them, or let it draw the same samples on all ranks."
            )
