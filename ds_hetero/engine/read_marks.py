"""Marks on a framework's loader that say whether its batches become shards, or stay whole on a replica's ranks."""

from __future__ import annotations

import contextlib

_READS_SHARDS = "ds_hetero_reads_shards"  # attribute of the loader of a framework that one of ours reads


def note_reading(dataloader: object, *, shards: bool) -> None:
    """Note whether what is read from a framework's loader now becomes shards, or stays whole on a replica's ranks."""
    with contextlib.suppress(AttributeError):  # of lists and generators, which no framework counts
        setattr(dataloader, _READS_SHARDS, shards)


def reads_shards(dataloader: object) -> bool | None:
    """Value that `note_reading` noted last; None for a loader that none of ours reads."""
    shards: bool | None = getattr(dataloader, _READS_SHARDS, None)
    return shards
