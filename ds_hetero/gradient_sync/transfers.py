"""A bucket as one rank sees it: where its elements lie in this rank's tensors, and the all-to-all that carries them.

The same flat buffer serves both directions: chunks in the order of their owners, so that what goes to one owner, or
comes from it, is one contiguous piece.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import prod
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor
from torch.profiler import record_function

from ds_hetero.runtime.peers.waiting import waiting_for_peers
from ds_hetero.sharding.gradient_chunks import Box, Bucket, Chunk, Cut, ParameterLayout, box_size


class BucketDtypes(NamedTuple):
    """Dtypes of the elements of a bucket.

    Args:
        wire: while they travel.
        kept: what their owner keeps and adds them up in.
    """

    wire: torch.dtype
    kept: torch.dtype


@dataclass(frozen=True, slots=True)
class Shard:
    """Part of a parameter on one rank: everything between ``start`` and ``stop`` along the dimension of its cut."""

    layout: ParameterLayout
    cut: Cut
    start: int
    stop: int

    @classmethod
    def of(cls, layout: ParameterLayout, rank: int) -> Shard | None:
        """The shard of ``rank``; None if it holds no element."""
        for cut in layout.cuts:
            extent = cut.part(rank)
            if extent is not None and extent[0] < extent[1] and 0 not in layout.shape:
                return cls(layout, cut, *extent)
        return None

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the rank's tensor: 1-D for a part of the flat elements."""
        shape, dim = self.layout.shape, self.cut.dim
        if dim is None:
            return shape if self.stop - self.start == prod(shape) else (self.stop - self.start,)
        return (*shape[:dim], self.stop - self.start, *shape[dim + 1 :])

    @property
    def is_flat(self) -> bool:
        """Whether the rank's tensor is a part of the flat elements and no dimension is left of the parameter's."""
        return self.cut.dim is None and self.shape != self.layout.shape

    def view(self, tensor: Tensor, box: Box) -> Tensor:
        """The elements of ``box``, which is given in the whole parameter, as a view of this rank's ``tensor``."""
        if not self.is_flat:
            offsets = [self.start if dim == self.cut.dim else 0 for dim in range(len(box))]
            return tensor[tuple(slice(a - offset, b - offset) for (a, b), offset in zip(box, offsets, strict=True))]
        strides = [prod(self.layout.shape[dim + 1 :]) for dim in range(len(box))]
        first = sum(a * stride for (a, _), stride in zip(box, strides, strict=True)) - self.start
        return tensor.as_strided([b - a for a, b in box], strides, tensor.storage_offset() + first)


def local_tensor(tensor: Tensor) -> Tensor:
    """This rank's shard of a parameter or gradient, be it a DTensor or not; without autograd."""
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach()


class BucketTransfer:
    """The transfer of one bucket, in either direction, as one of its members takes part in it.

    Args:
        bucket: the bucket; its ``dtypes`` are `BucketDtypes`.
        group: process group of its members; None where this rank is the only one.
        rank: this process's global rank.
        device: where the bucket's tensors are.

    Attributes:
        owned: chunks whose owner is this rank.
        pieces: by name of the parameter, the chunks that this rank contributes or holds and their offsets in the
            bucket.
        sources: the bucket's contributors, ascending.
    """

    def __init__(self, bucket: Bucket, group: ProcessGroup | None, rank: int, device: torch.device) -> None:
        assert isinstance(bucket.dtypes, BucketDtypes)
        self.dtypes = bucket.dtypes
        self.sources = sorted(bucket.contributors)
        self.owned = bucket.owned(rank)
        self.pieces: dict[str, list[tuple[Chunk, int]]] = {}
        if rank in bucket.contributors:
            by_owner = [chunk for member in bucket.members for chunk in bucket.owned(member)]
            for chunk, offset in zip(by_owner, accumulate((chunk.size for chunk in by_owner), initial=0), strict=False):
                self.pieces.setdefault(chunk.name, []).append((chunk, offset))
        self._members, self._group, self._device = bucket.members, group, device
        self._size = sum(bucket.owned_sizes())
        self._owned_size = sum(chunk.size for chunk in self.owned)
        self._to_owners, self._from_contributors = bucket.reduce_sizes(rank)
        self._missing = set(self.pieces)
        self._send: Tensor | None = None
        self._received: Tensor | None = None
        self._work: dist.Work | None = None

    # --- to the owners ------------------------------------------------------------------------------

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
            else:
                for box, part in _by_box(chunk, packed):
                    part.copy_(shard.view(tensor, box))

    def start_reduce(self) -> None:
        """Send the owners what was packed; every contributor does.

        Collectives: one all_to_all_single, not waited for.
        """
        send = self._empty(0) if self._send is None else self._send
        if self._group is None:
            self._received = send
            return
        received = self._empty(self._owned_size * len(self.sources))
        self._start("gradients to owners", send, self._to_owners, received, self._from_contributors)

    def reduced(self) -> Tensor:
        """``[sources, owned elements]`` of what the sources sent; waits for it, and empties the bucket."""
        received = self._finish()
        self._missing = set(self.pieces)
        return received.view(len(self.sources), self._owned_size)

    # --- to the holders -----------------------------------------------------------------------------

    def start_gather(self, values: Sequence[Tensor]) -> None:
        """Send the values of the owned chunks, in their order, to everybody who holds them.

        Collectives: one all_to_all_single, not waited for.
        """
        payload = self._empty(self._owned_size)
        for part, value in zip(payload.split_with_sizes([chunk.size for chunk in self.owned]), values, strict=True):
            part.copy_(value)
        if self._group is None:
            self._received = payload
            return
        received = self._empty(sum(self._to_owners))
        payload = payload.repeat(len(self.sources))
        self._start("values to holders", payload, self._from_contributors, received, self._to_owners)

    def gathered(self) -> Iterator[tuple[str, Box, Tensor]]:
        """Name, box and values of all that this rank holds; waits for them, and empties the bucket."""
        received = self._finish()
        for name, pieces in self.pieces.items():
            for chunk, offset in pieces:
                for box, part in _by_box(chunk, received[offset : offset + chunk.size]):
                    yield name, box, part

    # --- either way ---------------------------------------------------------------------------------

    def has_arrived(self) -> bool:
        """Whether to take what was started would not wait."""
        return self._work is None or self._work.is_completed()

    def _start(self, what: str, send: Tensor, sent: list[int], received: Tensor, arriving: list[int]) -> None:
        self._what, self._send, self._received = what, send, received  # kept until they have travelled
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


def _by_box(chunk: Chunk, flat: Tensor) -> Iterator[tuple[Box, Tensor]]:
    """Every box of a chunk with its elements out of the chunk's flat values."""
    parts = flat.split_with_sizes([box_size(box) for box in chunk.boxes])
    for box, part in zip(chunk.boxes, parts, strict=True):
        yield box, part.view([stop - start for start, stop in box])


def whole_parameter(tensor: Tensor) -> Tensor:
    """Return all of a parameter on the CPU; every rank of its mesh, if it has one, takes part."""
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().cpu()
