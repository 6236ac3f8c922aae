"""Buckets that gradient chunks travel in: chunks with the same ranks and dtypes, in the order of the backward."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

from ds_hetero.sharding.gradient_chunks import Chunk


@dataclass(frozen=True, slots=True)
class Bucket:
    """Chunks that travel together, in this order."""

    contributors: tuple[int, ...]  # ranks that contribute to the sums; on the way back, those that hold the values
    members: tuple[int, ...]  # contributors and owners, ascending: the communicator; alike for alike contributors
    dtypes: Hashable  # what the elements are while they travel and while they are kept, the same for all chunks
    chunks: tuple[Chunk, ...]  # in the order of their parameters

    def owned(self, rank: int) -> tuple[Chunk, ...]:
        """Chunks that go to, or come from, ``rank`` as an owner, in the order in which they travel."""
        return tuple(chunk for chunk in self.chunks if chunk.owner == rank)

    def owned_sizes(self) -> tuple[int, ...]:
        """Return elements that each member owns."""
        sizes = dict.fromkeys(self.members, 0)
        for chunk in self.chunks:
            sizes[chunk.owner] += chunk.size
        return tuple(sizes.values())

    def pairs(self) -> set[tuple[int, int]]:
        """Contributors and the owners that they send elements to; on the way back owners are the senders."""
        owners = {chunk.owner for chunk in self.chunks if chunk.size}
        return {(contributor, owner) for contributor in self.contributors for owner in owners if contributor != owner}

    def reduce_sizes(self, rank: int) -> tuple[list[int], list[int]]:
        """Elements that ``rank`` sends and receives, by rank, on the way to the owners; reversed on the way back."""
        sizes = self.owned_sizes()
        owned = sizes[self.members.index(rank)]
        sent = [size if rank in self.contributors else 0 for size in sizes]
        return sent, [owned if member in self.contributors else 0 for member in self.members]


def fuse(
    chunks: Sequence[Chunk],
    contributors: Callable[[Chunk], tuple[int, ...]],
    dtypes: Mapping[str, Hashable],
    item_bytes: Mapping[str, int],
    bucket_bytes: int,
) -> tuple[Bucket, ...]:
    """Fuse chunks with the same contributors and dtypes into buckets, in the order in which they become complete.

    Args:
        chunks: in the order in which their gradients come.
        contributors: contributors of a chunk; for the way back, its holders.
        dtypes: of a bucket's elements, by name of the parameter; chunks of different dtypes do not mix.
        item_bytes: of an element, by name of the parameter.
        bucket_bytes: a bucket is closed after the parameter with which it has so many.
    """
    members: dict[tuple[int, ...], set[int]] = {}
    for chunk in chunks:
        members.setdefault(contributors(chunk), set(contributors(chunk))).add(chunk.owner)
    buckets: list[tuple[int, Bucket]] = []
    filling: dict[tuple[tuple[int, ...], Hashable], list[Chunk]] = {}
    filled_bytes: dict[tuple[tuple[int, ...], Hashable], int] = {}
    last: dict[tuple[tuple[int, ...], Hashable], int] = {}

    def close(key: tuple[tuple[int, ...], Hashable]) -> None:
        ranks, bucket_dtypes = key
        buckets.append(
            (last[key], Bucket(ranks, tuple(sorted(members[ranks])), bucket_dtypes, tuple(filling.pop(key))))
        )
        del filled_bytes[key]

    for position, (name, of_parameter) in enumerate(groupby(chunks, lambda chunk: chunk.name)):
        for chunk in of_parameter:
            key = contributors(chunk), dtypes[name]
            filling.setdefault(key, []).append(chunk)
            filled_bytes[key] = filled_bytes.get(key, 0) + chunk.size * item_bytes[name]
            last[key] = position
        for key in [key for key in filling if filled_bytes[key] >= bucket_bytes]:
            close(key)
    for key in list(filling):
        close(key)
    return tuple(bucket for _, bucket in sorted(buckets, key=lambda pair: pair[0]))
