"""Decide, once per loader and on all ranks together, whether the ranks of a replica read the same batches.

    shared    all ranks of a replica read the same batch, which is one step
    own       each rank reads another batch (a DistributedSampler over the world); each batch in turn is one step
    divided   replicas take different batches; the schedule file says so, and nothing is decided here

A sampler that shards by rank shows the mode: ``(number of shards, index)`` is the same on all ranks of a replica
(shared), or different on each (own). Where no loader has such a sampler, checksums of the first batches are compared.
"""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ds_hetero.errors import BatchError
from ds_hetero.runtime.data.loader_names import LoaderNames

SHARED, OWN, DIVIDED = "same", "own", "dealt"  # modes, as users and saved states write them

_REMEDY = (
    'Pass the mode to handle.dataloader(loader, batches=...): "same" if the ranks of a replica get the same batch, '
    '"own" if each rank gets another one. For a Trainer, give its loader a sampler with the attributes num_replicas '
    "and rank, as DistributedSampler has them."
)


@dataclass(frozen=True, kw_only=True)
class LoaderReport:
    """Description of one rank's loader, which all ranks exchange."""

    replica: int  # id of the rank's replica
    requested: str | None  # the mode that the user requested, if any
    shards: tuple[tuple[int, int], ...]  # ``(number of shards, index)`` of everything in the loader that shards by rank
    unsharded_by: str | None = None  # the framework that would shard, and found that this replica needs none
    length: int | None = None  # batches of an epoch on this rank; None where the loader does not know
    first: str | None = None  # checksum of the first batch, "" without one; None before it is looked at


_modes_of_loaders: weakref.WeakKeyDictionary[Any, str] = weakref.WeakKeyDictionary()


def note_mode(dataloader: Any, mode: str) -> None:
    """Remember the mode of a loader on which all ranks have agreed already. Call it on every rank."""
    _modes_of_loaders[dataloader] = mode


def describe_loader(dataloader: Any, names: LoaderNames, replica: int, requested: str | None = None) -> LoaderReport:
    """Describe ``dataloader`` by its attributes and length, without reading a batch."""
    shards = names.shards_of(dataloader)
    map_style = hasattr(getattr(dataloader, "dataset", None), "__getitem__")
    try:
        length = len(dataloader)
    except TypeError:
        length = None
    return LoaderReport(
        replica=replica,
        requested=requested or _noted_mode(dataloader),
        shards=shards,
        unsharded_by=names.always_shards(dataloader) if map_style and not shards else None,
        length=length,
    )


def _noted_mode(dataloader: Any) -> str | None:
    """Return the mode that `note_mode` has stored for a loader; None if it has stored none."""
    try:
        return _modes_of_loaders.get(dataloader)
    except TypeError:  # such as a list of batches, which cannot be a key of a weak dictionary
        return None


def decide_batch_mode(reports: Sequence[LoaderReport]) -> tuple[str | None, str]:
    """Return the mode of the whole job, and the reason for it, from the reports of all ranks of the world.

    The mode is None if the reports do not show it: then the first batches have to be compared.

    Raises:
        BatchError: the ranks contradict each other, or the mode cannot work; the same error on every rank.
    """
    requested = [report.requested for report in reports]
    if len(set(requested)) > 1:
        raise BatchError(f"the argument batches must be the same on every rank; by rank it is {requested}.")
    if requested[0] not in (None, SHARED, OWN):
        raise BatchError(f"batches is {requested[0]!r}; it must be {SHARED!r} or {OWN!r}, or be left out.")
    for rank, report in enumerate(reports):
        for count, index in report.shards:
            if not 0 <= index < count:
                raise BatchError(
                    f"the loader of rank {rank} reads shard {index} of {count}, which does not exist. Shard it either "
                    "over the replicas or over all ranks before it is wrapped."
                )
    replicas = defaultdict(list)
    for report in reports:
        replicas[report.replica].append(report)
    mode, why = (requested[0], "as requested") if requested[0] else _mode_of_job(list(replicas.values()))
    sizes = [len(replica) for replica in replicas.values()]
    if mode == OWN and len(set(sizes)) > 1:
        raise BatchError(
            f'replicas of {sizes} ranks would take different numbers of steps with batches="own". '
            "Give all ranks of a replica the same batch: a sampler over the replicas, not over the ranks."
        )
    return mode, why


def expect_unsharded(reports: Sequence[LoaderReport], divides_samples: bool) -> None:
    """Refuse sharded loaders where the replicas take different batches.

    Args:
        divides_samples: whether the loader has the samples of the whole job, to be divided among the replicas.

    Raises:
        BatchError: on every rank: a loader is sharded already, or the user requested ``batches="own"``.
    """
    if any(report.requested == OWN for report in reports):
        raise BatchError('batches="own" cannot be used where the replicas take different batches; leave it out.')
    sharded = {rank: report.shards for rank, report in enumerate(reports) if report.shards}
    if divides_samples and sharded:
        listed = "; ".join(f"rank {rank}: {_show(shards)}" for rank, shards in sharded.items())
        raise BatchError(
            f"the samples are divided among replicas that take different batches, but loaders are sharded ({listed}). "
            "Give every rank the same loader of all samples, without a DistributedSampler."
        )


def _mode_of_job(replicas: Sequence[Sequence[LoaderReport]]) -> tuple[str | None, str]:
    """Return the mode that all replicas of several ranks have, and the reason. Raises `BatchError`: they differ."""
    modes = [_mode_of_replica(replica) for replica in replicas if len(replica) > 1]
    if not modes:
        return SHARED, "every replica is one rank"
    if len({mode for mode, _ in modes}) > 1:
        raise BatchError(f"the loaders of the replicas differ: {modes}. {_REMEDY}")
    return modes[0]


def _mode_of_replica(reports: Sequence[LoaderReport]) -> tuple[str | None, str]:
    """Return the mode of one replica, and the reason, from its ranks' reports; mode None if they do not show it."""
    shards = [report.shards for report in reports]
    if any(shards):
        if len(set(shards)) == 1:
            return SHARED, f"all ranks of a replica read the same shard, {_show(shards[0])}"
        if all(shards) and len(set(shards)) == len(shards):
            return OWN, f"the ranks of a replica read different shards, {', '.join(map(_show, shards))}"
        raise BatchError(f"some ranks of a replica read the same shard: {', '.join(map(_show, shards))}. {_REMEDY}")
    if all(report.unsharded_by for report in reports):
        return SHARED, f"{reports[0].unsharded_by} left the batches of a single replica whole"
    firsts = [report.first for report in reports]
    if None in firsts:
        return None, "the loader does not show whether it shards"
    checksums = [first for first in firsts if first]  # a loader without a batch has ""
    if len(set(firsts)) == 1:
        return SHARED, "the first batches are equal"
    if len(set(checksums)) == len(checksums):
        return OWN, "the first batches differ"
    raise BatchError(f"some ranks of a replica hold the same first batch: checksums by rank are {firsts}. {_REMEDY}")


def _show(shards: Sequence[tuple[int, int]]) -> str:
    """Return shards for a message, such as "0 of 2"."""
    return " of ".join(f"{index} of {count}" for count, index in shards) or "none"
