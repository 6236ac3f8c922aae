"""ZeRO-3 whose shards lie inside a node and are copied across nodes: ``"zero_within"``.

Parameters are gathered inside a node. Gradients are reduced to their owners there and accumulated; once a step they
cross. Where the cuts of nodes differ, owners trade the common pieces of their shards. Of every parameter each node adds
up one part of the gradients of all and sends the sum to the others, so that all copies get the same bits. Of N nodes
each sends 2 (N - 1) / N of the gradients: of two nodes the gradients once.

Sources: hybrid sharding, PyTorch FSDP (arXiv:2304.11277) section 3.2.2; MiCS (arXiv:2205.00119). Here nodes may have
different numbers of ranks, and ranks different weights.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from torch import Tensor
from torch.distributed import ProcessGroup

from ds_hetero.sharding.zero_partition import node_pieces

CHUNK_ELEMENTS = 1 << 26  # of parameters, per exchange: bounds the buffers on the device


@dataclass(frozen=True)
class Nodes:
    """Nodes of a job, each of which owns all parameters.

    Args:
        weights: of the ranks of every node, in rank order.
        node: of this rank.
        group: its ranks.
    """

    weights: tuple[tuple[float, ...], ...]
    node: int
    group: ProcessGroup

    @classmethod
    def of_job(cls, sizes: Sequence[int], weights: Sequence[float]) -> Nodes:
        """Make a process group of every node.

        Args:
            sizes: ranks of every node.
            weights: one per rank of the job.

        Caller: every rank of the job.
        Collectives: one new_group per node.
        """
        firsts = list(accumulate(sizes, initial=0))
        ranks = [range(first, first + size) for first, size in zip(firsts, sizes, strict=False)]
        groups = [dist.new_group(list(of_node)) for of_node in ranks]
        node = next(i for i, of_node in enumerate(ranks) if dist.get_rank() in of_node)
        return cls(tuple(tuple(weights[rank] for rank in of_node) for of_node in ranks), node, groups[node])

    @property
    def own_weights(self) -> tuple[float, ...]:
        """Of the ranks of this node."""
        return self.weights[self.node]

    def add_up(self, shards: Sequence[Tensor], sizes: Sequence[int]) -> None:
        """Replace gradients by their sums over all nodes, in place.

            shards   [s] each, this rank's of every parameter
            sizes    n of each

        Caller: every rank of the job, with gradients of the same parameters.
        Collectives: two all_to_all_single over all ranks for each of `chunks`; ranks of one node send each other
            nothing.
        """
        for chunk in chunks(sizes):
            self._add_up(shards[chunk], sizes[chunk])

    def _add_up(self, shards: Sequence[Tensor], sizes: Sequence[int]) -> None:
        """Send every piece to the rank that adds it up, then the sum to its owners."""
        rank, ranks = dist.get_rank(), range(dist.get_world_size())
        pieces = [piece for shard, size in zip(shards, sizes, strict=True) for piece in self._pieces(shard, size)]
        by_adder = [[piece.elements for piece in pieces if piece.adder == adder] for adder in ranks]
        own = [piece for piece in pieces if piece.adder == rank]
        parts = [piece.elements.new_empty(len(piece.owners), piece.elements.numel()) for piece in own]
        by_owner = [
            [part[piece.owners.index(owner)] for piece, part in zip(own, parts, strict=True) if owner in piece.owners]
            for owner in ranks
        ]
        exchange(by_adder, by_owner, shards[0].dtype)
        for piece, part in zip(own, parts, strict=True):
            piece.elements.copy_(part.sum(0, dtype=torch.promote_types(part.dtype, torch.float32)))
        sums = [[piece.elements for piece in own if owner in piece.owners] for owner in ranks]
        exchange(sums, by_adder, shards[0].dtype)

    def _pieces(self, shard: Tensor, size: int) -> list[_Piece]:
        """The pieces of this rank's shard of a parameter, in order."""
        firsts = list(accumulate(map(len, self.weights), initial=0))[:-1]
        own, offset = dist.get_rank() - firsts[self.node], 0
        pieces = []
        for piece in node_pieces(size, self.weights):
            *parts, adder = piece.owners
            if parts[self.node] == own:
                owners = [first + part for first, part in zip(firsts, parts, strict=True)]
                pieces.append(_Piece(owners, owners[adder], shard[offset : offset + piece.size]))
                offset += piece.size
        return pieces


class _Piece(NamedTuple):
    """A piece of a gradient: the rank that owns it in every node, the one of them that adds it up, this node's."""

    owners: list[int]
    adder: int
    elements: Tensor


def chunks(sizes: Sequence[int]) -> list[slice]:
    """Neighbouring parameters of `CHUNK_ELEMENTS` elements together, or one that is larger."""
    done, first, elements = [], 0, 0
    for i, size in enumerate(sizes):
        elements += size
        if elements >= CHUNK_ELEMENTS or i == len(sizes) - 1:
            done.append(slice(first, i + 1))
            first, elements = i + 1, 0
    return done


def exchange(
    send: Sequence[Sequence[Tensor]],
    receive: Sequence[Sequence[Tensor]],
    dtype: torch.dtype,
    group: ProcessGroup | None = None,
) -> None:
    """Send tensors to every rank, and write what arrives into tensors.

    Args:
        send: flat tensors, by the rank that they go to.
        receive: flat tensors on one device, by the rank that they come from, of the sizes that it sends.
        dtype: of all tensors.
        group: the ranks that take part; None for the whole job.

    Caller: every rank of ``group``.
    Collectives: one all_to_all_single.
    """
    outgoing, targets = ([part for parts in side for part in parts] for side in (send, receive))
    to_rank, from_rank = ([sum(part.numel() for part in parts) for parts in side] for side in (send, receive))
    device = get_accelerator().current_device_name()
    sent = torch.cat(outgoing).to(device) if outgoing else torch.empty(0, dtype=dtype, device=device)
    arrived = sent.new_empty(sum(from_rank))
    dist.all_to_all_single(arrived, sent, from_rank, to_rank, group=group)
    if targets:
        arrived = arrived.to(targets[0].device)  # at once
    for target, part in zip(targets, torch.split(arrived, [target.numel() for target in targets]), strict=True):
        target.copy_(part)
