"""Number of batches in an epoch of a replica, found from the ranks' samplers before anything is read.

    same     all ranks of a replica draw the same batches: as many as one rank's loader has
    own      each rank draws its own (a DistributedSampler over all ranks): as many as the loaders of all of them have

Every sample is to be read once, so that what is drawn by several replicas alike, or by none, is refused.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch.utils.data import DataLoader, IterableDataset

from ds_hetero.errors import SamplingError
from ds_hetero.runtime.collectives import on_all_ranks
from ds_hetero.runtime.data.batch_mode import OWN, SHARED, LoaderNames, note_mode
from ds_hetero.runtime.data.epochs import Epochs


@dataclass(frozen=True, kw_only=True)
class Sharding:
    """How one rank's loader shares samples out, as far as its attributes show."""

    replica: int
    pairs: tuple[tuple[int, int], ...]  # (number of shards, index) of each sampler or dataset that shares out
    sampler: str  # the class that draws, for messages
    first: int | None  # checksum of the sample numbers of the first batch; None where no sampler draws them
    length: int | None  # batches of an epoch on this rank
    is_known: bool  # whether the loader shows by its attributes that it shares out, or is a plain one


@dataclass(frozen=True)
class EpochLength:
    """Batches of an epoch of one replica; None where the loader has no length. ``in_turn_of``: ranks with their own."""

    batches: int | None
    in_turn_of: int = 1


def epoch_length(loader: Any, names: LoaderNames, replica: int, made_in: str) -> EpochLength:
    """Return the batches of an epoch of this rank's replica, for code that wraps the loader.

    Args:
        loader: of this rank.
        made_in: the function of the user's that made it, for messages.

    Caller: every rank of the world. Collectives: one `on_all_ranks`.

    Raises:
        SamplingError: on every rank: samples would be read several times in an epoch, or never.
    """
    own: list[Sharding] = []

    def describe() -> Sharding:
        own.append(_sharding_of(loader, names, replica))
        return own[0]

    by_rank = on_all_ranks(describe)
    of_replica = [one for one in by_rank if one.replica == replica]
    _expect_each_sample_once(by_rank, made_in)
    if own[0].first is not None:
        note_mode(loader, OWN if _has_own_batches(of_replica) else SHARED)
    if not _has_own_batches(of_replica):
        return EpochLength(own[0].length)
    lengths = [one.length for one in of_replica]
    return EpochLength(None if None in lengths else sum(length or 0 for length in lengths), len(of_replica))


def _sharding_of(loader: Any, names: LoaderNames, replica: int) -> Sharding:
    pairs = tuple(pair for part in names.parts(loader) if (pair := _pair_of(part, names)) is not None)
    sampler = getattr(loader, "sampler", None)
    batch_sampler = getattr(loader, "batch_sampler", None)
    drawing = getattr(batch_sampler, "sampler", None) or batch_sampler or sampler or getattr(loader, "dataset", loader)
    try:
        length: int | None = len(loader)
    except TypeError:
        length = None
    return Sharding(
        replica=replica,
        pairs=pairs,
        sampler=type(drawing).__name__,
        first=_first_drawn(loader, names),
        length=length,
        is_known=bool(pairs) or not names.always_shards(loader),
    )


def _pair_of(part: Any, names: LoaderNames) -> tuple[int, int] | None:
    if isinstance(part, DataLoader):
        return None
    pairs = [(getattr(part, count, None), getattr(part, index, None)) for count, index in names.shards]
    return next(
        ((count, index) for count, index in pairs if isinstance(count, int) and isinstance(index, int) and count > 1),
        None,
    )


def _first_drawn(loader: Any, names: LoaderNames) -> int | None:
    """Checksum of the numbers that the loader's sampler draws first; it will draw them again."""
    batch_sampler = getattr(loader, "batch_sampler", None)
    if batch_sampler is None or isinstance(getattr(loader, "dataset", None), IterableDataset):
        return None
    epochs = Epochs(loader, names)
    start = epochs.states_now()
    first = next(iter(batch_sampler), None)
    epochs.put_back(start)
    return zlib.crc32(repr(first).encode())


def _has_own_batches(of_replica: Sequence[Sharding]) -> bool:
    if len(of_replica) == 1:
        return False
    if len({one.pairs for one in of_replica}) > 1:
        return True
    firsts = {one.first for one in of_replica}
    return None not in firsts and len(firsts) == len(of_replica)


def _expect_each_sample_once(by_rank: Sequence[Sharding], made_in: str) -> None:
    pairs = {one.pairs for one in by_rank}
    num_shards = math.prod(count for count, _ in by_rank[0].pairs)
    remedy = (
        "Give the loader all samples and let it be prepared (super().get_train_dataloader(), or "
        "self.accelerator.prepare(loader)), or shard it once, over all ranks: DistributedSampler(dataset, "
        "num_replicas=world_size, rank=rank)."
    )
    if len({len(one.pairs) for one in by_rank}) > 1 or len(pairs) != num_shards:
        listed = "; ".join(
            f"rank {rank}: {' of '.join(f'{index} of {count}' for count, index in one.pairs) or 'all'}"
            for rank, one in enumerate(by_rank)
        )
        raise SamplingError(
            f"the loader of {made_in} reads {len(pairs)} of {num_shards} shards of the samples ({listed}), so that an "
            f"epoch would leave samples out or read them several times. {remedy}"
        )
    replicas: dict[int, list[Sharding]] = {}
    for one in by_rank:
        replicas.setdefault(one.replica, []).append(one)
    firsts = [{one.first for one in of_replica} for of_replica in replicas.values()]
    if num_shards == 1 and len(replicas) > 1 and None not in firsts[0] and len(set(map(frozenset, firsts))) == 1:
        raise SamplingError(
            f"the loader of {made_in} reads the same samples on all {len(replicas)} replicas (of "
            f"{len(by_rank) // len(replicas)} ranks each), so that an epoch would read each {len(replicas)} times. "
            f"{remedy}"
        )
    for of_replica in replicas.values():
        if not all(one.is_known for one in of_replica) and _has_own_batches(of_replica):
            raise SamplingError(
                f"{of_replica[0].sampler} in the loader of {made_in} draws other samples on each rank of a replica, "
                "and does not show how it shares them out. Give it the attributes num_replicas and rank, as torch's "
                "DistributedSampler has them, or let it draw the same samples on all ranks."
            )
