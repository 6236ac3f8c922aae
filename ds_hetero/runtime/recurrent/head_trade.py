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
    """Who holds which tokens of a batch."""

    tokens: tuple[int, ...]  # by rank of the replica
    index: int  # which of them this rank is
    process_group: ProcessGroup
    positions: Tensor | None  # of every token, by rank and place there; None where they ascend
    _positions_on: dict[torch.device, Tensor] = field(default_factory=dict, repr=False)

    @property
    def length(self) -> int:
        """Tokens of the whole sequence: L."""
        return sum(self.tokens)

    def positions_on(self, device: torch.device) -> Tensor:
        """``positions`` there; copied once."""
        assert self.positions is not None
        if device not in self._positions_on:
            self._positions_on[device] = copied_to(self.positions, device)
        return self._positions_on[device]

    def exchange(self, send: Sequence[Tensor], shapes: Sequence[tuple[int, ...]]) -> list[Tensor]:
        """Trade ``send`` for what came from each, of these shapes. Collectives: one all_to_all_single."""
        flat = torch.cat([part.reshape(-1) for part in send])
        sizes = [prod(shape) for shape in shapes]
        recv = flat.new_empty(sum(sizes))
        with waiting_for_peers("exchanging heads and tokens of a recurrent layer"):
            dist.all_to_all_single(recv, flat, sizes, [part.numel() for part in send], group=self.process_group)
        return [part.view(shape) for part, shape in zip(recv.split_with_sizes(sizes), shapes, strict=True)]


@lru_cache(maxsize=64)
def head_trade(replica: Replica, batch: BatchLayout) -> HeadTrade:
    """Return the tables of a batch; made once and kept."""
    placement = batch.placement
    index = replica.ranks.index(replica.rank)
    return HeadTrade(placement.rank_tokens, index, replica.sp_group, _positions(placement))


def _positions(placement: Placement) -> Tensor | None:
    held = [interval for rank in placement.schedule.ranks for interval in placement.intervals(rank)]
    if held == sorted(held):
        return None
    return torch.cat([torch.arange(start, stop) for start, stop in held])


def shared_heads(cuts: Cuts, heads_each: int) -> Cuts:
    """Return the heads that ranks need of a tensor whose every head serves ``heads_each`` of the heads that are cut."""
    return tuple((start // heads_each, -(-stop // heads_each)) if start < stop else (0, 0) for start, stop in cuts)


def gather_all_tokens(tensors: Sequence[Tensor], cuts: Sequence[Cuts], trade: HeadTrade) -> list[Tensor]:
    """Trade this rank's tokens of every head for all tokens of its own heads.

        tensors [B, s, N, ...], of one data type, each with its ``cuts``
        result  [B, L, n, ...] in the order of the sequence

    Collectives: one all_to_all_single.
    """
    batch_size, me = tensors[0].shape[0], trade.index
    send = []
    for rank in range(len(trade.tokens)):
        heads = [x[:, :, slice(*cut[rank])].flatten(2) for x, cut in zip(tensors, cuts, strict=True)]
        send.append(torch.cat(heads, 2).transpose(0, 1))
    widths = [_size(cut[me]) * prod(x.shape[3:]) for x, cut in zip(tensors, cuts, strict=True)]
    got = torch.cat(trade.exchange(send, [(tokens, batch_size, sum(widths)) for tokens in trade.tokens]))
    if trade.positions is not None:
        ordered = torch.empty_like(got)
        ordered[trade.positions_on(got.device)] = got
        got = ordered
    parts = got.transpose(0, 1).split_with_sizes(widths, 2)
    return [
        part.reshape(*part.shape[:2], _size(cut[me]), *x.shape[3:])
        for part, x, cut in zip(parts, tensors, cuts, strict=True)
    ]


def scatter_tokens(
    tensors: Sequence[Tensor], cuts: Sequence[Cuts], heads: Sequence[int], trade: HeadTrade
) -> list[Tensor]:
    """Mirror of `gather_all_tokens`: [B, L, n, ...] to [B, s, N, ...], adding. Collectives: one all_to_all_single."""
    batch_size, own = tensors[0].shape[0], trade.tokens[trade.index]
    packed = torch.cat([x.flatten(2) for x in tensors], 2).transpose(0, 1)
    if trade.positions is not None:
        packed = packed[trade.positions_on(packed.device)]
    units = [prod(x.shape[3:]) for x in tensors]
    widths = [
        [_size(cut[rank]) * unit for cut, unit in zip(cuts, units, strict=True)] for rank in range(len(trade.tokens))
    ]
    got = trade.exchange(packed.split_with_sizes(list(trade.tokens)), [(own, batch_size, sum(each)) for each in widths])
    results = [x.new_zeros(own, batch_size, count, *x.shape[3:]) for x, count in zip(tensors, heads, strict=True)]
    for rank, (part, each) in enumerate(zip(got, widths, strict=True)):
        for result, piece, cut in zip(results, part.split_with_sizes(each, 2), cuts, strict=True):
            result[:, :, slice(*cut[rank])] += piece.reshape(*piece.shape[:2], _size(cut[rank]), *result.shape[3:])
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
