"""A short causal convolution along the sequence: the few tokens before each piece of a shard come from their holders.

A piece is the part of one interval of this rank's that lies in one document. Each is put behind its predecessors, zeros
before the document's start; all pieces go through one call of the model's convolution, and the outputs at predecessors
are dropped. So any kernel serves, and none needs to know of documents.

Dimension key: B batch, C channels, s this rank's tokens, k size of the convolution.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ds_hetero.runtime.attention.batch_layout import BatchLayout
from ds_hetero.runtime.devices import copied_to
from ds_hetero.runtime.recurrent.head_trade import HeadTrade, head_trade
from ds_hetero.runtime.recurrent.sequences import pieces_of, sequences_of
from ds_hetero.runtime.replica import Replica
from ds_hetero.runtime.step_clock import ALL_TO_ALL, UNTIMED, Clock
from ds_hetero.values.placement import Placement, Range, Rows

_FEW_RUNS = 16  # from which on tokens are picked one by one


def convolution(
    x: Tensor,
    size: int,
    compute: Callable[[Tensor], Tensor],
    replica: Replica,
    batch: BatchLayout,
    clock: Clock = UNTIMED,
) -> Tensor:
    """Run a causal convolution over the whole sequence; return this rank's tokens of the output.

    Args:
        x: this rank's tokens, [B, C, s].
        size: k, of the convolution.
        compute: the convolution of sequences [B, C, n], each token with the k - 1 before it: [B, C, n].

    Caller: every rank of the replica, once per layer.
    Collectives: one all_to_all_single forward, one backward; none where no rank needs a token of another.
    """
    halo, trade = _halo(replica, batch, size - 1), head_trade(replica, batch)
    parts = [x]
    if halo.is_used:
        parts.append(_Fetch.apply(x, halo, trade, clock))  # type: ignore[no-untyped-call]
    source = torch.cat([*parts, x.new_zeros(*x.shape[:2], 1)], 2)
    rows = []
    for reads in halo.rows:
        out = compute(_chosen(source[reads.start : reads.stop], reads.read, halo))
        if reads.keeps_zeros:
            out = nn.functional.pad(out, (0, 1))
        rows.append(_chosen(out, reads.kept, halo))
    return torch.cat(rows) if len(rows) > 1 else rows[0]


def _chosen(x: Tensor, places: _Places, halo: _Halo) -> Tensor:
    """Copy ``x`` [B, C, n] at some of its tokens; runs of tokens are copied whole, a single run not at all."""
    if len(places.runs) > _FEW_RUNS:
        return x.index_select(2, halo.on(x.device, places.each))
    parts = [x[:, :, start:stop] for start, stop in places.runs or ((0, 0),)]
    return torch.cat(parts, 2) if len(parts) > 1 else parts[0]


class _Places(NamedTuple):
    """Places of tokens, one by one and as runs ``[start, stop)`` of ascending ones."""

    each: Tensor
    runs: tuple[Range, ...]

    @classmethod
    def of(cls, each: Tensor) -> _Places:
        """Find the runs."""
        cuts = [0, *(torch.nonzero(each.diff() != 1).flatten() + 1).tolist(), len(each)]
        places = each.tolist()
        return cls(each, tuple((places[a], places[b - 1] + 1) for a, b in pairwise(cuts) if a < b))


class _Reads(NamedTuple):
    """Batch rows ``[start, stop)``: what goes through the convolution, and what is kept of it.

    ``read`` are places in [own tokens, fetched tokens, one zero]; ``kept`` are for every own token its place in the
    output, one behind the end for zero, if ``keeps_zeros``.
    """

    start: int
    stop: int
    read: _Places
    kept: _Places
    keeps_zeros: bool


@dataclass(frozen=True, eq=False)
class _Halo:
    """The tokens before this rank's intervals."""

    give: tuple[Tensor, ...]  # for each rank, the own tokens that it needs
    take: tuple[int, ...]  # how many tokens come from each rank
    is_used: bool  # some rank needs one of another
    rows: tuple[_Reads, ...]
    _copies: dict[tuple[torch.device, int], Tensor] = field(default_factory=dict, repr=False)

    def on(self, device: torch.device, index: Tensor) -> Tensor:
        """Return one of the index tensors on ``device``; copied once."""
        key = device, id(index)
        if key not in self._copies:
            self._copies[key] = copied_to(index, device)
        return self._copies[key]


class _Fetch(torch.autograd.Function):
    """[B, C, s] to [B, C, h]: the tokens of other ranks that this one needs."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, halo: _Halo, trade: HeadTrade, clock: Clock) -> Tensor:
        ctx.halo, ctx.trade, ctx.clock, ctx.shape = halo, trade, clock, x.shape
        by_token = x.permute(2, 0, 1)
        with clock.phase(ALL_TO_ALL, "fetch_halo"):
            send = [by_token[halo.on(x.device, index)] for index in halo.give]
            got = trade.exchange(send, [(count, *by_token.shape[1:]) for count in halo.take])
        return torch.cat(got).permute(1, 2, 0)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        batch_size, channels, tokens = ctx.shape
        halo: _Halo = ctx.halo
        dx = grad.new_zeros(tokens, batch_size, channels)
        with ctx.clock.phase(ALL_TO_ALL, "return_halo"):
            send = grad.permute(2, 0, 1).split_with_sizes(list(halo.take))
            got = ctx.trade.exchange(send, [(len(index), batch_size, channels) for index in halo.give])
        for index, part in zip(halo.give, got, strict=True):
            dx.index_add_(0, halo.on(grad.device, index), part)
        return dx.permute(1, 2, 0), None, None, None


@lru_cache(maxsize=64)
def _halo(replica: Replica, batch: BatchLayout, reach: int) -> _Halo:
    """Tables for a convolution that looks ``reach`` tokens back; every rank derives them from the batch's layout."""
    sequences, places = sequences_of(batch), _Holders(batch.placement)
    needs = [_needed(places.intervals[rank], sequences, reach) for rank in replica.ranks]
    for rank, needed in zip(replica.ranks, needs, strict=True):
        needed -= {position for position in needed if places.holder(position)[0] == rank}
    held = {rank: [places.holder(p)[1] for p in sorted(needed) if places.holder(p)[0] == replica.rank]
            for rank, needed in zip(replica.ranks, needs, strict=True)}  # fmt: skip
    own_needs = needs[replica.ranks.index(replica.rank)]
    fetched = sorted(own_needs, key=lambda position: (places.holder(position)[0], position))
    takes = [sum(places.holder(position)[0] == rank for position in fetched) for rank in replica.ranks]
    own = batch.placement.tokens(replica.rank)
    zero = own + len(fetched)
    place_of = {position: own + i for i, position in enumerate(fetched)}
    pieces = _Pieces(places.intervals[replica.rank], places, replica.rank, place_of, zero)
    return _Halo(
        give=tuple(torch.tensor(held[rank], dtype=torch.int64) for rank in replica.ranks),
        take=tuple(takes),
        is_used=any(needs),
        rows=tuple(pieces.reads(rows, reach) for rows in sequences),
    )


def _needed(intervals: Sequence[Range], sequences: Sequence[Rows], reach: int) -> set[int]:
    """Return positions before the pieces of these intervals, inside their documents."""
    return {
        position
        for rows in sequences
        for first, start, _ in pieces_of(intervals, rows.documents)
        for position in range(max(first, start - reach), start)
    }


class _Holders:
    """Rank of a position, and the place among that rank's tokens."""

    def __init__(self, placement: Placement) -> None:
        self.intervals = {rank: placement.intervals(rank) for rank in placement.schedule.ranks}
        held = []
        for rank, intervals in self.intervals.items():
            local = 0
            for start, stop in intervals:
                held.append((start, rank, local))
                local += stop - start
        self._held = sorted(held)
        self._starts = [start for start, _, _ in self._held]

    def holder(self, position: int) -> tuple[int, int]:
        """(rank, place among the rank's tokens) of a position."""
        start, rank, local = self._held[bisect_right(self._starts, position) - 1]
        return rank, local + position - start


@dataclass(frozen=True, slots=True)
class _Pieces:
    """This rank's tokens, piece by piece."""

    intervals: tuple[Range, ...]
    places: _Holders  # of all positions
    rank: int
    fetched: dict[int, int]  # place of every fetched position behind the own tokens
    zero: int  # place of the zero

    def reads(self, rows: Rows, reach: int) -> _Reads:
        """Return the tables of some rows of the batch."""
        read: list[Tensor] = []
        own = sum(stop - start for start, stop in self.intervals)
        kept = torch.full((own,), -1, dtype=torch.int64)
        at = 0
        for first, start, stop in pieces_of(self.intervals, rows.documents):
            before = [self._place(position, first) for position in range(start - reach, start)]
            local, count = self._place(start, first), stop - start
            read += [torch.tensor(before, dtype=torch.int64), torch.arange(local, local + count)]
            kept[local : local + count] = torch.arange(at + reach, at + reach + count)
            at += reach + count
        if not read:  # a zero goes through: ZeRO needs gradients of the convolution's parameters here too
            read, at = [torch.tensor([self.zero])], 1
        is_outside = kept < 0
        kept[is_outside] = at
        return _Reads(rows.start, rows.stop, _Places.of(torch.cat(read)), _Places.of(kept), bool(is_outside.any()))

    def _place(self, position: int, first: int) -> int:
        """Return where a position is read; the zeros before the document's ``first``."""
        if position < first:
            return self.zero
        if position in self.fetched:
            return self.fetched[position]
        return self.places.holder(position)[1]
