"""Where a loader keeps its parts, described by attribute names, since loaders have no common interface for it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import Any


@dataclass(frozen=True, kw_only=True, slots=True)
class LoaderNames:
    """Attribute and class names by which a framework's loaders, samplers and datasets are recognized.

    Args:
        wrapped: attributes that hold what an object wraps.
        shards: pairs of attributes (number of shards, index of the shard) of whatever shards by rank.
        always_sharding: classes of loaders that shard whenever there is more than one process to read for, each with
            the name of its framework.
        with_epoch: attributes of a loader that may want to know which epoch comes next.
        with_state: attributes that hold the loader whose state counts, if it has one.
        at_end: attributes of a loader that become true with the last batch of an epoch.
    """

    wrapped: tuple[str, ...] = ()
    shards: tuple[tuple[str, str], ...] = ()
    always_sharding: tuple[tuple[str, str], ...] = ()
    with_epoch: tuple[str, ...] = ()
    with_state: tuple[str, ...] = ()
    at_end: tuple[str, ...] = ()

    def __or__(self, other: LoaderNames) -> LoaderNames:
        """The names of both frameworks."""
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
    wrapped=("batch_sampler", "sampler", "dataset", "loader"),
    shards=(("num_replicas", "rank"),),  # DistributedSampler
    with_epoch=("batch_sampler", "sampler", "dataset"),
)
