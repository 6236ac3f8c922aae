"""Run a short causal convolution along the sequence on uneven shards.

A piece is the part of one of this rank's intervals that lies in one document. The k - 1 tokens before a piece are
fetched from the ranks that have them, or are zeros before the document's start. They are put before the piece, all
pieces go through one call of the model's convolution, and the outputs for the fetched tokens are dropped. So any kernel
can be used, and it need not know of documents.

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
from ds_hetero.runtime.recurrent.replica_all_to_all import ReplicaAllToAll, all_to_all_of
from ds_hetero.runtime.recurrent.sequences import pieces_of, sequences_of
from ds_hetero.runtime.replica import Replica
from ds_hetero.runtime.step_clock import ALL_TO_ALL, UNTIMED, Clock
from ds_hetero.values.placement import Placement, Range, Rows

_MAX_COPIED_RUNS = 16  # with more runs, tokens are copied by their indices; chosen, never measured


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
        compute: the convolution of sequences, [B, C, n] -> [B, C, n], each token with the k - 1 before it.

    Caller: every rank of the replica, once per layer.
    Collectives: one all_to_all_single forward, one backward; none if no rank needs a token of another.
    """
    halo, all_to_all = _halo(replica, batch, size - 1), all_to_all_of(replica, batch)
    parts = [x]
    if halo.is_used:
        parts.append(_Fetch.apply(x, halo, all_to_all, clock))  # type: ignore[no-untyped-call]
    source = torch.cat([*parts, x.new_zeros(*x.shape[:2], 1)], 2)
    rows = []
    for reads in halo.rows:
        out = compute(_copy_tokens(source[reads.start : reads.stop], reads.read, halo))
        if reads.keeps_zeros:
            out = nn.functional.pad(out, (0, 1))
        rows.append(_copy_tokens(out, reads.kept, halo))
    return torch.cat(rows) if len(rows) > 1 else rows[0]


def _copy_tokens(x: Tensor, indices: _Indices, halo: _Halo) -> Tensor:
    """Return the tokens of ``x`` [B, C, n] at ``indices``: a view if they are one run, else a copy.

    Few runs are copied run by run, which is faster than token by token.
    """
    if len(indices.runs) > _MAX_COPIED_RUNS:
        return x.index_select(2, halo.on(x.device, indices.each))
    parts = [x[:, :, start:stop] for start, stop in indices.runs or ((0, 0),)]
    return torch.cat(parts, 2) if len(parts) > 1 else parts[0]


class _Indices(NamedTuple):
    """Indices of tokens, one by one, and as runs ``[start, stop)`` of consecutive ones."""

    each: Tensor
    runs: tuple[Range, ...]

    @classmethod
    def of(cls, each: Tensor) -> _Indices:
        """Find the runs of indices. Example: 4 5 6 9 10 has the runs (4, 7) and (9, 11)."""
        # A run ends where the next index is not the next number: the example is cut before its fourth entry.
        cuts = [0, *(torch.nonzero(each.diff() != 1).flatten() + 1).tolist(), len(each)]
        indices = each.tolist()
        runs = [(indices[first], indices[stop - 1] + 1) for first, stop in pairwise(cuts) if first < stop]
        return cls(each, tuple(runs))


class _Reads(NamedTuple):
    """Tokens of batch rows ``[start, stop)`` that go through the convolution, and the outputs that are kept.

    Attributes:
        read: indices in the tensor of this rank's tokens, the fetched tokens and one zero.
        kept: indices in the output, for each of this rank's tokens; the index behind its end for a token outside of all
            documents, whose output is zero.
        keeps_zeros: this rank has tokens outside of all documents.
    """

    start: int
    stop: int
    read: _Indices
    kept: _Indices
    keeps_zeros: bool


@dataclass(frozen=True, eq=False)
class _Halo:
    """Tables of the tokens that ranks fetch from each other, and of this rank's convolution.

    Attributes:
        sent_indices: for each rank of the replica, the indices of this rank's tokens that the other rank fetches.
        num_received: for each rank of the replica, how many tokens of that rank this rank fetches.
        is_used: some rank fetches a token; the same on all ranks.
        rows: for each set of batch rows with the same documents, what the convolution reads and which outputs are kept.
    """

    sent_indices: tuple[Tensor, ...]
    num_received: tuple[int, ...]
    is_used: bool
    rows: tuple[_Reads, ...]
    _copies: dict[tuple[torch.device, int], Tensor] = field(default_factory=dict, repr=False)

    def on(self, device: torch.device, index: Tensor) -> Tensor:
        """Return one of the index tensors on ``device``; it is copied there once."""
        key = device, id(index)
        if key not in self._copies:
            self._copies[key] = copied_to(index, device)
        return self._copies[key]


class _Fetch(torch.autograd.Function):
    """Fetches h tokens from other ranks, [B, C, s] -> [B, C, h]; the backward returns their gradients."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, halo: _Halo, all_to_all: ReplicaAllToAll, clock: Clock) -> Tensor:
        ctx.halo, ctx.all_to_all, ctx.clock, ctx.shape = halo, all_to_all, clock, x.shape
        by_token = x.permute(2, 0, 1)
        with clock.phase(ALL_TO_ALL, "fetch_halo"):
            messages = [by_token[halo.on(x.device, index)] for index in halo.sent_indices]
            received = all_to_all.exchange(messages, [(count, *by_token.shape[1:]) for count in halo.num_received])
        return torch.cat(received).permute(1, 2, 0)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        batch_size, channels, tokens = ctx.shape
        halo: _Halo = ctx.halo
        dx = grad.new_zeros(tokens, batch_size, channels)
        with ctx.clock.phase(ALL_TO_ALL, "return_halo"):
            messages = grad.permute(2, 0, 1).split_with_sizes(list(halo.num_received))
            received = ctx.all_to_all.exchange(
                messages, [(len(index), batch_size, channels) for index in halo.sent_indices]
            )
        for index, part in zip(halo.sent_indices, received, strict=True):  # several ranks may have fetched a token
            dx.index_add_(0, halo.on(grad.device, index), part)
        return dx.permute(1, 2, 0), None, None, None


@lru_cache(maxsize=64)
def _halo(replica: Replica, batch: BatchLayout, reach: int) -> _Halo:
    """Return this rank's tables for a convolution that reads the ``reach`` tokens before each token.

    Every rank derives them from the placement, so that sender and receiver agree without a message.
    """
    sequences, holders = sequences_of(batch), _Holders(batch.placement)
    sent_indices: list[Tensor] = []
    num_received: list[int] = []
    fetched: list[int] = []  # positions that this rank fetches, in the order in which they arrive
    is_used = False
    for rank in replica.ranks:
        needed = _needed(holders, rank, sequences, reach)
        is_used |= any(needed.values())
        # Sender and receiver list positions in ascending order, so a message need not contain them.
        local_indices = [holders.holder(position).local_index for position in needed.get(replica.rank, [])]
        sent_indices.append(torch.tensor(local_indices, dtype=torch.int64))
        if rank == replica.rank:
            for owner in replica.ranks:
                num_received.append(len(needed.get(owner, [])))
                fetched += needed.get(owner, [])
    num_tokens = batch.placement.tokens(replica.rank)
    index_of_fetched = {position: num_tokens + number for number, position in enumerate(fetched)}
    zero = num_tokens + len(fetched)
    pieces = _Pieces(holders.intervals[replica.rank], holders, index_of_fetched, zero)
    return _Halo(
        sent_indices=tuple(sent_indices),
        num_received=tuple(num_received),
        is_used=is_used,
        rows=tuple(pieces.reads(rows, reach) for rows in sequences),
    )


def _needed(holders: _Holders, rank: int, sequences: Sequence[Rows], reach: int) -> dict[int, list[int]]:
    """Return the positions that ``rank`` fetches, ascending, by the rank that holds them.

    They are the ``reach`` positions before each of its pieces, inside the piece's document.
    """
    positions: set[int] = set()
    for rows in sequences:
        for document, start, _ in pieces_of(holders.intervals[rank], rows.documents):
            positions.update(range(max(document, start - reach), start))
    needed: dict[int, list[int]] = {}
    for position in sorted(positions):
        holder = holders.holder(position).rank
        if holder != rank:
            needed.setdefault(holder, []).append(position)
    return needed


class _Holder(NamedTuple):
    """Where the token of a position is."""

    rank: int
    local_index: int  # among the rank's tokens


class _Holders:
    """Finds the rank that holds a position, and the index among that rank's tokens.

    Attributes:
        intervals: position intervals of each rank.
    """

    def __init__(self, placement: Placement) -> None:
        self.intervals = {rank: placement.intervals(rank) for rank in placement.schedule.ranks}
        first_tokens: list[tuple[int, _Holder]] = []  # of every interval: its first position, and where that token is
        for rank, intervals in self.intervals.items():
            index = 0
            for start, stop in intervals:
                first_tokens.append((start, _Holder(rank, index)))
                index += stop - start
        self._first_tokens = sorted(first_tokens)
        self._starts = [start for start, _ in self._first_tokens]

    def holder(self, position: int) -> _Holder:
        """Return where the token of a position is."""
        start, first = self._first_tokens[bisect_right(self._starts, position) - 1]
        return _Holder(first.rank, first.local_index + position - start)


@dataclass(frozen=True, slots=True)
class _Pieces:
    """This rank's tokens, piece by piece, with the indices from which the convolution reads.

    The indices are those of a tensor of this rank's tokens, then the fetched tokens, then one zero.

    Attributes:
        intervals: position intervals of this rank.
        holders: finds the rank of any position.
        index_of_fetched: index of the token at each fetched position.
        zero: index of the zero.
    """

    intervals: tuple[Range, ...]
    holders: _Holders
    index_of_fetched: dict[int, int]
    zero: int

    def reads(self, rows: Rows, reach: int) -> _Reads:
        """Return the indices that the convolution reads for ``rows``, and those of its outputs that are kept.

        Before each piece stand ``reach`` tokens: tokens of other ranks, which were fetched, or zeros where the piece's
        document has not begun yet. The outputs of these are dropped, those of the piece are kept.

        Example: reach 2, and a piece of 3 tokens with indices 5, 6, 7. The token before the piece was fetched, has
        index 9, and is the first of the document; before it stands the zero, with index 10. The convolution reads
        10 9 5 6 7, and its outputs 2, 3 and 4 are kept.
        """
        read: list[Tensor] = []
        num_tokens = sum(stop - start for start, stop in self.intervals)
        kept = torch.full((num_tokens,), -1, dtype=torch.int64)
        num_read = 0
        for document, start, stop in pieces_of(self.intervals, rows.documents):
            before = [self._index(position, document) for position in range(start - reach, start)]
            index, count = self._index(start, document), stop - start
            read += [torch.tensor(before, dtype=torch.int64), torch.arange(index, index + count)]
            first_output = num_read + reach
            kept[index : index + count] = torch.arange(first_output, first_output + count)
            num_read += reach + count
        if not read:  # convolve a zero, since ZeRO needs gradients of the convolution's parameters on every rank
            read, num_read = [torch.tensor([self.zero])], 1
        is_outside = kept < 0
        kept[is_outside] = num_read
        return _Reads(rows.start, rows.stop, _Indices.of(torch.cat(read)), _Indices.of(kept), bool(is_outside.any()))

    def _index(self, position: int, document: int) -> int:
        """Return the index of a position's token; ``zero`` for a position before the document's start."""
        if position < document:
            return self.zero
        if position in self.index_of_fetched:
            return self.index_of_fetched[position]
        return self.holders.holder(position).local_index
