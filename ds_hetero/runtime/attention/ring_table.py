"""Which rectangles of the attention matrix a group has to compute, and which KV has to travel for them.

A group holds intervals of positions (`ds_hetero.placement.Lane.intervals`); its queries and keys are numbered locally,
in order of position. A document is an interval of positions whose tokens see each other; causality and a
sliding window act inside it. Everything here is integer arithmetic, done once per batch layout:

    Block      local query range x local key range, with the band of `ds_hetero.runtime.attention.kernels.Band`
    RingTable  per ring step: what each group receives and from whom, forward and backward

Positions are global, indices are local. Ranges are half open.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import NamedTuple

from ds_hetero.placement import Lane, Placement, Range, Rows

__all__ = ["Block", "RingTable", "Transfer", "visible_blocks"]


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


def visible_blocks(
    q_chunks: Sequence[Range],
    k_chunks: Sequence[Range],
    documents: Sequence[Range],
    causal: bool,
    window: int | None,
) -> tuple[Block, ...]:
    """Blocks that cover each visible (query, key) pair of two groups exactly once.

    Args:
        q_chunks, k_chunks: position intervals of the two groups, ascending. Either the same, or disjoint.
        documents: position intervals, ascending and disjoint.
        causal: a query sees no later key.
        window: with ``causal``, a query sees itself and the ``window - 1`` keys before it.
    """
    if causal and window is None and list(q_chunks) == list(k_chunks):
        # Local order is the order of positions, so a group's own part of a document is one causal triangle.
        ranges = [(pieces[0].local, _end(pieces)) for pieces in _by_document(q_chunks, documents) if pieces]
        return tuple(Block(r, r, None, 0) for r in ranges)
    visible: list[Block] = []
    for q_pieces, k_pieces in zip(_by_document(q_chunks, documents), _by_document(k_chunks, documents), strict=True):
        blocks = [block for q in q_pieces for k in k_pieces if (block := _block(q, k, causal, window))]
        visible += _merge(blocks)
    return tuple(visible)


def _by_document(chunks: Sequence[Range], documents: Sequence[Range]) -> list[list[_Piece]]:
    """The pieces of each document that lie in ``chunks``; neighbours in position and index are joined."""
    out: list[list[_Piece]] = []
    first, first_local = 0, 0  # chunks that end before this document begins are skipped for good
    for start, stop in documents:
        while first < len(chunks) and chunks[first][1] <= start:
            first_local += chunks[first][1] - chunks[first][0]
            first += 1
        pieces: list[_Piece] = []
        i, local = first, first_local
        while i < len(chunks) and chunks[i][0] < stop:
            a, b = max(chunks[i][0], start), min(chunks[i][1], stop)
            at = local + a - chunks[i][0]
            if pieces and pieces[-1].stop == a:
                pieces[-1] = pieces[-1]._replace(stop=b)
            elif a < b:
                pieces.append(_Piece(a, b, at))
            local += chunks[i][1] - chunks[i][0]
            i += 1
        out.append(pieces)
    return out


def _end(pieces: Sequence[_Piece]) -> int:
    return pieces[-1].local + pieces[-1].stop - pieces[-1].start


def _block(q: _Piece, k: _Piece, causal: bool, window: int | None) -> Block | None:
    """The visible part of one piece of queries against one piece of keys, trimmed to rows and columns in use."""
    q0, q1, k0, k1 = q.start, q.stop, k.start, k.stop
    if causal:
        q0, k1 = max(q.start, k.start), min(k.stop, q.stop)
        if window is not None:
            q1, k0 = min(q.stop, k.stop - 1 + window), max(k.start, q.start - window + 1)
    if q0 >= q1 or k0 >= k1:
        return None
    hi = q0 - k0 if causal and k1 - 1 > q0 else None
    lo = q0 - k0 - window + 1 if window is not None and k0 < q1 - window else None
    at_q, at_k = q.local + q0 - q.start, k.local + k0 - k.start
    return Block((at_q, at_q + q1 - q0), (at_k, at_k + k1 - k0), lo, hi)


def _merge(blocks: list[Block]) -> list[Block]:
    """Join full rectangles that share a side: fewer, larger kernel calls. ``blocks`` come row by row."""
    return _join(_join(blocks, along="k"), along="q")


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


class Transfer(NamedTuple):
    """One group's KV (or its gradient) moves from the group at one ring position to another."""

    source: int  # ring position whose tokens these are
    sender: int
    receiver: int


@dataclass(frozen=True, eq=False)
class RingTable:
    """Who computes what at which ring step, and what travels, for one lane of a placement and one mask.

    Positions in the table count the lane's members, in the order in which KV travels.

    Forward step t: the group at position k attends to the KV of position k - t. Round t, posted before the compute of
    step t, brings what step t + 1 needs. A block visits only the groups that need it, in ring order.

    Backward step j: position k works on the KV of position k + 1 + j, its own last, so that blocks walk the ring in
    reverse: the KV of the last forward step is still there, and dK/dV come home under the local block. Round j brings
    the KV of step j + 1 and the partial dK/dV to which step j adds.

    Sender and receiver post a transfer in the same round. That costs nothing when all blocks are needed everywhere, and
    keeps backends with stream-ordered point-to-point calls (NCCL) free of deadlock when they are not.
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
        return self._blocks[q][k]

    def columns(self, source: int) -> Range:
        """Local keys of ``source`` that travel: the hull of what the other groups need, (0, 0) if nothing."""
        needed = [
            block.k
            for q in range(self.size)
            if q != source
            for _, blocks in self._blocks[q][source]
            for block in blocks
        ]
        return (min(k[0] for k in needed), max(k[1] for k in needed)) if needed else (0, 0)

    @cached_property
    def paths(self) -> tuple[tuple[int, ...], ...]:
        """For every group, the ring positions that need its KV, in the order it visits them; its own is left out."""
        size = self.size
        return tuple(
            tuple(
                position
                for position in ((source + t) % size for t in range(1, size))
                if any(blocks for _, blocks in self._blocks[position][source])
            )
            for source in range(size)
        )

    @cached_property
    def forward_rounds(self) -> tuple[tuple[Transfer, ...], ...]:
        """KV transfers of round t = 0 .. K - 2."""
        rounds: list[list[Transfer]] = [[] for _ in range(self.size - 1)]
        for source in range(self.size):
            sender = source
            for receiver in self.paths[source]:
                rounds[self._hop(source, receiver) - 1].append(Transfer(source, sender, receiver))
                sender = receiver
        return tuple(map(tuple, rounds))

    @cached_property
    def backward_kv_rounds(self) -> tuple[tuple[Transfer, ...], ...]:
        """KV transfers of backward round j = 0 .. K - 2, for step j + 1; a block kept since the forward stays."""
        size = self.size
        rounds: list[list[Transfer]] = [[] for _ in range(size - 1)]
        for source in range(size):
            sender = source
            for receiver in reversed(self.paths[source]):
                hop = self._hop(source, receiver)
                if hop < size - 1:
                    rounds[size - 2 - hop].append(Transfer(source, sender, receiver))
                sender = receiver
        return tuple(map(tuple, rounds))

    @cached_property
    def backward_grad_rounds(self) -> tuple[tuple[Transfer, ...], ...]:
        """dK/dV transfers of backward round j = 0 .. K - 1; the receiver adds them to its own at the end of step j."""
        size = self.size
        rounds: list[list[Transfer]] = [[] for _ in range(size)]
        for source in range(size):
            path = (source, *self.paths[source])
            for receiver, sender in pairwise(path):
                rounds[size - 1 - self._hop(source, receiver)].append(Transfer(source, sender, receiver))
        return tuple(map(tuple, rounds))

    def _hop(self, source: int, position: int) -> int:
        return (position - source) % self.size

    @cached_property
    def _blocks(self) -> tuple[tuple[tuple[tuple[Rows, tuple[Block, ...]], ...], ...], ...]:
        held = self.lane.intervals
        return tuple(
            tuple(
                tuple(
                    (rows, visible_blocks(q, k, rows.documents, self.causal, self.window))
                    for rows in self.placement.rows
                )
                for k in held
            )
            for q in held
        )
