"""Uneven all-to-all over a whole replica: a rank's tokens of every head <-> every token of the rank's own heads.

The tensors of a layer may differ in their numbers of heads. If several value heads share a key head, a rank gets the
key heads that its value heads need, and a key head that the value heads of two ranks share is sent to both.
`gather_all_tokens` and `scatter_tokens` are each other's adjoint, so each is the backward of the other.

Example: 4 heads, ranks with 3 and 1 tokens and heads [0, 3) and [3, 4). Rank 0 sends its 3 tokens of head 3, gets
1 token of heads 0 to 2, and then has all 4 tokens of these.

Dimension key: B batch, s this rank's tokens, L tokens of the sequence, N heads of one tensor, n those of one rank.
Source: DeepSpeed-Ulysses (arXiv:2309.14509), with uneven tokens and heads.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from math import prod
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from ds_hetero.runtime.attention.batch_layout import BatchLayout
from ds_hetero.runtime.devices import copied_to
from ds_hetero.runtime.peers.watch import waiting_for_peers
from ds_hetero.runtime.replica import Replica
from ds_hetero.runtime.step_clock import ALL_TO_ALL, Clock
from ds_hetero.values.placement import Placement, Range

Cuts = tuple[Range, ...]
"""The heads ``[start, stop)`` of one tensor that each rank gets; they may overlap."""


@dataclass(frozen=True, eq=False)
class ReplicaAllToAll:
    """Tables of the all-to-all over a replica, for the placement of one batch.

    Attributes:
        tokens: number of tokens of each rank of the replica.
        index: of this rank in the replica.
        positions: [L], positions of rank 0's tokens, then of rank 1's, and so on; None if they ascend.
    """

    tokens: tuple[int, ...]
    index: int
    process_group: ProcessGroup
    positions: Tensor | None
    _positions_on: dict[torch.device, Tensor] = field(default_factory=dict, repr=False)

    @property
    def length(self) -> int:
        """Number of tokens of the whole sequence, L."""
        return sum(self.tokens)

    def positions_on(self, device: torch.device) -> Tensor:
        """Return ``positions`` on a device; they are copied there once."""
        assert self.positions is not None
        if device not in self._positions_on:
            self._positions_on[device] = copied_to(self.positions, device)
        return self._positions_on[device]

    def exchange(self, send: Sequence[Tensor], shapes: Sequence[tuple[int, ...]]) -> list[Tensor]:
        """Send one tensor to each rank, and return the tensors that this rank receives, by sender.

        Args:
            send: by receiver, of any shapes.
            shapes: of the received tensors, by sender.

        Caller: every rank of the replica.
        Collectives: one all_to_all_single.
        """
        flat = torch.cat([part.reshape(-1) for part in send])
        sizes = [prod(shape) for shape in shapes]
        received = flat.new_empty(sum(sizes))
        with waiting_for_peers("exchanging heads and tokens of a recurrent layer"):
            dist.all_to_all_single(received, flat, sizes, [part.numel() for part in send], group=self.process_group)
        return [part.view(shape) for part, shape in zip(received.split_with_sizes(sizes), shapes, strict=True)]


@lru_cache(maxsize=64)
def all_to_all_of(replica: Replica, batch: BatchLayout) -> ReplicaAllToAll:
    """Return the tables of the all-to-all for a batch; cached."""
    placement = batch.placement
    index = replica.ranks.index(replica.rank)
    return ReplicaAllToAll(placement.rank_tokens, index, replica.sp_group, _positions(placement))


def _positions(placement: Placement) -> Tensor | None:
    """Return the positions of rank 0's tokens, then of rank 1's, and so on, [L]; None if they ascend."""
    intervals = [interval for rank in placement.schedule.ranks for interval in placement.intervals(rank)]
    if intervals == sorted(intervals):
        return None
    return torch.cat([torch.arange(start, stop) for start, stop in intervals])


def shared_heads(cuts: Cuts, heads_each: int) -> Cuts:
    """Return the heads that each rank needs of a tensor with fewer heads, such as keys, given its value heads.

    Example: two ranks have the value heads [0, 3) and [3, 8), and two value heads share a key head. The ranks need the
    key heads [0, 2) and [1, 4), so both get key head 1.

    Args:
        cuts: each rank's heads of the tensor with more heads.
        heads_each: how many heads of that tensor share one head of the other tensor.
    """
    shared: list[Range] = []
    for start, stop in cuts:
        shared.append((start // heads_each, -(-stop // heads_each)) if start < stop else (0, 0))
    return tuple(shared)


def gather_all_tokens(tensors: Sequence[Tensor], cuts: Sequence[Cuts], all_to_all: ReplicaAllToAll) -> list[Tensor]:
    """Exchange this rank's tokens of every head for all tokens of this rank's heads.

        tensors [B, s, N, ...], of one data type, each with its ``cuts``
        result  [B, L, n, ...] in the order of the sequence

    A message is [s, B, W]: its W numbers per token are the heads of all tensors, one tensor after the other. So the
    messages of all ranks, one after the other, are [L, B, W].

    Caller: every rank of the replica.
    Collectives: one all_to_all_single.
    """
    batch_size = tensors[0].shape[0]
    messages = []
    for rank in range(len(all_to_all.tokens)):
        heads = [x[:, :, slice(*cut[rank])].flatten(2) for x, cut in zip(tensors, cuts, strict=True)]
        messages.append(torch.cat(heads, 2).transpose(0, 1))
    num_local_heads = [_num_heads(cut[all_to_all.index]) for cut in cuts]  # n of each tensor
    widths = [num_heads * prod(x.shape[3:]) for x, num_heads in zip(tensors, num_local_heads, strict=True)]
    shapes = [(tokens, batch_size, sum(widths)) for tokens in all_to_all.tokens]
    gathered = torch.cat(all_to_all.exchange(messages, shapes))  # [L, B, W], by rank
    if all_to_all.positions is not None:
        by_position = torch.empty_like(gathered)
        by_position[all_to_all.positions_on(gathered.device)] = gathered
        gathered = by_position
    parts = gathered.transpose(0, 1).split_with_sizes(widths, 2)
    results = []
    for part, x, num_heads in zip(parts, tensors, num_local_heads, strict=True):
        results.append(part.reshape(*part.shape[:2], num_heads, *x.shape[3:]))
    return results


def scatter_tokens(
    tensors: Sequence[Tensor], cuts: Sequence[Cuts], heads: Sequence[int], all_to_all: ReplicaAllToAll
) -> list[Tensor]:
    """Exchange all tokens of this rank's heads for this rank's tokens of every head; adjoint of `gather_all_tokens`.

        tensors [B, L, n, ...], of one data type, each with its ``cuts``
        heads   N of each tensor
        result  [B, s, N, ...]; heads that several ranks have are summed

    Caller: every rank of the replica.
    Collectives: one all_to_all_single.
    """
    batch_size = tensors[0].shape[0]
    num_tokens = all_to_all.tokens[all_to_all.index]  # s
    packed = torch.cat([x.flatten(2) for x in tensors], 2).transpose(0, 1)  # [L, B, W], by position
    if all_to_all.positions is not None:
        packed = packed[all_to_all.positions_on(packed.device)]  # by rank
    head_sizes = [prod(x.shape[3:]) for x in tensors]  # numbers in one head of a token
    widths_by_rank = []  # of the part of each tensor in the message of a rank
    for rank in range(len(all_to_all.tokens)):
        widths_by_rank.append([_num_heads(cut[rank]) * size for cut, size in zip(cuts, head_sizes, strict=True)])
    shapes = [(num_tokens, batch_size, sum(widths)) for widths in widths_by_rank]
    messages = all_to_all.exchange(packed.split_with_sizes(list(all_to_all.tokens)), shapes)
    results = []  # [s, B, N, ...]
    for x, num_heads in zip(tensors, heads, strict=True):
        results.append(x.new_zeros(num_tokens, batch_size, num_heads, *x.shape[3:]))
    # One rank after the other, so that heads that several ranks have are summed in the same order in every step.
    for rank, (message, widths) in enumerate(zip(messages, widths_by_rank, strict=True)):
        parts = message.split_with_sizes(widths, 2)  # [s, B, heads * head size]
        for result, part, cut in zip(results, parts, cuts, strict=True):
            heads_of_rank = slice(*cut[rank])
            result[:, :, heads_of_rank] += part.reshape_as(result[:, :, heads_of_rank])
    return [result.transpose(0, 1) for result in results]


def to_sequence(
    tensors: Sequence[Tensor], cuts: Sequence[Cuts], all_to_all: ReplicaAllToAll, clock: Clock
) -> tuple[Tensor, ...]:
    """Run `gather_all_tokens` with a gradient, for tensors of any data types.

    All tensors go through one autograd node. So a rank without heads, whose output depends on one tensor only, still
    takes part in the backward's collectives of all data types.

    Collectives: one all_to_all_single for each data type, in the order of ``tensors``.
    """
    result: tuple[Tensor, ...] = _ToSequence.apply(tuple(cuts), all_to_all, clock, *tensors)  # type: ignore[no-untyped-call]
    return result


def to_shards(tensor: Tensor, cuts: Cuts, all_to_all: ReplicaAllToAll, clock: Clock) -> Tensor:
    """Run `scatter_tokens` with a gradient for one tensor [B, L, h, D], of which no two ranks have the same head.

    Collectives: one all_to_all_single.
    """
    result: Tensor = _ToShards.apply(tensor, cuts, all_to_all, clock)  # type: ignore[no-untyped-call]
    return result


class _ToSequence(torch.autograd.Function):
    """See `to_sequence`."""

    @staticmethod
    def forward(
        ctx: Any, cuts: tuple[Cuts, ...], all_to_all: ReplicaAllToAll, clock: Clock, *tensors: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.cuts, ctx.all_to_all, ctx.clock, ctx.heads = cuts, all_to_all, clock, [x.shape[2] for x in tensors]
        ctx.by_dtype = list(_indices_by_dtype(tensors))
        results = list(tensors)
        with clock.phase(ALL_TO_ALL, "gather_tokens"):
            for indices in ctx.by_dtype:
                gathered = gather_all_tokens([tensors[i] for i in indices], [cuts[i] for i in indices], all_to_all)
                for index, result in zip(indices, gathered, strict=True):
                    results[index] = result
        return tuple(results)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        results: list[Tensor | None] = [None] * len(grads)
        with ctx.clock.phase(ALL_TO_ALL, "scatter_tokens"):
            for indices in ctx.by_dtype:
                heads, cuts = [ctx.heads[i] for i in indices], [ctx.cuts[i] for i in indices]
                scattered = scatter_tokens([grads[i] for i in indices], cuts, heads, ctx.all_to_all)
                for index, result in zip(indices, scattered, strict=True):
                    results[index] = result
        return None, None, None, *results


class _ToShards(torch.autograd.Function):
    """See `to_shards`."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, cuts: Cuts, all_to_all: ReplicaAllToAll, clock: Clock) -> Tensor:
        ctx.cuts, ctx.all_to_all, ctx.clock = cuts, all_to_all, clock
        with clock.phase(ALL_TO_ALL, "scatter_tokens"):
            return scatter_tokens([tensor], [cuts], [max(stop for _, stop in cuts)], all_to_all)[0]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        with ctx.clock.phase(ALL_TO_ALL, "gather_tokens"):
            return gather_all_tokens([grad], [ctx.cuts], ctx.all_to_all)[0], None, None, None


def _indices_by_dtype(tensors: Sequence[Tensor]) -> list[list[int]]:
    """Return the indices of the tensors of each data type, types in the order of their first tensors.

    Each data type has collectives of its own. Their order has to be the same on every rank, and so is this order.
    """
    indices: dict[torch.dtype, list[int]] = {}
    for index, tensor in enumerate(tensors):
        indices.setdefault(tensor.dtype, []).append(index)
    return list(indices.values())


def _num_heads(heads: Range) -> int:
    """Return the number of heads in ``[start, stop)``."""
    start, stop = heads
    return stop - start
