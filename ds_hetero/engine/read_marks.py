"""Mark a framework's loader with whether its batches become shards, or stay whole on a replica's ranks.

accelerate reads the mark, since it gathers results of shards in another way than those of whole batches.
"""

from __future__ import annotations

import contextlib

_READS_SHARDS = "ds_hetero_reads_shards"  # attribute of a framework's loader


def note_reading(dataloader: object, *, shards: bool) -> None:
    """Note whether batches that are read from a framework's loader now become shards."""
    with contextlib.suppress(AttributeError):  # lists and generators take no attribute, and no framework reads it
        setattr(dataloader, _READS_SHARDS, shards)


def reads_shards(dataloader: object) -> bool | None:
    """Return what `note_reading` noted last; None for a loader that no loader of ours reads."""
    shards: bool | None = getattr(dataloader, _READS_SHARDS, None)
    return shards
