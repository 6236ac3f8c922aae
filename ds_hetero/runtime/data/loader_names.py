"""Attribute and class names by which the parts of a loader are found, since loaders have no common interface for them.

Example: a ``DataLoader`` has its ``DistributedSampler`` in the attribute ``sampler``, which has the number of shards in
``num_replicas`` and the index of its shard in ``rank``.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import Any


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
    at_end: tuple[str, ...] = ()  # attributes of a loader that become True with the last batch of an epoch

    def __or__(self, other: LoaderNames) -> LoaderNames:
        """Return the names in this object and in ``other``, which belong to two frameworks."""
        names_of_both = {field.name: getattr(self, field.name) + getattr(other, field.name) for field in fields(self)}
        return LoaderNames(**{name: tuple(dict.fromkeys(names)) for name, names in names_of_both.items()})

    def parts(self, dataloader: Any) -> Iterator[Any]:
        """Yield ``dataloader`` and all objects that it wraps, each once."""
        seen: set[int] = set()
        todo = [dataloader]
        while todo:
            part = todo.pop()
            if id(part) in seen:
                continue
            seen.add(id(part))
            yield part
            todo += [wrapped_part for name in self.wrapped if (wrapped_part := getattr(part, name, None)) is not None]

    def shards_of(self, dataloader: Any) -> tuple[tuple[int, int], ...]:
        """Return (number of shards, index) of every part of ``dataloader`` that shards by rank, without repeats."""
        shards: dict[tuple[int, int], None] = {}
        for part in self.parts(dataloader):
            for count_name, index_name in self.shards:
                count, index = getattr(part, count_name, None), getattr(part, index_name, None)
                if isinstance(count, int) and isinstance(index, int):
                    shards[count, index] = None
        return tuple(shards)

    def always_shards(self, dataloader: Any) -> str | None:
        """Return the framework of a loader that shards whenever there are several processes to read for; else None."""
        frameworks = dict(self.always_sharding)
        for part in self.parts(dataloader):
            class_name = type(part).__name__
            if class_name in frameworks:
                return frameworks[class_name]
        return None

    def set_epoch(self, dataloader: Any, epoch: int) -> None:
        """Tell ``dataloader``, or else its sampler and dataset, which epoch comes next."""
        parts = [dataloader]
        if not hasattr(dataloader, "set_epoch"):
            parts = [getattr(dataloader, name, None) for name in self.with_epoch]
        for part in parts:
            if hasattr(part, "set_epoch"):
                part.set_epoch(epoch)

    def wraps_state(self, dataloader: Any) -> bool:
        """Whether the state that ``dataloader`` saves is only the state of another loader that it wraps."""
        return any(hasattr(dataloader, name) for name in self.with_state) and self.has_state(dataloader)

    def has_state(self, dataloader: Any) -> bool:
        """Whether ``dataloader`` can save its position in the epoch and be set to it."""
        for name in self.with_state:
            dataloader = getattr(dataloader, name, dataloader)
        return hasattr(dataloader, "state_dict") and hasattr(dataloader, "load_state_dict")


TORCH_LOADERS = LoaderNames(
    wrapped=("batch_sampler", "sampler", "dataset", "loader", "recorded"),
    shards=(("num_replicas", "rank"),),  # DistributedSampler
    with_epoch=("batch_sampler", "sampler", "dataset"),
)
