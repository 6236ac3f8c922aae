"""Ragged all-to-all over a whole replica: a rank's tokens of every head <-> every token of its own heads.

Tensors of one layer have unlike numbers of heads: where several value heads share a key head, a rank takes the key
heads that its value heads need, and a key head that lies on a cut travels to both sides. `gather_all_tokens` and
`scatter_tokens` are each other's adjoint, so each is the other's backward.

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
"""Heads ``[start, stop)`` of one tensor by rank; they may overlap."""


@dataclass(frozen=True, eq=False)
class HeadTrade:
    """How the tokens of a batch are spread over the ranks of a replica."""

    tokens: tuple[int, ...]  # by rank of the replica
    index: int  # of this rank among them
    process_group: ProcessGroup
    positions: Tensor | None  # [L], of all ranks' tokens, one rank after the other; None where they ascend
    _positions_on: dict[torch.device, Tensor] = field(default_factory=dict, repr=False)

    @property
    def length(self) -> int:
        """Tokens of the whole sequence: L."""
        return sum(self.tokens)

    def positions_on(self, device: torch.device) -> Tensor:
        """Return ``positions`` on a device; copied there once."""
        assert self.positions is not None
        if device not in self._positions_on:
            self._positions_on[device] = copied_to(self.positions, device)
        return self._positions_on[device]

    def exchange(self, send: Sequence[Tensor], shapes: Sequence[tuple[int, ...]]) -> list[Tensor]:
        """Send one tensor to each rank, and return those that arrive.

        Args:
            send: by receiver, any shapes.
            shapes: of what arrives, by sender.

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
def head_trade(replica: Replica, batch: BatchLayout) -> HeadTrade:
    """Return the tables of a batch; made once and kept."""
    placement = batch.placement
    index = replica.ranks.index(replica.rank)
    return HeadTrade(placement.rank_tokens, index, replica.sp_group, _positions(placement))


def _positions(placement: Placement) -> Tensor | None:
    """Return the position of every token, one rank after the other: [L]; None where they ascend."""
    intervals = [interval for rank in placement.schedule.ranks for interval in placement.intervals(rank)]
    if intervals == sorted(intervals):
        return None
    return torch.cat([torch.arange(start, stop) for start, stop in intervals])


def shared_heads(cuts: Cuts, heads_each: int) -> Cuts:
    """Return the heads that ranks need of a tensor whose every head serves ``heads_each`` of the heads that are cut.

    Example: value heads 0 to 3 and 3 to 8 on two ranks, two to a key head: they need the key heads 0 to 2 and 1 to 4,
    and key head 1 goes to both.
    """
    shared: list[Range] = []
    for start, stop in cuts:
        shared.append((start // heads_each, -(-stop // heads_each)) if start < stop else (0, 0))
    return tuple(shared)


def gather_all_tokens(tensors: Sequence[Tensor], cuts: Sequence[Cuts], trade: HeadTrade) -> list[Tensor]:
    """Trade this rank's tokens of every head for all tokens of its own heads.

        tensors [B, s, N, ...], of one data type, each with its ``cuts``
        result  [B, L, n, ...] in the order of the sequence

    A message has the heads of all tensors side by side, as W numbers a token, and tokens first: [s, B, W]. So the
    messages of all ranks one after the other are [L, B, W].

    Caller: every rank of the replica.
    Collectives: one all_to_all_single.
    """
    batch_size = tensors[0].shape[0]
    messages = []
    for rank in range(len(trade.tokens)):
        heads = [x[:, :, slice(*cut[rank])].flatten(2) for x, cut in zip(tensors, cuts, strict=True)]
        messages.append(torch.cat(heads, 2).transpose(0, 1))
    own_cuts = [cut[trade.index] for cut in cuts]
    widths = [_size(own) * prod(x.shape[3:]) for x, own in zip(tensors, own_cuts, strict=True)]
    shapes = [(tokens, batch_size, sum(widths)) for tokens in trade.tokens]
    gathered = torch.cat(trade.exchange(messages, shapes))  # [L, B, W], by rank
    if trade.positions is not None:
        by_position = torch.empty_like(gathered)
        by_position[trade.positions_on(gathered.device)] = gathered
        gathered = by_position
    parts = gathered.transpose(0, 1).split_with_sizes(widths, 2)
    results = []
    for part, x, own in zip(parts, tensors, own_cuts, strict=True):
        results.append(part.reshape(*part.shape[:2], _size(own), *x.shape[3:]))
    return results


def scatter_tokens(
    tensors: Sequence[Tensor], cuts: Sequence[Cuts], heads: Sequence[int], trade: HeadTrade
) -> list[Tensor]:
    """Trade all tokens of this rank's heads for this rank's tokens of every head; adjoint of `gather_all_tokens`.

        tensors [B, L, n, ...], of one data type, each with its ``cuts``
        heads   N of each
        result  [B, s, N, ...]; heads that several ranks have are added up

    Caller: every rank of the replica.
    Collectives: one all_to_all_single.
    """
    batch_size = tensors[0].shape[0]
    own_tokens = trade.tokens[trade.index]
    packed = torch.cat([x.flatten(2) for x in tensors], 2).transpose(0, 1)  # [L, B, W], by position
    if trade.positions is not None:
        packed = packed[trade.positions_on(packed.device)]  # by rank
    head_sizes = [prod(x.shape[3:]) for x in tensors]  # numbers of one head of a token
    widths_by_rank = []
    for rank in range(len(trade.tokens)):
        widths_by_rank.append([_size(cut[rank]) * size for cut, size in zip(cuts, head_sizes, strict=True)])
    shapes = [(own_tokens, batch_size, sum(widths)) for widths in widths_by_rank]
    messages = trade.exchange(packed.split_with_sizes(list(trade.tokens)), shapes)
    results = []
    for x, num_heads in zip(tensors, heads, strict=True):
        results.append(x.new_zeros(own_tokens, batch_size, num_heads, *x.shape[3:]))
    # By rank, so that heads that several ranks have are added up in the same order in every step.
    for rank, (message, widths) in enumerate(zip(messages, widths_by_rank, strict=True)):
        for result, part, cut in zip(results, message.split_with_sizes(widths, 2), cuts, strict=True):
            result[:, :, slice(*cut[rank])] += part.reshape(*part.shape[:2], _size(cut[rank]), *result.shape[3:])
    return [result.transpose(0, 1) for result in results]


def to_sequence(tensors: Sequence[Tensor], cuts: Sequence[Cuts], trade: HeadTrade, clock: Clock) -> tuple[Tensor, ...]:
    """`gather_all_tokens` with a gradient, of tensors of any data types.

    It is one node of the graph for all of them: a rank without heads, whose result hangs on one tensor alone, takes
    part in the backward of every data type all the same.

    Collectives: one all_to_all_single for each data type, in the order of ``tensors``.
    """
    result: tuple[Tensor, ...] = _ToSequence.apply(tuple(cuts), trade, clock, *tensors)  # type: ignore[no-untyped-call]
    return result


def to_shards(tensor: Tensor, cuts: Cuts, trade: HeadTrade, clock: Clock) -> Tensor:
    """`scatter_tokens` of one tensor with a gradient; one rank per head. Collectives: one all_to_all_single."""
    result: Tensor = _ToShards.apply(tensor, cuts, trade, clock)  # type: ignore[no-untyped-call]
    return result


class _ToSequence(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, cuts: tuple[Cuts, ...], trade: HeadTrade, clock: Clock, *tensors: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.cuts, ctx.trade, ctx.clock, ctx.heads = cuts, trade, clock, [x.shape[2] for x in tensors]
        ctx.by_dtype = list(_places_by_dtype(tensors))
        results = list(tensors)
        with clock.phase(ALL_TO_ALL, "gather_tokens"):
            for places in ctx.by_dtype:
                gathered = gather_all_tokens([tensors[i] for i in places], [cuts[i] for i in places], trade)
                for place, result in zip(places, gathered, strict=True):
                    results[place] = result
        return tuple(results)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        results: list[Tensor | None] = [None] * len(grads)
        with ctx.clock.phase(ALL_TO_ALL, "scatter_tokens"):
            for places in ctx.by_dtype:
                heads, cuts = [ctx.heads[i] for i in places], [ctx.cuts[i] for i in places]
                scattered = scatter_tokens([grads[i] for i in places], cuts, heads, ctx.trade)
                for place, result in zip(places, scattered, strict=True):
                    results[place] = result
        return None, None, None, *results


class _ToShards(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, cuts: Cuts, trade: HeadTrade, clock: Clock) -> Tensor:
        ctx.cuts, ctx.trade, ctx.clock = cuts, trade, clock
        with clock.phase(ALL_TO_ALL, "scatter_tokens"):
            return scatter_tokens([tensor], [cuts], [max(stop for _, stop in cuts)], trade)[0]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        with ctx.clock.phase(ALL_TO_ALL, "gather_tokens"):
            return gather_all_tokens([grad], [ctx.cuts], ctx.trade)[0], None, None, None


def _places_by_dtype(tensors: Sequence[Tensor]) -> list[list[int]]:
    """Places of the tensors of each data type, in the order in which the types come first: equal on every rank."""
    places: dict[torch.dtype, list[int]] = {}
    for place, tensor in enumerate(tensors):
        places.setdefault(tensor.dtype, []).append(place)
    return list(places.values())


def _size(cut: Range) -> int:
    return cut[1] - cut[0]
