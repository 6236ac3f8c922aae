"""Fuse gradient chunks into buckets: chunks with the same contributors and dtypes travel in one message.

Example: with ``bucket_bytes=8`` and fp32, chunks of 1, 1 and 3 elements that ranks 0 and 2 contribute become two
buckets: the first two chunks, which have 8 bytes, and the third one.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import NamedTuple

from ds_hetero.sharding.gradient_chunks import Chunk


@dataclass(frozen=True, slots=True)
class Bucket:
    """Chunks that travel together, in this order."""

    contributors: tuple[int, ...]  # ranks that send gradients to the owners; in a gather, ranks that receive values
    members: tuple[int, ...]  # ranks of the communicator, ascending: the contributors, and all owners of their chunks
    dtypes: Hashable  # of the elements in messages and at their owner; the same for all chunks
    chunks: tuple[Chunk, ...]  # in the order of their parameters

    def owned(self, rank: int) -> tuple[Chunk, ...]:
        """Return the chunks that ``rank`` owns, in the order in which they travel."""
        return tuple(chunk for chunk in self.chunks if chunk.owner == rank)

    def owned_sizes(self) -> tuple[int, ...]:
        """Return the number of elements that each member owns, in the order of ``members``."""
        sizes = dict.fromkeys(self.members, 0)
        for chunk in self.chunks:
            sizes[chunk.owner] += chunk.size
        return tuple(sizes.values())

    def pairs(self) -> set[tuple[int, int]]:
        """Return the pairs ``(contributor, owner)`` of different ranks that exchange elements."""
        owners = {chunk.owner for chunk in self.chunks if chunk.size}
        return {(contributor, owner) for contributor in self.contributors for owner in owners if contributor != owner}

    def reduce_sizes(self, rank: int) -> tuple[list[int], list[int]]:
        """Return the elements that ``rank`` sends to, and receives from, each member when gradients go to their owners.

        When the owners send values back, the two lists change places.
        """
        sizes = self.owned_sizes()
        owned = sizes[self.members.index(rank)]
        sent = [size if rank in self.contributors else 0 for size in sizes]
        received = [owned if member in self.contributors else 0 for member in self.members]
        return sent, received


class _BucketKey(NamedTuple):
    """Properties that all chunks of a bucket have in common."""

    contributors: tuple[int, ...]
    dtypes: Hashable


@dataclass(slots=True)
class _OpenBucket:
    """A bucket that still takes chunks."""

    chunks: list[Chunk] = field(default_factory=list)
    num_bytes: int = 0
    last_parameter: int = 0  # position of the parameter whose chunk came last


def fuse(
    chunks: Sequence[Chunk],
    contributors: Callable[[Chunk], tuple[int, ...]],
    dtypes: Mapping[str, Hashable],
    item_bytes: Mapping[str, int],
    bucket_bytes: int,
) -> tuple[Bucket, ...]:
    """Fuse chunks with the same contributors and dtypes into buckets, in the order in which they become complete.

    Args:
        chunks: all chunks, parameter after parameter, in the order in which the backward makes the gradients.
        contributors: returns the contributors of a chunk; for buckets that gather values, the chunk's holders.
        dtypes: dtypes of a bucket's elements, by name of the parameter; chunks of different dtypes do not mix.
        item_bytes: bytes of an element, by name of the parameter.
        bucket_bytes: a bucket is closed after the parameter with which it reaches this size.
    """
    members: dict[tuple[int, ...], set[int]] = {}
    for chunk in chunks:
        members.setdefault(contributors(chunk), set(contributors(chunk))).add(chunk.owner)
    open_buckets: dict[_BucketKey, _OpenBucket] = {}
    closed: list[tuple[int, Bucket]] = []  # with the position of the parameter that completes the bucket

    def close(key: _BucketKey) -> None:
        """Make a bucket of the chunks with this key."""
        contents = open_buckets.pop(key)
        ranks = tuple(sorted(members[key.contributors]))
        bucket = Bucket(key.contributors, ranks, key.dtypes, tuple(contents.chunks))
        closed.append((contents.last_parameter, bucket))

    for position, (name, chunks_of_parameter) in enumerate(groupby(chunks, lambda chunk: chunk.name)):
        for chunk in chunks_of_parameter:
            contents = open_buckets.setdefault(_BucketKey(contributors(chunk), dtypes[name]), _OpenBucket())
            contents.chunks.append(chunk)
            contents.num_bytes += chunk.size * item_bytes[name]
            contents.last_parameter = position
        # Only after all chunks of the parameter: they become complete together.
        for key in [key for key, contents in open_buckets.items() if contents.num_bytes >= bucket_bytes]:
            close(key)
    for key in list(open_buckets):
        close(key)
    return tuple(bucket for _, bucket in sorted(closed, key=lambda pair: pair[0]))
