"""Move the chunks of a bucket between this rank's tensors and their owners, with one all-to-all per direction.

A contributor has one flat buffer for both directions. Its chunks are in the order of their owners, so that the elements
of one owner are contiguous:

    buffer     | chunks of owner 0 | chunks of owner 2 | ...

    direction  message                                                    arrives as
    reduce     contributor -> owner: the gradients of the owner's chunks  [contributors, owned elements] at the owner
    gather     owner -> contributor: the values of the owner's chunks     the buffer, at every contributor

    state      reduce                                  gather
    empty      pack, until is_full                     start_gather -> under way
    full       start_reduce -> under way
    under way  reduced: waits -> empty                 gathered: waits -> empty
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
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

    message: torch.dtype  # in messages
    owner: torch.dtype  # at their owner, which adds gradients up in this dtype


class BucketTransfer:
    """This rank's side of a bucket's transfers: packs, sends and receives gradients, or sends and receives values.

    Args:
        bucket: the bucket, of which this rank is a member.
        group: process group of the bucket's members; None if this rank is the only one.
        rank: this rank.
        device: of the messages.

    Attributes:
        sources: ranks that contribute to the bucket, ascending.
        owned: chunks whose owner is this rank.
        pieces: chunks that this rank contributes or holds, each with its offset in the buffer in elements, by name of
            the parameter.
    """

    def __init__(self, bucket: Bucket, group: ProcessGroup | None, rank: int, device: torch.device) -> None:
        assert isinstance(bucket.dtypes, BucketDtypes)
        self.dtypes = bucket.dtypes
        self.sources = sorted(bucket.contributors)
        self.owned = bucket.owned(rank)
        self.pieces = _pieces(bucket) if rank in bucket.contributors else {}
        self._members, self._group, self._device = bucket.members, group, device
        self._size = sum(bucket.owned_sizes())
        self._owned_size = sum(chunk.size for chunk in self.owned)
        self._to_owners, self._from_contributors = bucket.reduce_sizes(rank)
        self._missing = set(self.pieces)  # names of parameters whose gradients are not packed yet in this step
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
        """Wait for the gradients of all sources, return them as ``[sources, owned elements]``, and empty the bucket."""
        received = self._finish()
        self._missing = set(self.pieces)
        return received.view(len(self.sources), self._owned_size)

    def start_gather(self, values: Sequence[Tensor]) -> None:
        """Send the chunks that this rank owns to every rank that holds them.

        Args:
            values: the elements of each owned chunk, flat.

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
        payload = payload.repeat(len(self.sources))  # one copy for each contributor: each holds all of the bucket
        self._start("values to holders", payload, self._from_contributors, received, self._to_owners)

    def gathered(self) -> Iterator[tuple[str, Box, Tensor]]:
        """Wait for the values of all owners, empty the bucket, and yield name, box and values of each piece."""
        received = self._finish()
        for name, pieces in self.pieces.items():
            for chunk, offset in pieces:
                for box, part in _by_box(chunk, received[offset : offset + chunk.size]):
                    yield name, box, part

    def has_arrived(self) -> bool:
        """Whether `reduced` or `gathered` would return without waiting."""
        return self._work is None or self._work.is_completed()

    def _start(
        self, content: str, send: Tensor, send_sizes: list[int], received: Tensor, receive_sizes: list[int]
    ) -> None:
        """Start the all-to-all.

        Args:
            content: noun for traces and error messages, such as "gradients to owners".
            send_sizes: numbers of elements to each member.
            receive_sizes: numbers of elements from each member.
        """
        # References until the collective has ended, since it reads and writes the tensors in the background.
        self._send, self._received = send, received
        self._content = content
        with record_function(f"ds_hetero: {content}, {self._size} elements among {self._members}"):
            self._work = dist.all_to_all_single(
                received, send, receive_sizes, send_sizes, group=self._group, async_op=True
            )

    def _finish(self) -> Tensor:
        """Wait for the all-to-all, if there is one, and return the buffer that it filled."""
        if self._work is not None:
            with waiting_for_peers(f"exchanging {self._content} with the other replicas"):
                self._work.wait()
        received = self._received
        assert received is not None
        self._work = self._send = self._received = None
        return received

    def _empty(self, size: int) -> Tensor:
        return torch.empty(size, dtype=self.dtypes.message, device=self._device)


def _pieces(bucket: Bucket) -> dict[str, list[tuple[Chunk, int]]]:
    """Return every chunk of a bucket with its offset in the buffer, owner after owner, by name of the parameter."""
    pieces: dict[str, list[tuple[Chunk, int]]] = {}
    offset = 0
    for member in bucket.members:
        for chunk in bucket.owned(member):
            pieces.setdefault(chunk.name, []).append((chunk, offset))
            offset += chunk.size
    return pieces


def _by_box(chunk: Chunk, flat: Tensor) -> Iterator[tuple[Box, Tensor]]:
    """Yield every box of a chunk with a view of its elements in ``flat``, which has all boxes end to end."""
    parts = flat.split_with_sizes([box_size(box) for box in chunk.boxes])
    for box, part in zip(chunk.boxes, parts, strict=True):
        yield box, part.view([stop - start for start, stop in box])
