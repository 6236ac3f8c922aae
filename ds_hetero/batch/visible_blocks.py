"""Visible blocks: rectangles of the attention matrix that one group's queries compute against another group's keys.

A group holds intervals of positions (`ds_hetero.values.placement.Lane.intervals`); its queries and keys are numbered
locally, in order of position. A document is an interval of positions whose tokens see each other; causality and a
sliding window apply inside it. Everything is integer arithmetic.

Positions are global, indices are local. Ranges are half open.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Mapping, Sequence
from itertools import product
from typing import NamedTuple

from ds_hetero.values.placement import Range


class Block(NamedTuple):
    """A range of queries and a range of keys, with the band of pairs that see each other.

    A query sees a key if ``lo <= (key - k[0]) - (query - q[0]) <= hi``. Every query of the block sees at least one of
    its keys, and every key is seen.
    """

    q: Range  # local indices of queries
    k: Range  # local indices of keys
    lo: int | None  # None: no lower bound
    hi: int | None  # None: no upper bound


class DocumentPiece(NamedTuple):
    """Part of a document that a group holds in consecutive positions."""

    start: int  # first position
    stop: int  # position after the last one
    local: int  # local index of `start` in the group


PiecesByDocument = Mapping[int, Sequence[DocumentPiece]]
"""Pieces of a group by number of the document, in ascending order; documents without a piece are not in it."""


def visible_blocks(
    q_chunks: Sequence[Range], k_chunks: Sequence[Range], documents: Sequence[Range], causal: bool, window: int | None
) -> tuple[Block, ...]:
    """List blocks that cover each visible (query, key) pair of two groups exactly once.

    Args:
        q_chunks, k_chunks: position intervals of the two groups, ascending; either equal or disjoint.
        documents: position intervals, ascending and disjoint.
        causal: a query sees no later key.
        window: with ``causal``, a query sees itself and the ``window - 1`` keys before it.
    """
    q_pieces = pieces_by_document(q_chunks, documents)
    k_pieces = q_pieces if list(q_chunks) == list(k_chunks) else pieces_by_document(k_chunks, documents)
    return blocks_of_pieces(q_pieces, k_pieces, causal, window)


def blocks_of_pieces(
    q_pieces: PiecesByDocument, k_pieces: PiecesByDocument, causal: bool, window: int | None
) -> tuple[Block, ...]:
    """List the visible blocks of the queries of one group and the keys of another, from their pieces of documents.

    For the queries and keys of one group, pass the same object as both arguments.
    """
    if causal and window is None and q_pieces is k_pieces:
        # Local order is the order of positions, so all pieces of a document in one group are one causal triangle.
        ranges = [(pieces[0].local, _local_end(pieces)) for pieces in q_pieces.values()]
        return tuple(Block(indices, indices, None, 0) for indices in ranges)
    visible: list[Block] = []
    for document in sorted(q_pieces.keys() & k_pieces.keys()):
        pairs = product(q_pieces[document], k_pieces[document])
        blocks = [_block(q, k, causal, window) for q, k in pairs]
        visible += _merge([block for block in blocks if block is not None])
    return tuple(visible)


def pieces_by_document(chunks: Sequence[Range], documents: Sequence[Range]) -> dict[int, list[DocumentPiece]]:
    """Return the pieces of each document that lie in ``chunks``; adjacent pieces are joined.

    Chunks (0, 4) and (8, 10) and documents (0, 2) and (2, 10): document 0 has the piece of positions 0-1 at index 0;
    document 1 has the pieces of positions 2-3 at index 2, and of positions 8-9 at index 4.
    """
    pieces: dict[int, list[DocumentPiece]] = {}
    local = 0
    for start, stop in chunks:
        # The first document that may reach into the chunk begins at or before it; the last one begins before its end.
        first = max(bisect_right(documents, (start, math.inf)) - 1, 0)
        shift = local - start
        for number in range(first, bisect_left(documents, (stop, stop), first)):
            begin, end = documents[number]
            # Conditional expressions instead of max and min, which take twice as long.
            begin = begin if begin > start else start
            end = end if end < stop else stop
            if begin >= end:
                continue
            if number not in pieces:
                pieces[number] = [DocumentPiece(begin, end, begin + shift)]
            elif pieces[number][-1].stop == begin:
                pieces[number][-1] = pieces[number][-1]._replace(stop=end)
            else:
                pieces[number].append(DocumentPiece(begin, end, begin + shift))
        local += stop - start
    return pieces


def _local_end(pieces: Sequence[DocumentPiece]) -> int:
    """Local index after the last token of the last piece."""
    return pieces[-1].local + pieces[-1].stop - pieces[-1].start


def _block(q: DocumentPiece, k: DocumentPiece, causal: bool, window: int | None) -> Block | None:
    """Return the visible block of a piece of queries against a piece of keys; None if they see nothing.

    The block has only queries that see a key, and keys that are seen. Example: queries at positions 4-7 and keys at
    2-5, causal with a window of 3. Query 4 sees keys 2-4, query 5 keys 3-5, query 6 keys 4-5, and query 7 key 5 alone.
    With keys counted from 2 and queries from 4, the difference key - query is from 0 to 2: ``lo = 0``, and ``hi = 2``.
    """
    # Positions of the first and after the last query and key, narrowed to those in use.
    q0, q1, k0, k1 = q.start, q.stop, k.start, k.stop
    if causal:
        # Queries before the first key see none; keys after the last query are not seen.
        q0, k1 = max(q.start, k.start), min(k.stop, q.stop)
        if window is not None:
            # Queries a window or more after the last key see none; keys a window or more before the first query are
            # not seen.
            q1, k0 = min(q.stop, k.stop - 1 + window), max(k.start, q.start - window + 1)
    if q0 >= q1 or k0 >= k1:
        return None
    # The conditions key <= query and key > query - window as bounds of (key - k0) - (query - q0); None if all pairs of
    # the block meet the condition.
    hi = q0 - k0 if causal and k1 - 1 > q0 else None
    lo = q0 - k0 - window + 1 if window is not None and k0 < q1 - window else None
    first_q, first_k = q.local + q0 - q.start, k.local + k0 - k.start  # local indices
    return Block((first_q, first_q + q1 - q0), (first_k, first_k + k1 - k0), lo, hi)


def _merge(blocks: list[Block]) -> list[Block]:
    """Join full rectangles that share a side, which makes fewer, larger kernel calls. ``blocks`` come row by row."""
    return _join(_join(blocks, along="k"), along="q") if len(blocks) > 1 else blocks


def _join(blocks: Iterable[Block], along: str) -> list[Block]:
    """Join full rectangles that are adjacent along their keys (``"k"``) or queries (``"q"``)."""
    joined: list[Block] = []
    for block in blocks:
        for i, earlier in enumerate(joined):
            if earlier.lo is earlier.hi is block.lo is block.hi is None:
                if along == "k" and earlier.q == block.q and earlier.k[1] == block.k[0]:
                    joined[i] = earlier._replace(k=(earlier.k[0], block.k[1]))
                    break
                if along == "q" and earlier.k == block.k and earlier.q[1] == block.q[0]:
                    joined[i] = earlier._replace(q=(earlier.q[0], block.q[1]))
                    break
        else:
            joined.append(block)
    return joined
