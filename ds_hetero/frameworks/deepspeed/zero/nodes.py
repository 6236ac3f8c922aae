"""Add gradients up over nodes that each have all parameters: ZeRO-3 inside every node (``"zero_within"``).

Every node cuts the parameters between its own ranks, so that parameters are gathered, and gradients are reduced to
their owners and accumulated, inside the node. Once a step the gradients are added up over the nodes, bucket by bucket
while the last backward runs.

Nodes may cut a parameter differently. A piece is a run of elements that has one owner in each node; one of these
owners, the adder, adds the piece up. Every node adds up one part of each parameter, here of 10 elements:

    elements                 0         4   5   6         10
    node 0, ranks 0 and 1    |      rank 0     |  rank 1 |    weights 3 and 2
    node 1, ranks 2 and 3    |  rank 2 |     rank 3      |    weights 2 and 3
    adds up                  |    node 0   |   node 1    |
    pieces                   |    A    | B | C |    D    |    owned by ranks 0 and 2, 0 and 3, 0 and 3, 1 and 3

In a first message every owner sends its gradients of a piece to the adder. In a second one the adder sends the sums to
the other owners, so that all copies have the same bits. With N nodes each node sends 2 (N - 1) / N times the bytes of
all gradients: with two nodes, as many bytes as the gradients have.

Sources: hybrid sharding, PyTorch FSDP (arXiv:2304.11277) section 3.2.2; MiCS (arXiv:2205.00119). Here nodes may have
different numbers of ranks, and ranks different weights.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import NamedTuple

import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from torch import Tensor
from torch.distributed import ProcessGroup

from ds_hetero.sharding.zero_partition import node_pieces

# Elements of parameters in one exchange: few enough to bound the buffers on the device, enough to keep the wire busy.
# Chosen, never measured.
CHUNK_ELEMENTS = 1 << 22


@dataclass(frozen=True)
class Nodes:
    """Nodes of a job, each of which owns all parameters."""

    weights: tuple[tuple[float, ...], ...]  # for every node, the weights of its ranks in rank order
    node: int  # number of this rank's node
    group: ProcessGroup  # ranks of this node
    job: ProcessGroup  # all ranks, with a separate communicator: messages between nodes wait for no other collective

    @classmethod
    def of_job(cls, sizes: Sequence[int], weights: Sequence[float]) -> Nodes:
        """Make a process group for every node, and one of all ranks.

        Args:
            sizes: number of ranks of every node; ranks are numbered node by node.
            weights: ZeRO weights of all ranks of the job.

        Caller: every rank of the job.
        Collectives: one new_group for every node, and one for all ranks.
        """
        bounds = accumulate(sizes, initial=0)
        ranks_of_nodes = [range(start, stop) for start, stop in pairwise(bounds)]
        groups = [dist.new_group(list(ranks)) for ranks in ranks_of_nodes]
        node = next(number for number, ranks in enumerate(ranks_of_nodes) if dist.get_rank() in ranks)
        weights_of_nodes = tuple(tuple(weights[ranks.start : ranks.stop]) for ranks in ranks_of_nodes)
        return cls(weights_of_nodes, node, groups[node], dist.new_group())

    @property
    def own_weights(self) -> tuple[float, ...]:
        """Weights of the ranks of this node."""
        return self.weights[self.node]

    def pieces(self, shard: Tensor, size: int) -> list[_Piece]:
        """Cut this rank's shard of a parameter's gradient into pieces.

        Args:
            shard: this rank's shard.
            size: elements of the parameter.
        """
        first_ranks = list(accumulate(map(len, self.weights), initial=0))[:-1]  # of every node
        index_in_node = dist.get_rank() - first_ranks[self.node]
        pieces = []
        offset = 0
        for piece in node_pieces(size, self.weights):
            *indices, adding_node = piece.owners  # the owner's index in each node; then the node that adds up
            if indices[self.node] != index_in_node:
                continue
            owners = [first_rank + index for first_rank, index in zip(first_ranks, indices, strict=True)]
            pieces.append(_Piece(owners, owners[adding_node], shard[offset : offset + piece.size]))
            offset += piece.size
        return pieces


class NodeSums:
    """Adds gradients up over the nodes, chunk by chunk.

    A chunk of parameters takes two messages: parts to the adders, then sums to the owners. The messages of neighbouring
    chunks overlap: while the parts of one chunk are on their way, the sums of the chunk before return.

        call of start or finish    chunk 1        chunk 2        chunk 3
        start: chunk 1             send parts
        start: chunk 2             send sums      send parts
        start: chunk 3             write sums     send sums      send parts
        finish                                    write sums     send sums, write sums
    """

    def __init__(self, nodes: Nodes) -> None:
        self._nodes = nodes
        self._under_way: list[Iterator[None]] = []  # one iterator of `_add_up` for each chunk, the newest chunk first

    def start(self, shards: Sequence[Tensor], sizes: Sequence[int]) -> None:
        """Start to replace gradients by their sums over all nodes, in place; do not touch them before `finish`.

            shards   [s] each, this rank's shards of the gradients
            sizes    n of each parameter

        Caller: every rank of the job, with gradients of the same parameters.
        Collectives: two all_to_all_single over all ranks for each of `chunks`, of which some run in later calls; ranks
            of the same node send each other nothing.
        """
        for chunk in chunks(sizes):
            self._under_way.insert(0, self._add_up(shards[chunk], sizes[chunk]))
            self._advance()

    def finish(self) -> None:
        """Wait until all gradients given to `start` are sums over the nodes."""
        while self._under_way:
            self._advance()

    def _advance(self) -> None:
        """Start the next message of each chunk that is under way, the newest chunk first.

        So the message of the newest chunk is on the wire while an older chunk waits for its message. Every rank
        has the same chunks in the same order, and so starts collectives in the same order.
        """
        unfinished = []
        for chunk in self._under_way:
            try:
                next(chunk)
            except StopIteration:
                continue
            unfinished.append(chunk)
        self._under_way = unfinished

    def _add_up(self, shards: Sequence[Tensor], sizes: Sequence[int]) -> Iterator[None]:
        """Send the pieces of a chunk to their adders, then the sums to their owners; yield after starting a message."""
        rank = dist.get_rank()
        world_size = dist.get_world_size()
        dtype = shards[0].dtype
        # In both directions pieces are sent in the order of their parameters, so that messages are elements alone.
        to_adder: list[list[Tensor]] = [[] for _ in range(world_size)]  # pieces that others add up, by their adder
        to_owner: list[list[Tensor]] = [[] for _ in range(world_size)]  # pieces that this rank adds up, by owner
        totals_of_owner: list[list[Tensor]] = [[] for _ in range(world_size)]  # the sums of ``to_owner``
        local_totals: list[tuple[Tensor, Tensor]] = []  # for each piece that this rank adds up, its elements and sum
        for shard, size in zip(shards, sizes, strict=True):
            for piece in self._nodes.pieces(shard, size):
                if piece.adder != rank:
                    to_adder[piece.adder].append(piece.elements)
                    continue
                total = piece.elements.to(torch.promote_types(dtype, torch.float32))
                local_totals.append((piece.elements, total))
                for owner in piece.owners:
                    if owner != rank:
                        to_owner[owner].append(piece.elements)
                        totals_of_owner[owner].append(total)
        wait_for_parts = start_exchange(to_adder, to_owner, dtype, self._nodes.job)
        yield
        # In order of ranks, so that an adder adds in the same order in every step.
        for totals, parts in zip(totals_of_owner, wait_for_parts(), strict=True):
            for total, part in zip(totals, parts, strict=True):
                total.add_(part)
        for elements, total in local_totals:
            elements.copy_(total)
        wait_for_sums = start_exchange(to_owner, to_adder, dtype, self._nodes.job)
        yield
        copy_into(to_adder, wait_for_sums())


class _Piece(NamedTuple):
    """A run of elements of a gradient that has one owner in each node."""

    owners: list[int]  # one rank of every node
    adder: int  # the owner that adds the piece up
    elements: Tensor  # the gradients of this node


def chunks(sizes: Sequence[int]) -> list[slice]:
    """Return runs of neighbouring parameters; each but the last has at least `CHUNK_ELEMENTS` elements.

    Args:
        sizes: elements of every parameter.
    """
    runs = []
    first = elements = 0
    for number, size in enumerate(sizes):
        elements += size
        if elements >= CHUNK_ELEMENTS or number == len(sizes) - 1:
            runs.append(slice(first, number + 1))
            first = number + 1
            elements = 0
    return runs


def start_exchange(
    send: Sequence[Sequence[Tensor]], templates: Sequence[Sequence[Tensor]], dtype: torch.dtype, group: ProcessGroup
) -> Callable[[], list[Sequence[Tensor]]]:
    """Start to send tensors to all ranks, and to receive tensors from all ranks.

    Args:
        send: tensors to send, by receiver.
        templates: tensors with the sizes of the tensors that arrive, by sender; their values are not read.
        dtype: of all tensors.

    Returns:
        A function to be called once. It waits for the tensors and returns them by sender, on the accelerator.

    Caller: every rank of ``group``.
    Collectives: one all_to_all_single.
    """
    send_sizes = [_num_elements(parts) for parts in send]
    receive_sizes = [_num_elements(parts) for parts in templates]
    device = get_accelerator().current_device_name()
    parts_to_send = [part for parts in send for part in parts]
    send_buffer = torch.cat(parts_to_send).to(device) if parts_to_send else torch.empty(0, dtype=dtype, device=device)
    receive_buffer = send_buffer.new_empty(sum(receive_sizes))
    work = dist.all_to_all_single(receive_buffer, send_buffer, receive_sizes, send_sizes, group=group, async_op=True)

    def finish() -> list[Sequence[Tensor]]:
        work.wait()
        parts_by_sender: list[Sequence[Tensor]] = []
        for message, parts in zip(torch.split(receive_buffer, receive_sizes), templates, strict=True):
            parts_by_sender.append(torch.split(message, [part.numel() for part in parts]))
        return parts_by_sender

    return finish


def _num_elements(tensors: Sequence[Tensor]) -> int:
    """Return the number of elements of all tensors."""
    return sum(tensor.numel() for tensor in tensors)


def copy_into(targets: Sequence[Sequence[Tensor]], received: Sequence[Sequence[Tensor]]) -> None:
    """Copy received tensors, by sender, into ``targets``, which have the same sizes."""
    for targets_of_rank, parts in zip(targets, received, strict=True):
        for target, part in zip(targets_of_rank, parts, strict=True):
            target.copy_(part)
