"""Which rectangles of the attention matrix a group has to compute, and which KV has to travel for them.

A group holds intervals of positions (`ds_hetero.values.placement.Lane.intervals`); its queries and keys are numbered
locally, in order of position. A document is an interval of positions whose tokens see each other; causality and a
sliding window act inside it. Everything here is integer arithmetic, done once per batch layout:

    Block      local query range x local key range, with the bounds of its band of visible pairs
    RingTable  per ring step: whose keys a group works on, and what it receives and sends

Positions are global, indices are local. Ranges are half open.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from typing import NamedTuple

from ds_hetero.batch.routes import Round, Routes, Transfer
from ds_hetero.values.placement import Lane, Placement, Range, Rows


class Block(NamedTuple):
    """Local queries ``q`` see those local keys ``k`` whose index difference lies in ``[lo, hi]``.

    ``lo`` and ``hi`` bound ``(key - k[0]) - (query - q[0])``; None where the bound cuts nothing off. Every query of
    the block sees at least one of its keys, and every key is seen.
    """

    q: Range
    k: Range
    lo: int | None
    hi: int | None


class _Piece(NamedTuple):
    start: int  # position
    stop: int
    local: int  # index of `start` in its group


_Pieces = Mapping[int, Sequence[_Piece]]  # by number of the document, ascending; never an empty sequence


def visible_blocks(
    q_chunks: Sequence[Range], k_chunks: Sequence[Range], documents: Sequence[Range], causal: bool, window: int | None
) -> tuple[Block, ...]:
    """Blocks that cover each visible (query, key) pair of two groups exactly once.

    Args:
        q_chunks, k_chunks: position intervals of the two groups, ascending. Either the same, or disjoint.
        documents: position intervals, ascending and disjoint.
        causal: a query sees no later key.
        window: with ``causal``, a query sees itself and the ``window - 1`` keys before it.
    """
    q_pieces = _by_document(q_chunks, documents)
    k_pieces = q_pieces if list(q_chunks) == list(k_chunks) else _by_document(k_chunks, documents)
    return _blocks(q_pieces, k_pieces, causal, window)


def _blocks(q_pieces: _Pieces, k_pieces: _Pieces, causal: bool, window: int | None) -> tuple[Block, ...]:
    if causal and window is None and q_pieces is k_pieces:
        # Local order is the order of positions, so a group's own part of a document is one causal triangle.
        ranges = [(pieces[0].local, _end(pieces)) for pieces in q_pieces.values()]
        return tuple(Block(r, r, None, 0) for r in ranges)
    visible: list[Block] = []
    for document in sorted(q_pieces.keys() & k_pieces.keys()):
        pairs = product(q_pieces[document], k_pieces[document])
        visible += _merge([block for q, k in pairs if (block := _block(q, k, causal, window))])
    return tuple(visible)


def _by_document(chunks: Sequence[Range], documents: Sequence[Range]) -> dict[int, list[_Piece]]:
    """The pieces of each document that lie in ``chunks``; neighbours in position and index are joined."""
    pieces: dict[int, list[_Piece]] = {}
    local = 0
    for start, stop in chunks:
        # The first document that may reach into the chunk begins at or before it; the last begins before its end.
        first = max(bisect_right(documents, (start, math.inf)) - 1, 0)
        shift = local - start
        for number in range(first, bisect_left(documents, (stop, stop), first)):
            begin, end = documents[number]
            begin, end = (
                begin if begin > start else start,
                end if end < stop else stop,
            )  # max and min take twice as long
            if begin >= end:
                continue
            if number not in pieces:
                pieces[number] = [_Piece(begin, end, begin + shift)]
            elif pieces[number][-1].stop == begin:
                pieces[number][-1] = pieces[number][-1]._replace(stop=end)
            else:
                pieces[number].append(_Piece(begin, end, begin + shift))
        local += stop - start
    return pieces


def _end(pieces: Sequence[_Piece]) -> int:
    return pieces[-1].local + pieces[-1].stop - pieces[-1].start


def _block(q: _Piece, k: _Piece, causal: bool, window: int | None) -> Block | None:
    """The visible part of one piece of queries against one piece of keys, trimmed to rows and columns in use.

    Queries at positions [4, 8) see of keys at [2, 6), causal with a window of 3, the keys [2, 6); query 4 those from 2
    to 4, query 7 key 5 alone. In differences of indices, key - 2 against query - 4: from 0 to 2.
    """
    q0, q1, k0, k1 = q.start, q.stop, k.start, k.stop  # positions, narrowed to what is in use
    if causal:
        # Queries before the first key see none; no query sees a key after the last one.
        q0, k1 = max(q.start, k.start), min(k.stop, q.stop)
        if window is not None:
            # Queries too far behind the last key see none; nor is a key seen that is too far before the first query.
            q1, k0 = min(q.stop, k.stop - 1 + window), max(k.start, q.start - window + 1)
    if q0 >= q1 or k0 >= k1:
        return None
    # key <= query and key > query - window, with key and query counted from k0 and q0; None where all pairs hold it.
    hi = q0 - k0 if causal and k1 - 1 > q0 else None
    lo = q0 - k0 - window + 1 if window is not None and k0 < q1 - window else None
    first_q, first_k = q.local + q0 - q.start, k.local + k0 - k.start  # local indices
    return Block((first_q, first_q + q1 - q0), (first_k, first_k + k1 - k0), lo, hi)


def _merge(blocks: list[Block]) -> list[Block]:
    """Join full rectangles that share a side: fewer, larger kernel calls. ``blocks`` come row by row."""
    return _join(_join(blocks, along="k"), along="q") if len(blocks) > 1 else blocks


def _join(blocks: Iterable[Block], along: str) -> list[Block]:
    out: list[Block] = []
    for block in blocks:
        for i, old in enumerate(out):
            if old.lo is old.hi is block.lo is block.hi is None:
                if along == "k" and old.q == block.q and old.k[1] == block.k[0]:
                    out[i] = old._replace(k=(old.k[0], block.k[1]))
                    break
                if along == "q" and old.k == block.k and old.q[1] == block.q[0]:
                    out[i] = old._replace(q=(old.q[0], block.q[1]))
                    break
        else:
            out.append(block)
    return out


@dataclass(frozen=True, eq=False)
class RingTable:
    """The work and the messages of every ring step, for one lane of a placement and one mask.

    Positions in the table count the lane's members; `ds_hetero.batch.routes` says which way KV travels round these.
    In forward step t every position works on the KV of one source, its own first, and in backward step j on that of
    forward step ``steps - 1 - j``, its own last, so that blocks walk back: the KV that came last in the forward is
    still there, and dK/dV come home under the local block.

    Sender and receiver post a transfer in the same round. That costs nothing when all blocks are needed everywhere, and
    keeps backends with stream-ordered point-to-point calls (NCCL) free of deadlock when they are not.

    A group asks for its own blocks and rounds only. What it has to know of the others, which of their keys travel and
    to whom, takes time in proportion to the pieces into which the lane's documents are cut.
    """

    placement: Placement
    lane: Lane
    causal: bool
    window: int | None

    @cached_property
    def size(self) -> int:
        """Members of the lane: K."""
        return len(self.lane.members)

    def blocks(self, q: int, k: int) -> tuple[tuple[Rows, tuple[Block, ...]], ...]:
        """Blocks of the queries at ring position ``q`` against the keys at ``k``, for each set of batch rows."""
        return tuple(
            (rows, _blocks(pieces[q], pieces[k], self.causal, self.window))
            for rows, pieces in zip(self.placement.rows, self._pieces, strict=True)
        )

    def columns(self, source: int) -> tuple[Range, ...]:
        """Local keys of ``source`` that travel because other groups need them: ascending ranges, with gaps."""
        return self._columns[source]

    def reads(self, position: int, source: int) -> bool:
        """Whether the group at ``position`` needs KV of the group at ``source``, another one."""
        return position in self._readers[source]

    def num_columns(self, transfer: Transfer) -> int:
        """Keys whose KV, or gradient, a transfer carries."""
        if transfer.part is not None:
            return transfer.part.stop - transfer.part.start
        return self._widths[transfer.source]

    @cached_property
    def steps(self) -> int:
        """Steps of the forward, and of the backward: members of the lane, or more where nodes differ."""
        return self._routes.steps

    def forward_source(self, position: int, step: int) -> int | None:
        """Ring position whose KV ``position`` works on in a forward step, its own first; None if on none."""
        return self._routes.source_at(position, step)

    def kept(self, position: int) -> int | None:
        """The remote source whose KV ``position`` keeps for the backward."""
        return self._routes.kept(position)

    def forward_rounds(self, position: int) -> tuple[Round, ...]:
        """KV that ``position`` receives and sends in every round of the forward."""
        return self._routes.forward(position)

    def backward_kv_rounds(self, position: int) -> tuple[Round, ...]:
        """KV that ``position`` receives and sends in every round of the backward."""
        return self._routes.backward_kv(position)

    def backward_grad_rounds(self, position: int) -> tuple[Round, ...]:
        """Gradients dK/dV that ``position`` receives and sends in every round of the backward."""
        return self._routes.backward_grads(position)

    @cached_property
    def _routes(self) -> Routes:
        nodes = self.lane.nodes or (0,) * self.size
        return Routes(nodes, self._readers, self._widths, proxies=self.lane.proxies)

    @cached_property
    def _widths(self) -> list[int]:
        return [sum(stop - start for start, stop in columns) for columns in self._columns]

    @cached_property
    def _pieces(self) -> tuple[tuple[_Pieces, ...], ...]:
        """Pieces of documents ``[set of rows][position]``."""
        pieces = []
        for rows in self.placement.rows:
            pieces.append(tuple(_by_document(intervals, rows.documents) for intervals in self.lane.intervals))
        return tuple(pieces)

    @cached_property
    def _readers(self) -> tuple[set[int], ...]:
        return self._travels[0]

    @cached_property
    def _columns(self) -> tuple[tuple[Range, ...], ...]:
        return self._travels[1]

    @cached_property
    def _travels(self) -> tuple[tuple[set[int], ...], tuple[tuple[Range, ...], ...]]:
        """Positions that need keys of a source, and the keys that travel, both by source."""
        readers: tuple[set[int], ...] = tuple(set() for _ in range(self.size))
        columns: tuple[list[Range], ...] = tuple([] for _ in range(self.size))
        for pieces in self._pieces:
            for parts in _by_holder(pieces):
                if self.window is None:
                    self._add_prefixes(parts, readers, columns)
                else:
                    self._add_windows(parts, readers, columns)
        return readers, tuple(map(_joined, columns))

    def _add_prefixes(self, parts: _Pieces, readers: Sequence[set[int]], columns: Sequence[list[Range]]) -> None:
        """Add what travels of one document, held in ``parts``, of which a group sees all before its last token."""
        # Keys that a position needs end where its last query does, or for all where the last of all does.
        reach = {position: pieces[-1].stop for position, pieces in parts.items()}
        if not self.causal:
            reach = dict.fromkeys(parts, max(reach.values()))
        furthest, second = sorted(reach, key=reach.__getitem__, reverse=True)[:2]
        for source, pieces in parts.items():
            first_key = pieces[0].start
            if len(readers[source]) < self.size - 1:  # else all others read it already
                readers[source].update(reader for reader in parts if reach[reader] > first_key and reader != source)
            furthest_other = second if source == furthest else furthest
            columns[source].extend(_clipped(pieces, 0, reach[furthest_other]))

    def _add_windows(self, parts: _Pieces, readers: Sequence[set[int]], columns: Sequence[list[Range]]) -> None:
        """Add what travels of one document where a query sees the last ``window`` tokens only."""
        assert self.window is not None
        for reader, queries in parts.items():
            for source, keys in parts.items():
                if reader == source:
                    continue
                visible: list[Range] = []
                for query in queries:
                    visible.extend(_clipped(keys, query.start - self.window + 1, query.stop))
                columns[source].extend(visible)
                if visible:
                    readers[source].add(reader)


def _by_holder(pieces_by_position: Sequence[_Pieces]) -> Iterator[_Pieces]:
    """The pieces of each document by position, of documents that several positions hold."""
    holders: dict[int, dict[int, Sequence[_Piece]]] = defaultdict(dict)
    for position, by_document in enumerate(pieces_by_position):
        for document, pieces in by_document.items():
            holders[document][position] = pieces
    return (parts for parts in holders.values() if len(parts) > 1)


def _clipped(pieces: Sequence[_Piece], first: int, last: int) -> Iterator[Range]:
    """Local ranges of the positions ``[first, last)`` in ``pieces``."""
    for start, stop, local in pieces:
        low, high = max(start, first), min(stop, last)
        if low < high:
            yield local + low - start, local + high - start


def _joined(ranges: Sequence[Range]) -> tuple[Range, ...]:
    """The union of ``ranges``, ascending; ranges that touch or overlap become one."""
    union: list[Range] = []
    for start, stop in sorted(ranges):
        if union and start <= union[-1][1]:
            union[-1] = (union[-1][0], max(union[-1][1], stop))
        else:
            union.append((start, stop))
    return tuple(union)
