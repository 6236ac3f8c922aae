"""Do the ranks of a replica already hold the same batch, or each its own? Decided once, by all ranks together.

    "same"   all ranks of a replica are given the same batch; it is one step
    "own"    each rank is given another batch (a DistributedSampler over the world); they are used in turn, one per step
    "dealt"  replicas take different batches, as their schedule file says; decided there

A sampler that shards by rank says which it is: `(number of shards, index)` is the same on all ranks of a replica, or
different on each. Where no loader has such a sampler, checksums of the first batches are compared.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from ds_hetero.errors import BatchError

__all__ = ["DEALT", "OWN", "SAME", "Source", "decide", "describe", "expect_unsharded"]

SAME, OWN, DEALT = "same", "own", "dealt"

# Where loaders, samplers and datasets keep what they wrap, and what those that shard call their shard.
_WRAPPED = (
    "batch_sampler",
    "sampler",
    "data_sampler",
    "dataset",
    "base_dataloader",
    "dataloader",
    "loader",
    "_distributed",
)
_SHARD_NAMES = (
    ("num_replicas", "rank"),  # torch: DistributedSampler
    ("data_parallel_size", "data_parallel_rank"),  # DeepSpeed: DeepSpeedDataSampler
    ("num_processes", "process_index"),  # accelerate: BatchSamplerShard, IterableDatasetShard
    ("world_size", "rank"),  # datasets: split_dataset_by_node
)
_REMEDY = (
    'Say which it is: batches="same" (all ranks of a replica are given the same batch) or batches="own" (each another).'
)


@dataclass(frozen=True, kw_only=True)
class Source:
    """What one rank says about its loader.

    Args:
        replica: id of the rank's replica.
        asked: the mode that the user asked for, if any.
        shards: ``(number of shards, index)`` of everything in the loader that shards by rank.
        unsharded: the loader went through accelerate, which found that this replica needs no sharding.
        length: batches of an epoch on this rank; None where the loader does not know.
        first: checksum of the first batch, "" without one; None before it is looked at.
    """

    replica: int
    asked: str | None
    shards: tuple[tuple[int, int], ...]
    unsharded: bool = False
    length: int | None = None
    first: str | None = None

    def to_json(self) -> bytes:
        """One line."""
        return json.dumps(asdict(self)).encode()

    @classmethod
    def from_json(cls, text: bytes) -> Source:
        """Read what `to_json` wrote."""
        data = json.loads(text)
        return cls(**{**data, "shards": tuple((count, index) for count, index in data["shards"])})


def describe(dataloader: Any, replica: int, asked: str | None = None) -> Source:
    """What ``dataloader`` shows about itself, without reading from it."""
    parts = list(_parts(dataloader))
    shards = [
        (getattr(part, count), getattr(part, index))
        for part in parts
        for count, index in _SHARD_NAMES
        if isinstance(getattr(part, count, None), int) and isinstance(getattr(part, index, None), int)
    ]
    # accelerate puts a BatchSamplerShard into every map-style loader of more than one process.
    by_accelerate = any(type(part).__name__ == "DataLoaderShard" for part in parts)
    map_style = hasattr(getattr(dataloader, "dataset", None), "__getitem__")
    try:
        length = len(dataloader)
    except TypeError:
        length = None
    return Source(
        replica=replica,
        asked=asked,
        shards=tuple(dict.fromkeys(shards)),
        unsharded=by_accelerate and map_style and not shards,
        length=length,
    )


def decide(sources: Sequence[Source]) -> tuple[str | None, str]:
    """The mode of the whole job and why, from the sources of all ranks of the world; mode None: compare first batches.

    Raises:
        BatchError: the ranks contradict each other, or the mode cannot work; equal on every rank.
    """
    asked = [source.asked for source in sources]
    if len(set(asked)) > 1:
        raise BatchError(f"batches must be the same on every rank, by rank it is {asked}.")
    if asked[0] not in (None, SAME, OWN):
        raise BatchError(f"batches is {asked[0]!r}; it is one of {SAME!r}, {OWN!r}, or left out.")
    for rank, source in enumerate(sources):
        for count, index in source.shards:
            if not 0 <= index < count:
                raise BatchError(
                    f"the loader of rank {rank} reads shard {index} of {count}, which does not exist. Shard it either "
                    "over the replicas or over all ranks before it is wrapped."
                )
    replicas = defaultdict(list)
    for source in sources:
        replicas[source.replica].append(source)
    mode, why = (asked[0], "it was asked for") if asked[0] else _verdict_of_all(list(replicas.values()))
    sizes = [len(replica) for replica in replicas.values()]
    if mode == OWN and len(set(sizes)) > 1:
        raise BatchError(
            f'replicas of {sizes} ranks would take different numbers of steps with batches="own". '
            "Give all ranks of a replica the same batch: a sampler over the replicas, not over the ranks."
        )
    return mode, why


def expect_unsharded(sources: Sequence[Source], dealing: bool) -> None:
    """Check the loaders of replicas that take different batches.

    Args:
        sources: of all ranks of the world.
        dealing: whether samples are to be dealt to the replicas, out of those of the whole job.

    Raises:
        BatchError: a loader is sharded already, or is to have other batches on each rank; equal on every rank.
    """
    if any(source.asked == OWN for source in sources):
        raise BatchError('batches="own" cannot be used where the replicas take different batches; leave it out.')
    sharded = {rank: source.shards for rank, source in enumerate(sources) if source.shards}
    if dealing and sharded:
        listed = "; ".join(f"rank {rank}: {_show(shards)}" for rank, shards in sharded.items())
        raise BatchError(
            f"the samples are dealt to replicas that take different batches, but loaders are sharded ({listed}). "
            "Give every rank the same loader of all samples, without a DistributedSampler."
        )


def _verdict_of_all(replicas: Sequence[Sequence[Source]]) -> tuple[str | None, str]:
    verdicts = [_verdict(replica) for replica in replicas if len(replica) > 1] or [(SAME, "every replica is one rank")]
    if len({mode for mode, _ in verdicts}) > 1:
        raise BatchError(f"the loaders of the replicas differ: {verdicts}. {_REMEDY}")
    return verdicts[0]


def _verdict(sources: Sequence[Source]) -> tuple[str | None, str]:
    """Mode of one replica from the sources of its ranks; None if they do not say."""
    shards = [source.shards for source in sources]
    if any(shards):
        if len(set(shards)) == 1:
            return SAME, f"all ranks of a replica read the same shard, {_show(shards[0])}"
        if all(shards) and len(set(shards)) == len(shards):
            return OWN, f"the ranks of a replica read different shards, {', '.join(map(_show, shards))}"
        raise BatchError(f"some ranks of a replica read the same shard: {', '.join(map(_show, shards))}. {_REMEDY}")
    if all(source.unsharded for source in sources):
        return SAME, "accelerate left the batches of a single replica whole"
    firsts = [source.first for source in sources]
    if None in firsts:
        return None, "the loader does not show whether it shards"
    held = [first for first in firsts if first]
    if len(set(firsts)) == 1:
        return SAME, "the first batches are equal"
    if len(set(held)) == len(held):
        return OWN, "the first batches differ"
    raise BatchError(f"some ranks of a replica hold the same first batch: checksums by rank are {firsts}. {_REMEDY}")


def _show(shards: Sequence[tuple[int, int]]) -> str:
    return " of ".join(f"{index} of {count}" for count, index in shards) or "none"


def _parts(root: Any) -> Iterator[Any]:
    """``root`` and all that it wraps, each once."""
    seen: set[int] = set()
    todo = [root]
    while todo:
        part = todo.pop()
        if id(part) in seen:
            continue
        seen.add(id(part))
        yield part
        todo += [inner for name in _WRAPPED if (inner := getattr(part, name, None)) is not None]
