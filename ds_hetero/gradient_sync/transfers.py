"""A bucket as one rank sees it: where its elements lie in this rank's tensors, and the all-to-all that carries them.

The same flat buffer serves both directions: chunks in the order of their owners, so that what goes to one owner, or
comes from it, is one contiguous piece.

Moves from one layout to another: parameters and optimizer state travel from old owners to new ones.

Which elements of a parameter a rank owns is a list of boxes; its values are a flat tensor, box after box. Old owners
and new owners cut a parameter differently, and every element travels from the one to the other, or stays: no element is
computed with, so it has the bits that it had.

Checks that the ranks of an asymmetric gradient synchronization make together, before anything depends on them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import prod
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor, placement_types
from torch.profiler import record_function

from ds_hetero.errors import SyncError
from ds_hetero.runtime.collectives import on_all_ranks
from ds_hetero.runtime.peers.watch import waiting_for_peers
from ds_hetero.sharding.gradient_chunks import Box, Bucket, Chunk, Cut, ParameterLayout, box_size, overlaps


class BucketDtypes(NamedTuple):
    """Dtypes of the elements of a bucket."""

    wire: torch.dtype  # while they travel
    kept: torch.dtype  # what their owner keeps and adds them up in


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


def held_box(tensor: Tensor) -> Box:
    """This rank's part of a parameter: all of it, or its shard of a DTensor, which is cut as torch.chunk does."""
    box = [(0, size) for size in tensor.shape]
    if isinstance(tensor, DTensor) and isinstance(placement := tensor.placements[0], placement_types.Shard):
        size, mesh = tensor.shape[placement.dim], tensor.device_mesh
        step = -(-size // mesh.size())
        start = min(step * mesh.get_local_rank(), size)
        box[placement.dim] = start, min(start + step, size)
    return tuple(box)


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
        """Send the owners what was packed; on every rank. Collectives: one all_to_all_single, not waited for."""
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

    def start_gather(self, values: Sequence[Tensor]) -> None:
        """Send the owned chunks to everybody who holds them. Collectives: one all_to_all_single, not waited for."""
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


Owned = Sequence[Sequence[Box]]
"""Boxes of one parameter, by the rank that owns them."""


def move_owned(values: Mapping[str, Tensor], old: Owned, new: Owned, like: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Give this rank what it owns of one parameter from now on; return its values, flat.

    Args:
        values: of what this rank owned, flat, by what they are: the parameter itself, moments of its optimizer.
        like: an empty tensor of the dtype and on the device of each of ``values``; the same names in the same order on
            every rank.

    Caller: every rank of the world, for the same parameters in the same order.
    Collectives: messages between old and new owners.
    """
    rank = dist.get_rank()
    size = sum(map(box_size, new[rank]))
    moved = {name: empty.new_empty(size) for name, empty in like.items()}
    receives: list[tuple[Tensor, list[Box], Tensor]] = []  # target, parts of it, message
    ops = []
    for other in range(len(old)):
        pieces = list(overlaps(old[other], new[rank]))
        if not pieces:
            continue
        for name, target in moved.items():
            message = target.new_empty(sum(map(box_size, pieces)))
            receives.append((target, pieces, message))
            if other != rank:
                ops.append(dist.P2POp(dist.irecv, message, other))
            else:
                message.copy_(_taken(values[name], old[rank], pieces))
    for other in range(len(new)):
        pieces = list(overlaps(old[rank], new[other]))
        if pieces and other != rank:
            ops += [dist.P2POp(dist.isend, _taken(values[name], old[rank], pieces), other) for name in moved]
    with waiting_for_peers("moving layers between stages"):
        for work in dist.batch_isend_irecv(ops) if ops else ():
            work.wait()
    for target, pieces, message in receives:
        for part, piece in zip(pieces, message.split_with_sizes(list(map(box_size, pieces))), strict=True):
            view = _view(target, new[rank], part)
            view.copy_(piece.view(view.shape))
    return moved


def _taken(values: Tensor, boxes: Sequence[Box], pieces: Sequence[Box]) -> Tensor:
    return torch.cat([_view(values, boxes, part).reshape(-1) for part in pieces])


def _view(values: Tensor, boxes: Sequence[Box], part: Box) -> Tensor:
    """The elements of ``part`` among the flat values of ``boxes``, one of which contains it."""
    offset = 0
    for box in boxes:
        size = box_size(box)
        if all(start <= a and b <= stop for (start, stop), (a, b) in zip(box, part, strict=True)):
            shaped = values[offset : offset + size].view([stop - start for start, stop in box])
            slices = tuple(slice(a - start, b - start) for (start, _), (a, b) in zip(box, part, strict=True))
            return shaped[slices]
        offset += size
    raise AssertionError("a part lies in one of the boxes that it was cut from")


def replicas_of(layouts: Mapping[str, ParameterLayout]) -> tuple[tuple[int, ...], ...]:
    """Ranks of every replica, ascending. Raises `SyncError`: layouts do not tell, or a rank is in two."""
    counts = {len(layout.cuts) for layout in layouts.values()}
    if len(counts) != 1:
        raise SyncError(f"layouts have one cut for every replica, the same number in each; got {sorted(counts)}.")
    replica_of: dict[int, int] = {}
    for name, layout in layouts.items():
        for replica, cut in enumerate(layout.cuts):
            for rank in cut.ranks:
                if replica_of.setdefault(rank, replica) != replica:
                    raise SyncError(
                        f"rank {rank} is in replica {replica_of[rank]}, but the layout of {name} has it in {replica}."
                    )
    return tuple(tuple(sorted(r for r in replica_of if replica_of[r] == replica)) for replica in range(counts.pop()))


def agree(
    parameters: Mapping[str, nn.Parameter],
    shards: Mapping[str, Shard],
    layouts: Mapping[str, ParameterLayout],
    settings: object,
    group: ProcessGroup,
    *,
    has_replicas: bool = False,
) -> dict[str, torch.dtype]:
    """The dtype of every parameter, by name, once ranks have compared what must be the same. Raises `SyncError`.

    Args:
        settings: whatever else must be the same, compared by its ``repr``.
        has_replicas: the replicas are given, so that layouts need not have one cut for each.

    Caller: every rank of ``group``.
    Collectives: one `on_all_ranks`.
    """
    arguments = repr((list(layouts.items()), settings))
    fingerprint = hashlib.sha256(arguments.encode()).hexdigest()[:8]

    def examine() -> tuple[str, dict[str, torch.dtype]]:
        if not has_replicas:
            replicas_of(layouts)
        _expect_valid(parameters, shards, layouts, dist.get_rank(), dist.get_world_size(group))
        return fingerprint, {name: parameters[name].dtype for name in shards}

    by_rank = on_all_ranks(examine, group)
    fingerprints = [fingerprint for fingerprint, _ in by_rank]
    if len(set(fingerprints)) > 1:
        raise SyncError(
            "layouts, their order or other arguments of AsymmetricGradientSync differ between ranks: fingerprints by "
            f"rank are {fingerprints}. Make them from the same data on every rank."
        )
    dtypes: dict[str, torch.dtype] = {}
    for rank, (_, dtypes_of_rank) in enumerate(by_rank):
        for name, dtype in dtypes_of_rank.items():
            if dtypes.setdefault(name, dtype) != dtype:
                raise SyncError(f"{name} is {dtype} on rank {rank}, but {dtypes[name]} on a rank before it.")
    return dtypes


def _expect_valid(
    parameters: Mapping[str, nn.Parameter],
    shards: Mapping[str, Shard],
    layouts: Mapping[str, ParameterLayout],
    rank: int,
    world_size: int,
) -> None:
    """Refuse layouts that contradict each other or this rank's parameters. Raises `SyncError`."""
    for name, layout in layouts.items():
        owners = [] if layout.owners is None else [layout.owners]
        outside = [r for cut in (*layout.cuts, *owners) for r in cut.ranks if not 0 <= r < world_size]
        if outside:
            raise SyncError(f"the layout of {name} has ranks {outside}, but the job has ranks 0 to {world_size - 1}.")
    for name, shard in shards.items():
        by_layout = f"by its layout rank {rank} holds {list(shard.shape)} of {name}, but "
        if name not in parameters:
            raise SyncError(f"{by_layout}it was given no such parameter.")
        held = local_tensor(parameters[name])
        if tuple(held.shape) != shard.shape:
            raise SyncError(f"{by_layout}its parameter is {list(held.shape)}.")
        if not parameters[name].requires_grad:
            raise SyncError(f"{name} takes no gradient on rank {rank}. Leave frozen parameters out of the layouts.")
        if shard.is_flat and not held.is_contiguous():
            raise SyncError(f"{by_layout}these elements do not lie end to end.")


def token_weights(by_rank: Sequence[int], replicas: Sequence[Sequence[int]]) -> dict[int, float]:
    """Each rank's share of all tokens, given those of its replica; zero for everybody if there are none.

    Raises:
        SyncError: ranks of one replica were given different tokens, or fewer than none.
    """
    for replica, ranks in enumerate(replicas):
        tokens = {rank: by_rank[rank] for rank in ranks}
        if len(set(tokens.values())) > 1 or min(tokens.values(), default=0) < 0:
            raise SyncError(
                f"ranks of replica {replica} started a step with tokens {tokens} by rank. Give each the tokens of the "
                "whole replica."
            )
    total = max(sum(by_rank[ranks[0]] for ranks in replicas if ranks), 1)
    return {rank: by_rank[rank] / total for ranks in replicas for rank in ranks}
