"""ZeRO-3 whose shards lie inside a node and are copied across nodes: ``"zero_within"``.

Parameters are gathered inside a node. Gradients are reduced to their owners there and accumulated; once a step they
cross, bucket by bucket while the last backward goes on. Where the cuts of nodes differ, owners trade the common pieces
of their shards. Of every parameter each node adds up one part of the gradients of all and sends the sum to the others,
so that all copies get the same bits. Of N nodes each sends 2 (N - 1) / N of the gradients: of two nodes the gradients
once.

Sources: hybrid sharding, PyTorch FSDP (arXiv:2304.11277) section 3.2.2; MiCS (arXiv:2205.00119). Here nodes may have
different numbers of ranks, and ranks different weights.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from torch import Tensor
from torch.distributed import ProcessGroup

from ds_hetero.sharding.zero_partition import node_pieces

CHUNK_ELEMENTS = 1 << 22  # of parameters, per exchange: bounds the buffers on the device, and keeps the wire busy


@dataclass(frozen=True)
class Nodes:
    """Nodes of a job, each of which owns all parameters."""

    weights: tuple[tuple[float, ...], ...]  # of the ranks of every node, in rank order
    node: int  # of this rank
    group: ProcessGroup  # its ranks
    job: ProcessGroup  # all ranks; what crosses waits for nothing else there

    @classmethod
    def of_job(cls, sizes: Sequence[int], weights: Sequence[float]) -> Nodes:
        """Make a process group of every node, and one of all ranks.

        Args:
            sizes: ranks of every node.

        Caller: every rank of the job.
        Collectives: one new_group per node, one more.
        """
        firsts = list(accumulate(sizes, initial=0))
        ranks = [range(first, first + size) for first, size in zip(firsts, sizes, strict=False)]
        groups = [dist.new_group(list(of_node)) for of_node in ranks]
        node = next(i for i, of_node in enumerate(ranks) if dist.get_rank() in of_node)
        by_node = tuple(tuple(weights[rank] for rank in of_node) for of_node in ranks)
        return cls(by_node, node, groups[node], dist.new_group())

    @property
    def own_weights(self) -> tuple[float, ...]:
        """Of the ranks of this node."""
        return self.weights[self.node]

    def pieces(self, shard: Tensor, size: int) -> list[_Piece]:
        """The pieces of this rank's shard of a parameter of ``size`` elements, in order."""
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


class NodeSums:
    """Gradients on their way between nodes: while some travel to the ranks that add them up, sums of others return."""

    def __init__(self, nodes: Nodes) -> None:
        self._nodes = nodes
        self._under_way: list[Iterator[None]] = []  # the newest first

    def start(self, shards: Sequence[Tensor], sizes: Sequence[int]) -> None:
        """Begin to replace gradients by their sums over all nodes, in place; they are not to be touched till `finish`.

            shards   [s] each, this rank's of every parameter
            sizes    n of each

        Caller: every rank of the job, with gradients of the same parameters.
        Collectives: two all_to_all_single over all ranks for each of `chunks`, at once in both directions, some of them
            in later calls; ranks of one node send each other nothing.
        """
        for chunk in chunks(sizes):
            self._under_way.insert(0, self._add_up(shards[chunk], sizes[chunk]))
            self._advance()

    def finish(self) -> None:
        """Wait for all that was started."""
        while self._under_way:
            self._advance()

    def _advance(self) -> None:
        """Bring each chunk one message further; the newest first, whose message keeps the wire busy meanwhile."""
        self._under_way = [chunk for chunk in self._under_way if next(chunk, "done") != "done"]

    def _add_up(self, shards: Sequence[Tensor], sizes: Sequence[int]) -> Iterator[None]:
        """Send every piece to the rank that adds it up, then the sum to its owners."""
        rank, ranks, job, dtype = dist.get_rank(), range(dist.get_world_size()), self._nodes.job, shards[0].dtype
        pieces = [piece for shard, size in zip(shards, sizes, strict=True) for piece in self._nodes.pieces(shard, size)]
        wide = torch.promote_types(dtype, torch.float32)
        own = [(piece, piece.elements.to(wide)) for piece in pieces if piece.adder == rank]
        to_adder = [[piece.elements for piece in pieces if piece.adder == adder != rank] for adder in ranks]
        of_owner = [[(piece, total) for piece, total in own if rank != owner in piece.owners] for owner in ranks]
        to_owner = [[piece.elements for piece, _ in shared] for shared in of_owner]
        parts = start_exchange(to_adder, to_owner, dtype, job)
        yield
        for shared, arrived in zip(of_owner, parts(), strict=True):
            for (_, total), part in zip(shared, arrived, strict=True):
                total.add_(part)
        for piece, total in own:
            piece.elements.copy_(total)
        sums = start_exchange(to_owner, to_adder, dtype, job)
        yield
        write(sums(), to_adder)


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


def start_exchange(
    send: Sequence[Sequence[Tensor]], like: Sequence[Sequence[Tensor]], dtype: torch.dtype, group: ProcessGroup
) -> Callable[[], list[Sequence[Tensor]]]:
    """Start to send tensors; what is returned waits, once, and returns what arrived, by sender, on the accelerator.

    Args:
        like: tensors of the sizes that arrive, by the rank that they come from.

    Caller: every rank of ``group``.
    Collectives: one all_to_all_single.
    """
    to_rank, from_rank = ([sum(part.numel() for part in parts) for parts in side] for side in (send, like))
    outgoing, device = [part for parts in send for part in parts], get_accelerator().current_device_name()
    sent = torch.cat(outgoing).to(device) if outgoing else torch.empty(0, dtype=dtype, device=device)
    arrived = sent.new_empty(sum(from_rank))
    work = dist.all_to_all_single(arrived, sent, from_rank, to_rank, group=group, async_op=True)

    def finish() -> list[Sequence[Tensor]]:
        work.wait()
        by_rank = zip(torch.split(arrived, from_rank), like, strict=True)
        return [torch.split(part, [each.numel() for each in parts]) for part, parts in by_rank]

    return finish


def write(arrived: Sequence[Sequence[Tensor]], targets: Sequence[Sequence[Tensor]]) -> None:
    """Copy what arrived, by rank, into tensors of the same sizes."""
    for of_rank, targets_of_rank in zip(arrived, targets, strict=True):
        for part, target in zip(of_rank, targets_of_rank, strict=True):
            target.copy_(part)
