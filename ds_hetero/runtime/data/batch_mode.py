"""Do the ranks of a replica already hold the same batch, or each its own? Decided once, by all ranks together.

    shared    all ranks of a replica are given the same batch; it is one step
    own       each rank is given another batch (a DistributedSampler over the world); they are used in turn, one a step
    divided   replicas take different batches, as their schedule file says; decided there

A sampler that shards by rank says which it is: ``(number of shards, index)`` is the same on all ranks of a replica, or
different on each. Where no loader has such a sampler, checksums of the first batches are compared.

Where a loader keeps its parts, described by attribute names, since loaders have no common interface for it.
"""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from typing import Any

from ds_hetero.errors import BatchError

SHARED, OWN, DIVIDED = "same", "own", "dealt"  # as users and saved states write them

_REMEDY = (
    'Say which it is in handle.dataloader(loader, batches=...): "same" (all ranks of a replica get the same batch) '
    'or "own" (each another); a Trainer\'s loader has a sampler with num_replicas and rank, as DistributedSampler.'
)


class LoaderAround:
    """A loader around ``dataloader``, whose attributes it has where it has none of its own."""

    dataloader: Any

    def __len__(self) -> int:
        return len(self.dataloader)

    def __getattr__(self, name: str) -> Any:
        if name == "dataloader":  # looked up by copy before there is any attribute
            raise AttributeError(name)
        return getattr(self.dataloader, name)


@dataclass(frozen=True, kw_only=True)
class LoaderReport:
    """Report of one rank on its loader."""

    replica: int  # id of the rank's replica
    requested: str | None  # the mode that the user requested, if any
    shards: tuple[tuple[int, int], ...]  # ``(number of shards, index)`` of everything in the loader that shards by rank
    unsharded_by: str | None = None  # the framework that would shard, and found that this replica needs none
    length: int | None = None  # batches of an epoch on this rank; None where the loader does not know
    first: str | None = None  # checksum of the first batch, "" without one; None before it is looked at


_noted: weakref.WeakKeyDictionary[Any, str] = weakref.WeakKeyDictionary()


def note_mode(dataloader: Any, mode: str) -> None:
    """All ranks have found the mode of this loader already; on every rank."""
    _noted[dataloader] = mode


def describe_loader(dataloader: Any, names: LoaderNames, replica: int, requested: str | None = None) -> LoaderReport:
    """Describe ``dataloader`` without reading from it."""
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
    try:
        return _noted.get(dataloader)
    except TypeError:  # no object of its own that can be remembered, as a list of batches
        return None


def decide_batch_mode(reports: Sequence[LoaderReport]) -> tuple[str | None, str]:
    """The mode of the whole job and why, from the reports of all ranks of the world; mode None: compare first batches.

    Raises:
        BatchError: the ranks contradict each other, or the mode cannot work; equal on every rank.
    """
    requested = [report.requested for report in reports]
    if len(set(requested)) > 1:
        raise BatchError(f"batches must be the same on every rank, by rank it is {requested}.")
    if requested[0] not in (None, SHARED, OWN):
        raise BatchError(f"batches is {requested[0]!r}; it is one of {SHARED!r}, {OWN!r}, or left out.")
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
    mode, why = (requested[0], "as requested") if requested[0] else _verdict_of_all(list(replicas.values()))
    sizes = [len(replica) for replica in replicas.values()]
    if mode == OWN and len(set(sizes)) > 1:
        raise BatchError(
            f'replicas of {sizes} ranks would take different numbers of steps with batches="own". '
            "Give all ranks of a replica the same batch: a sampler over the replicas, not over the ranks."
        )
    return mode, why


def expect_unsharded(reports: Sequence[LoaderReport], divides_samples: bool) -> None:
    """Check loaders of unlike replicas. Raises `BatchError` on every rank: sharded already, or one for each rank.

    Args:
        divides_samples: whether the loader's samples are those of the whole job, to be divided among the replicas.
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


def _verdict_of_all(replicas: Sequence[Sequence[LoaderReport]]) -> tuple[str | None, str]:
    verdicts = [_verdict(replica) for replica in replicas if len(replica) > 1] or [
        (SHARED, "every replica is one rank")
    ]
    if len({mode for mode, _ in verdicts}) > 1:
        raise BatchError(f"the loaders of the replicas differ: {verdicts}. {_REMEDY}")
    return verdicts[0]


def _verdict(reports: Sequence[LoaderReport]) -> tuple[str | None, str]:
    """Mode of one replica from the reports of its ranks; None if they do not say."""
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
    held = [first for first in firsts if first]
    if len(set(firsts)) == 1:
        return SHARED, "the first batches are equal"
    if len(set(held)) == len(held):
        return OWN, "the first batches differ"
    raise BatchError(f"some ranks of a replica hold the same first batch: checksums by rank are {firsts}. {_REMEDY}")


def _show(shards: Sequence[tuple[int, int]]) -> str:
    return " of ".join(f"{index} of {count}" for count, index in shards) or "none"


@dataclass(frozen=True, kw_only=True, slots=True)
class LoaderNames:
    """Attribute and class names by which a framework's loaders, samplers and datasets are recognized.

    Args:
        always_sharding: classes of loaders that shard whenever there is more than one process to read for, each with
            the name of its framework.
    """

    wrapped: tuple[str, ...] = ()  # attributes that hold what an object wraps
    shards: tuple[tuple[str, str], ...] = ()  # attributes (number of shards, index) of whatever shards by rank
    always_sharding: tuple[tuple[str, str], ...] = ()
    with_epoch: tuple[str, ...] = ()  # attributes of a loader that may want to know which epoch comes next
    with_state: tuple[str, ...] = ()  # attributes that hold the loader whose state counts, if it has one
    at_end: tuple[str, ...] = ()  # attributes of a loader that become true with the last batch of an epoch

    def __or__(self, other: LoaderNames) -> LoaderNames:
        """Return the names of both frameworks."""
        both = {field.name: getattr(self, field.name) + getattr(other, field.name) for field in fields(self)}
        return LoaderNames(**{name: tuple(dict.fromkeys(names)) for name, names in both.items()})

    def parts(self, dataloader: Any) -> Iterator[Any]:
        """``dataloader`` and all that it wraps, each once."""
        seen: set[int] = set()
        todo = [dataloader]
        while todo:
            part = todo.pop()
            if id(part) in seen:
                continue
            seen.add(id(part))
            yield part
            todo += [inner for name in self.wrapped if (inner := getattr(part, name, None)) is not None]

    def shards_of(self, dataloader: Any) -> tuple[tuple[int, int], ...]:
        """(Number of shards, index) of everything in ``dataloader`` that shards by rank."""
        pairs = [
            (getattr(part, count, None), getattr(part, index, None))
            for part in self.parts(dataloader)
            for count, index in self.shards
        ]
        return tuple(
            dict.fromkeys((count, index) for count, index in pairs if isinstance(count, int) and isinstance(index, int))
        )

    def always_shards(self, dataloader: Any) -> str | None:
        """The framework whose loader shards whenever there is more than one process to read for, if this is one."""
        frameworks = dict(self.always_sharding)
        return next(
            (frameworks[n] for part in self.parts(dataloader) if (n := type(part).__name__) in frameworks), None
        )

    def set_epoch(self, dataloader: Any, epoch: int) -> None:
        """Tell ``dataloader``, or else its sampler and dataset, which epoch comes next."""
        parts = [dataloader]
        if not hasattr(dataloader, "set_epoch"):
            parts = [getattr(dataloader, name, None) for name in self.with_epoch]
        for part in parts:
            if hasattr(part, "set_epoch"):
                part.set_epoch(epoch)

    def wraps_state(self, dataloader: Any) -> bool:
        """Whether ``dataloader`` has a state, and it is that of another loader in it."""
        return any(hasattr(dataloader, name) for name in self.with_state) and self.has_state(dataloader)

    def has_state(self, dataloader: Any) -> bool:
        """Whether ``dataloader`` can say where it is in its epoch, and be set to it."""
        for name in self.with_state:
            dataloader = getattr(dataloader, name, dataloader)
        return hasattr(dataloader, "state_dict") and hasattr(dataloader, "load_state_dict")


TORCH_LOADERS = LoaderNames(
    wrapped=("batch_sampler", "sampler", "dataset", "loader", "noted"),
    shards=(("num_replicas", "rank"),),  # DistributedSampler
    with_epoch=("batch_sampler", "sampler", "dataset"),
)
