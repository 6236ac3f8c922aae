"""ZeRO-3 whose shards lie inside a node and are copied across nodes: ``"zero_within"``.

Parameters are gathered inside a node. Gradients are reduced to their owners there and accumulated. Once a step they
are added up over the nodes, bucket by bucket while the last backward goes on.

Nodes may cut a parameter differently. A piece is a run of elements that has one owner in each node; one of these
owners, the adder, adds the piece up. Every node adds up one part of each parameter, here of 10 elements:

    elements                 0         4   5   6         10
    node 0, ranks 0 and 1    |      rank 0     |  rank 1 |    weights 3 and 2
    node 1, ranks 2 and 3    |  rank 2 |     rank 3      |    weights 2 and 3
    adds up                  |    node 0   |   node 1    |
    pieces                   |    A    | B | C |    D    |    owned by ranks 0 and 2, 0 and 3, 0 and 3, 1 and 3

In a first message every owner sends its part of a piece to the adder. In a second one the adder sends the sum to the
other owners, so that all copies have the same bits. With N nodes each of them adds up one part of every parameter, and
sends 2 (N - 1) / N of the gradients: the gradients once for two nodes.

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

    weights: tuple[tuple[float, ...], ...]  # of the ranks of every node, in rank order
    node: int  # of this rank
    group: ProcessGroup  # its ranks
    job: ProcessGroup  # all ranks, with a communicator of its own: these messages wait for no other collective

    @classmethod
    def of_job(cls, sizes: Sequence[int], weights: Sequence[float]) -> Nodes:
        """Make a process group of every node, and one of all ranks.

        Args:
            sizes: ranks of every node.

        Caller: every rank of the job.
        Collectives: one new_group per node, one more.
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
        """Return the pieces of this rank's shard of a parameter of ``size`` elements, in order."""
        first_ranks = list(accumulate(map(len, self.weights), initial=0))[:-1]  # of every node
        own_index = dist.get_rank() - first_ranks[self.node]
        pieces = []
        offset = 0
        for piece in node_pieces(size, self.weights):
            *indices, adding_node = piece.owners  # of the owner in each node; then the node that adds up
            if indices[self.node] != own_index:
                continue
            owners = [first_rank + index for first_rank, index in zip(first_ranks, indices, strict=True)]
            pieces.append(_Piece(owners, owners[adding_node], shard[offset : offset + piece.size]))
            offset += piece.size
        return pieces


class NodeSums:
    """Gradients on their way between nodes.

    A chunk takes two messages, of parts and of sums. The chunks advance together: while the parts of one travel to the
    ranks that add them up, the sums of the one before return.

        call of start or finish    chunk 1        chunk 2        chunk 3
        start: chunk 1             send parts
        start: chunk 2             send sums      send parts
        start: chunk 3             write sums     send sums      send parts
        finish                                    write sums     send sums, write sums
    """

    def __init__(self, nodes: Nodes) -> None:
        self._nodes = nodes
        self._under_way: list[Iterator[None]] = []  # the newest first

    def start(self, shards: Sequence[Tensor], sizes: Sequence[int]) -> None:
        """Begin to replace gradients by their sums over all nodes, in place; do not touch them before `finish`.

            shards   [s] each, this rank's shards of the gradients
            sizes    n of each parameter

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
        """Bring each chunk one message further.

        The newest comes first: its message is on the wire while an older chunk waits for its own to arrive. Every rank
        has the same chunks in the same order, and so the same order of collectives.
        """
        self._under_way = [chunk for chunk in self._under_way if next(chunk, "done") != "done"]

    def _add_up(self, shards: Sequence[Tensor], sizes: Sequence[int]) -> Iterator[None]:
        """Send every piece to its adder, then the sums to their owners; yields after each message is under way."""
        rank = dist.get_rank()
        world_size = dist.get_world_size()
        dtype = shards[0].dtype
        # In both directions pieces travel in the order of their parameters, so that no message says which they are.
        to_adder: list[list[Tensor]] = [[] for _ in range(world_size)]  # by adder: pieces that others add up
        to_owner: list[list[Tensor]] = [[] for _ in range(world_size)]  # by owner: pieces that this rank adds up
        totals_of_owner: list[list[Tensor]] = [[] for _ in range(world_size)]  # their sums
        own_totals: list[tuple[Tensor, Tensor]] = []  # this rank's part of a piece, and the sum
        for shard, size in zip(shards, sizes, strict=True):
            for piece in self._nodes.pieces(shard, size):
                if piece.adder != rank:
                    to_adder[piece.adder].append(piece.elements)
                    continue
                total = piece.elements.to(torch.promote_types(dtype, torch.float32))
                own_totals.append((piece.elements, total))
                for owner in piece.owners:
                    if owner != rank:
                        to_owner[owner].append(piece.elements)
                        totals_of_owner[owner].append(total)
        wait_for_parts = start_exchange(to_adder, to_owner, dtype, self._nodes.job)
        yield
        # By rank, so that every adder adds in the same order in every step.
        for totals, parts in zip(totals_of_owner, wait_for_parts(), strict=True):
            for total, part in zip(totals, parts, strict=True):
                total.add_(part)
        for elements, total in own_totals:
            elements.copy_(total)
        wait_for_sums = start_exchange(to_owner, to_adder, dtype, self._nodes.job)
        yield
        write(wait_for_sums(), to_adder)


class _Piece(NamedTuple):
    """A run of elements of a gradient that has one owner in each node."""

    owners: list[int]  # a rank of every node
    adder: int  # the owner that adds the piece up
    elements: Tensor  # this node's part


def chunks(sizes: Sequence[int]) -> list[slice]:
    """Return runs of neighbouring parameters that each have `CHUNK_ELEMENTS` elements or more, but for the last."""
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
    send: Sequence[Sequence[Tensor]], like: Sequence[Sequence[Tensor]], dtype: torch.dtype, group: ProcessGroup
) -> Callable[[], list[Sequence[Tensor]]]:
    """Start an exchange of tensors between all ranks.

    Args:
        send: tensors by the rank that they go to.
        like: tensors of the sizes that arrive, by the rank that they come from.

    Returns:
        A function that is called once: it waits, and returns what arrived, by sender, on the accelerator.

    Caller: every rank of ``group``.
    Collectives: one all_to_all_single.
    """
    to_rank = [_elements(parts) for parts in send]
    from_rank = [_elements(parts) for parts in like]
    device = get_accelerator().current_device_name()
    outgoing = [part for parts in send for part in parts]
    sent = torch.cat(outgoing).to(device) if outgoing else torch.empty(0, dtype=dtype, device=device)
    arrived = sent.new_empty(sum(from_rank))
    work = dist.all_to_all_single(arrived, sent, from_rank, to_rank, group=group, async_op=True)

    def finish() -> list[Sequence[Tensor]]:
        work.wait()
        parts_of_ranks: list[Sequence[Tensor]] = []
        for message, parts in zip(torch.split(arrived, from_rank), like, strict=True):
            parts_of_ranks.append(torch.split(message, [part.numel() for part in parts]))
        return parts_of_ranks

    return finish


def _elements(tensors: Sequence[Tensor]) -> int:
    return sum(tensor.numel() for tensor in tensors)


def write(arrived: Sequence[Sequence[Tensor]], targets: Sequence[Sequence[Tensor]]) -> None:
    """Copy what arrived, by rank, into tensors of the same sizes."""
    for parts, targets_of_rank in zip(arrived, targets, strict=True):
        for part, target in zip(parts, targets_of_rank, strict=True):
            target.copy_(part)
