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

_FEW_RUNS = 16  # above so many runs tokens are picked one by one; chosen, never measured


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
        # A run ends where the next place is not the next number: 4 5 6 9 10 is cut before its fourth entry.
        cuts = [0, *(torch.nonzero(each.diff() != 1).flatten() + 1).tolist(), len(each)]
        places = each.tolist()
        runs = [(places[first], places[stop - 1] + 1) for first, stop in pairwise(cuts) if first < stop]
        return cls(each, tuple(runs))


class _Reads(NamedTuple):
    """Tokens of batch rows ``[start, stop)`` that go through the convolution, and those of its output that are kept."""

    start: int
    stop: int
    read: _Places  # in [own tokens, fetched tokens, one zero]
    kept: _Places  # in the output, for every own token; behind its end for tokens outside of documents
    keeps_zeros: bool  # there are such tokens


@dataclass(frozen=True, eq=False)
class _Halo:
    """The tokens before this rank's intervals."""

    give: tuple[Tensor, ...]  # by rank of the replica: this rank's tokens that it needs
    take: tuple[int, ...]  # by rank of the replica: how many tokens come from it
    is_used: bool  # some rank needs a token of another; the same on all
    rows: tuple[_Reads, ...]
    _copies: dict[tuple[torch.device, int], Tensor] = field(default_factory=dict, repr=False)

    def on(self, device: torch.device, index: Tensor) -> Tensor:
        """Return one of the index tensors on ``device``; copied once."""
        key = device, id(index)
        if key not in self._copies:
            self._copies[key] = copied_to(index, device)
        return self._copies[key]


class _Fetch(torch.autograd.Function):
    """Fetches the tokens of other ranks that this one needs: [B, C, s] -> [B, C, h]."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, halo: _Halo, trade: HeadTrade, clock: Clock) -> Tensor:
        ctx.halo, ctx.trade, ctx.clock, ctx.shape = halo, trade, clock, x.shape
        by_token = x.permute(2, 0, 1)
        with clock.phase(ALL_TO_ALL, "fetch_halo"):
            messages = [by_token[halo.on(x.device, index)] for index in halo.give]
            received = trade.exchange(messages, [(count, *by_token.shape[1:]) for count in halo.take])
        return torch.cat(received).permute(1, 2, 0)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        batch_size, channels, tokens = ctx.shape
        halo: _Halo = ctx.halo
        dx = grad.new_zeros(tokens, batch_size, channels)
        with ctx.clock.phase(ALL_TO_ALL, "return_halo"):
            messages = grad.permute(2, 0, 1).split_with_sizes(list(halo.take))
            received = ctx.trade.exchange(messages, [(len(index), batch_size, channels) for index in halo.give])
        for index, part in zip(halo.give, received, strict=True):  # several ranks may have read a token
            dx.index_add_(0, halo.on(grad.device, index), part)
        return dx.permute(1, 2, 0), None, None, None


@lru_cache(maxsize=64)
def _halo(replica: Replica, batch: BatchLayout, reach: int) -> _Halo:
    """Tables for a convolution that looks ``reach`` tokens back; every rank derives them from the batch's layout."""
    sequences, holders = sequences_of(batch), _Holders(batch.placement)
    give: list[Tensor] = []
    take: list[int] = []
    fetched: list[int] = []  # positions that this rank fetches, in the order in which they arrive
    is_used = False
    for rank in replica.ranks:
        needed = _needed(holders, rank, sequences, reach)
        is_used |= any(needed.values())
        # Both ends list positions in ascending order, so that a message need not say which they are.
        give.append(torch.tensor([holders.holder(p)[1] for p in needed.get(replica.rank, [])], dtype=torch.int64))
        if rank == replica.rank:
            for owner in replica.ranks:
                take.append(len(needed.get(owner, [])))
                fetched += needed.get(owner, [])
    num_own = batch.placement.tokens(replica.rank)
    place_of_fetched = {position: num_own + number for number, position in enumerate(fetched)}
    zero = num_own + len(fetched)
    pieces = _Pieces(holders.intervals[replica.rank], holders, replica.rank, place_of_fetched, zero)
    return _Halo(
        give=tuple(give),
        take=tuple(take),
        is_used=is_used,
        rows=tuple(pieces.reads(rows, reach) for rows in sequences),
    )


def _needed(holders: _Holders, rank: int, sequences: Sequence[Rows], reach: int) -> dict[int, list[int]]:
    """Return the positions that a rank needs of others, ascending, by the rank that holds them.

    They are the ``reach`` positions before each of its pieces, inside of the piece's document.
    """
    positions: set[int] = set()
    for rows in sequences:
        for document, start, _ in pieces_of(holders.intervals[rank], rows.documents):
            positions.update(range(max(document, start - reach), start))
    needed: dict[int, list[int]] = {}
    for position in sorted(positions):
        holder, _ = holders.holder(position)
        if holder != rank:
            needed.setdefault(holder, []).append(position)
    return needed


class _Holders:
    """Rank of each position, and the place among that rank's tokens."""

    def __init__(self, placement: Placement) -> None:
        self.intervals = {rank: placement.intervals(rank) for rank in placement.schedule.ranks}
        begins = []  # of every interval: its first position, the rank, and the place there
        for rank, intervals in self.intervals.items():
            place = 0
            for start, stop in intervals:
                begins.append((start, rank, place))
                place += stop - start
        self._begins = sorted(begins)
        self._starts = [start for start, _, _ in self._begins]

    def holder(self, position: int) -> tuple[int, int]:
        """Return (rank, place among the rank's tokens) of a position."""
        start, rank, place = self._begins[bisect_right(self._starts, position) - 1]
        return rank, place + position - start


@dataclass(frozen=True, slots=True)
class _Pieces:
    """This rank's tokens, piece by piece."""

    intervals: tuple[Range, ...]
    places: _Holders  # of all positions
    rank: int
    fetched: dict[int, int]  # place of every fetched position, behind the own tokens
    zero: int  # place of the zero

    def reads(self, rows: Rows, reach: int) -> _Reads:
        """Return the tables of some rows of the batch.

        Example: reach 2, a piece of 3 own tokens with places 5, 6, 7, before which stand a fetched token (place 9) and
        the beginning of the document, for which the zero (place 10) is read. It reads 10 9 5 6 7; the outputs 2, 3 and
        4 are kept.
        """
        read: list[Tensor] = []
        num_own = sum(stop - start for start, stop in self.intervals)
        kept = torch.full((num_own,), -1, dtype=torch.int64)
        num_read = 0
        for document, start, stop in pieces_of(self.intervals, rows.documents):
            before = [self._place(position, document) for position in range(start - reach, start)]
            place, count = self._place(start, document), stop - start
            read += [torch.tensor(before, dtype=torch.int64), torch.arange(place, place + count)]
            first_output = num_read + reach
            kept[place : place + count] = torch.arange(first_output, first_output + count)
            num_read += reach + count
        if not read:  # a zero goes through: ZeRO needs gradients of the convolution's parameters here too
            read, num_read = [torch.tensor([self.zero])], 1
        is_outside = kept < 0
        kept[is_outside] = num_read
        return _Reads(rows.start, rows.stop, _Places.of(torch.cat(read)), _Places.of(kept), bool(is_outside.any()))

    def _place(self, position: int, document: int) -> int:
        """Return the place that a position is read from; the zero for positions before the document's start."""
        if position < document:
            return self.zero
        if position in self.fetched:
            return self.fetched[position]
        return self.places.holder(position)[1]
