"""Transfer of a bucket: where its elements lie in this rank's tensors, and the all-to-all that carries them.

The same flat buffer serves both directions: chunks in the order of their owners, so that the elements of one owner are
one contiguous piece.

    buffer     | chunks of owner 0 | chunks of owner 2 | ...       of a rank that contributes, and holds
    reduce     every contributor -> every owner        its piece   [sources, owned elements] arrive
    gather     every owner -> every contributor        all it owns

    state      reduce                                  gather
    empty      pack, until is_full                     start_gather -> under way
    full       start_reduce -> under way
    under way  reduced: waits -> empty                 gathered: waits -> empty
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.profiler import record_function

from ds_hetero.gradient_sync.shards import Shard
from ds_hetero.runtime.peers.watch import waiting_for_peers
from ds_hetero.sharding.buckets import Bucket
from ds_hetero.sharding.gradient_chunks import Box, Chunk, box_size


class BucketDtypes(NamedTuple):
    """Dtypes of the elements of a bucket."""

    wire: torch.dtype  # while they travel
    kept: torch.dtype  # what their owner keeps and adds them up in


class BucketTransfer:
    """The transfer of one bucket, in either direction, as one of its members takes part in it.

    Args:
        group: process group of its members; None where this rank is the only one.

    Attributes:
        pieces: by name of the parameter, the chunks that this rank contributes or holds and their offsets in the
            bucket.
    """

    def __init__(self, bucket: Bucket, group: ProcessGroup | None, rank: int, device: torch.device) -> None:
        assert isinstance(bucket.dtypes, BucketDtypes)
        self.dtypes = bucket.dtypes
        self.sources = sorted(bucket.contributors)  # the bucket's contributors, ascending
        self.owned = bucket.owned(rank)  # chunks whose owner is this rank
        self.pieces = _pieces(bucket) if rank in bucket.contributors else {}
        self._members, self._group, self._device = bucket.members, group, device
        self._size = sum(bucket.owned_sizes())
        self._owned_size = sum(chunk.size for chunk in self.owned)
        self._to_owners, self._from_contributors = bucket.reduce_sizes(rank)
        self._missing = set(self.pieces)  # names whose gradients are not packed yet in this step
        self._send: Tensor | None = None
        self._received: Tensor | None = None
        self._work: dist.Work | None = None

    @property
    def is_full(self) -> bool:
        """Whether everything that this rank contributes has been packed."""
        return not self._missing

    def pack(self, name: str, tensor: Tensor | None, shard: Shard) -> None:
        """Copy this rank's gradient of a parameter into the bucket; None stands for zeros."""
        self._missing.remove(name)
        if self._send is None:
            self._send = self._empty(self._size)
        for chunk, offset in self.pieces[name]:
            packed = self._send[offset : offset + chunk.size]
            if tensor is None:
                packed.zero_()
                continue
            for box, part in _by_box(chunk, packed):
                part.copy_(shard.view(tensor, box))

    def start_reduce(self) -> None:
        """Send the packed gradients to their owners.

        Caller: every member of the bucket; one that contributes nothing sends nothing.
        Collectives: one all_to_all_single, not waited for.
        """
        send = self._empty(0) if self._send is None else self._send
        if self._group is None:
            self._received = send
            return
        received = self._empty(self._owned_size * len(self.sources))
        self._start("gradients to owners", send, self._to_owners, received, self._from_contributors)

    def reduced(self) -> Tensor:
        """Wait for what the sources sent, return it as ``[sources, owned elements]``, and empty the bucket."""
        received = self._finish()
        self._missing = set(self.pieces)
        return received.view(len(self.sources), self._owned_size)

    def start_gather(self, values: Sequence[Tensor]) -> None:
        """Send the owned chunks to every rank that holds them.

        Caller: every member of the bucket.
        Collectives: one all_to_all_single, not waited for.
        """
        payload = self._empty(self._owned_size)
        parts = payload.split_with_sizes([chunk.size for chunk in self.owned])
        for part, value in zip(parts, values, strict=True):
            part.copy_(value)
        if self._group is None:
            self._received = payload
            return
        received = self._empty(sum(self._to_owners))
        payload = payload.repeat(len(self.sources))  # one copy for each: every contributor holds all of it
        self._start("values to holders", payload, self._from_contributors, received, self._to_owners)

    def gathered(self) -> Iterator[tuple[str, Box, Tensor]]:
        """Name, box and values of all that this rank holds; waits for them, and empties the bucket."""
        received = self._finish()
        for name, pieces in self.pieces.items():
            for chunk, offset in pieces:
                for box, part in _by_box(chunk, received[offset : offset + chunk.size]):
                    yield name, box, part

    def has_arrived(self) -> bool:
        """Whether `reduced` or `gathered` would return without waiting."""
        return self._work is None or self._work.is_completed()

    def _start(self, what: str, send: Tensor, sent: list[int], received: Tensor, arriving: list[int]) -> None:
        # Kept until the collective has ended: it reads and writes them in the background.
        self._what, self._send, self._received = what, send, received
        with record_function(f"ds_hetero: {what}, {self._size} elements among {self._members}"):
            self._work = dist.all_to_all_single(received, send, arriving, sent, group=self._group, async_op=True)

    def _finish(self) -> Tensor:
        if self._work is not None:
            with waiting_for_peers(f"exchanging {self._what} with the other replicas"):
                self._work.wait()
        received = self._received
        assert received is not None
        self._work = self._send = self._received = None
        return received

    def _empty(self, size: int) -> Tensor:
        return torch.empty(size, dtype=self.dtypes.wire, device=self._device)


def _pieces(bucket: Bucket) -> dict[str, list[tuple[Chunk, int]]]:
    """Return all chunks of a bucket with their offsets in its buffer, owner after owner, by name of the parameter."""
    by_owner = [chunk for member in bucket.members for chunk in bucket.owned(member)]
    offsets = accumulate((chunk.size for chunk in by_owner), initial=0)  # one more than there are chunks
    pieces: dict[str, list[tuple[Chunk, int]]] = {}
    for chunk, offset in zip(by_owner, offsets, strict=False):
        pieces.setdefault(chunk.name, []).append((chunk, offset))
    return pieces


def _by_box(chunk: Chunk, flat: Tensor) -> Iterator[tuple[Box, Tensor]]:
    """Yield every box of a chunk with its elements out of the chunk's flat values."""
    parts = flat.split_with_sizes([box_size(box) for box in chunk.boxes])
    for box, part in zip(chunk.boxes, parts, strict=True):
        yield box, part.view([stop - start for start, stop in box])
