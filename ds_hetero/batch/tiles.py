"""Tiles of a band of the attention matrix, each of which a simple kernel can compute.

torch's flash operator for CPU computes full rectangles and aligned causal squares only. On the diagonal it computes
whole 512-wide key tiles, so a causal square of 1,024 costs half as much again as it should. This module divides any
band into full rectangles, squares on its edges, and a few small masked rectangles. Squares on an edge are halved down
to `LEAF`. Up to `CHUNK` all equal pieces of one size are one batched call; above it the pieces follow each other depth
first, which keeps keys and gradients in cache.

Example, a causal square of 256 queries and keys with leaves of 64:

    one call    4 leaves on the diagonal, masked
    one call    2 full squares of 64, at rows 64 and 192
    one call    1 full square of 128, at row 128

Nothing here imports torch.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from itertools import chain
from typing import NamedTuple

# Measured with 1, 2 and 8 heads of 64 at 372 to 4,096 tokens, on one thread. Leaves of 128 are 4 % slower at 1,024
# tokens, and leaves of 32 are no faster. Without chunks the overhead of calls cancels the gain at 1 head; with chunks
# of 1,024 cache misses do at 8 heads.
LEAF = 64
CHUNK = 512


class Band(NamedTuple):
    """Mask of a block: query i sees key j if ``lo <= j - i <= hi``; None is no bound.

    ``Band(None, 0)`` is a causal square, ``Band(1 - w, 0)`` one with a sliding window of w keys, and
    ``Band(None, None)`` masks nothing.
    """

    lo: int | None
    hi: int | None

    def bounds(self, num_queries: int, num_keys: int) -> tuple[int, int]:
        """Return ``(lo, hi)`` as numbers, clipped to the differences key - query that occur in the block.

        These are 1 - num_queries to num_keys - 1, which also replace None.
        """
        first, last = 1 - num_queries, num_keys - 1
        lo = first if self.lo is None else max(self.lo, first)
        hi = last if self.hi is None else min(self.hi, last)
        return lo, hi

    def window(self, num_queries: int, num_keys: int) -> tuple[int, int]:
        """Return the band as flash-attention's ``window_size``: (left, right), -1 for no bound.

        flash-attention aligns the diagonal with the last query and the last key: with c = num_keys - num_queries,
        query i sees keys ``i + c - left`` to ``i + c + right``. Bounds are never negative, since the last query sees a
        key and some query sees the last key.
        """
        lo, hi = self.bounds(num_queries, num_keys)
        corner = num_keys - num_queries
        left = -1 if lo == 1 - num_queries else corner - lo
        right = -1 if hi == num_keys - 1 else hi - corner
        return left, right

    def pairs(self, num_queries: int, num_keys: int) -> int:
        """Count the pairs of query and key that see each other."""

        def pairs_up_to(diagonal: int) -> int:
            """Count the pairs with j - i <= ``diagonal``: a triangle, minus what lies outside the block."""
            keys_of_last = num_queries + diagonal  # keys that the last query would see if there were infinitely many
            beyond_keys = _triangle(keys_of_last - num_keys) - _triangle(diagonal - num_keys)
            return _triangle(keys_of_last) - _triangle(diagonal) - beyond_keys

        lo, hi = self.bounds(num_queries, num_keys)
        return pairs_up_to(hi) - pairs_up_to(lo - 1)


def _triangle(side: int) -> int:
    """Return 1 + 2 + ... + ``side``; 0 for sides below 1."""
    return side * (side + 1) // 2 if side > 0 else 0


FULL = Band(None, None)
CAUSAL = Band(None, 0)  # lower triangle of a square: j <= i
MIRRORED = Band(0, None)  # upper triangle of a square: j >= i


class Tile(NamedTuple):
    """One rectangle, or several equal ones in a diagonal row (``copies``), which one batched call computes.

    Copy c begins at query ``row + c * step`` and key ``col + c * step``, from which ``band`` counts. Every query of a
    tile sees one of its keys, and no two copies share a query or a key.
    """

    row: int  # first query
    col: int  # first key
    rows: int  # number of queries
    cols: int  # number of keys
    band: Band
    first: bool  # whether no earlier tile has any of these queries
    copies: int = 1
    step: int = 0  # distance between two copies


@lru_cache(maxsize=512)
def decompose(
    num_queries: int, num_keys: int, band: Band, leaf: int = LEAF, chunk: int = CHUNK, side: int | None = None
) -> tuple[Tile, ...]:
    """Divide the visible pairs of a block into tiles, each pair in exactly one.

    Args:
        num_queries: queries of the block, at least 1; each must see a key.
        num_keys: keys of the block, at least 1; each must be seen.
        leaf: side of the largest square on an edge that one masked call computes.
        chunk: side of the largest square on an edge whose pieces are batched.
        side: largest side of a full rectangle; None for no limit.
    """
    lo, hi = band.bounds(num_queries, num_keys)
    hides_right, hides_left = hi < num_keys - 1, lo > 1 - num_queries
    right = num_keys - hi if hides_right else 0  # queries [0, right) have the band's upper edge in the block
    left = -lo if hides_left else num_queries  # queries [left, num_queries) have its lower edge in the block
    tiles: list[Tile] = []
    # Queries whose keys are bounded on the right only: a triangle, and the full rectangle left of it.
    if top := min(left, right):
        tiles += _staircase(0, hi, top, CAUSAL, True, leaf, chunk)
        tiles += _rectangle(0, 0, top, hi, False)
    # Queries in the middle: bounded on neither side, or on both.
    if right < left:
        tiles += _rectangle(right, 0, left - right, num_keys, True)
    elif left < right and hi - lo < leaf:
        tiles += _narrow(left, left + lo, right - left, hi - lo, leaf)
    elif left < right:
        tiles += _wide(left, left + lo, right - left, hi - lo, leaf, chunk)
    # Queries whose keys are bounded on the left only.
    if (bottom := max(left, right)) < num_queries:
        tiles += _staircase(bottom, bottom + lo, num_queries - bottom, MIRRORED, True, leaf, chunk)
        tiles += _rectangle(bottom, num_queries + lo, num_queries - bottom, num_keys - num_queries - lo, False)
    if side is None:
        return tuple(tiles)
    return tuple(chain.from_iterable(_cut(tile, side) for tile in tiles))


def _cut(tile: Tile, side: int) -> Iterator[Tile]:
    """Divide a single full rectangle into pieces of at most ``side`` x ``side``; other tiles stay as they are."""
    if tile.copies > 1 or tile.band != FULL or max(tile.rows, tile.cols) <= side:
        yield tile
        return
    for row in range(0, tile.rows, side):
        for col in range(0, tile.cols, side):
            rows, cols = min(side, tile.rows - row), min(side, tile.cols - col)
            yield Tile(tile.row + row, tile.col + col, rows, cols, FULL, tile.first and col == 0)


def _rectangle(row: int, col: int, rows: int, cols: int, first: bool) -> Iterator[Tile]:
    """Yield a full rectangle, unless it is empty."""
    if rows and cols:
        yield Tile(row, col, rows, cols, FULL, first)


def _narrow(row: int, col: int, rows: int, width: int, leaf: int) -> Iterator[Tile]:
    """Divide rows that see ``width + 1`` keys each, too few for rectangles, into masked strips."""
    for done in range(0, rows, leaf):
        height = min(leaf, rows - done)
        yield Tile(row + done, col + done, height, height + width, Band(0, width), True)


def _wide(row: int, col: int, rows: int, width: int, leaf: int, chunk: int) -> Iterator[Tile]:
    """Divide a band whose rows see ``width + 1`` keys each into strips of rows.

    A strip consists of the triangle at its first keys, a full rectangle, and the triangle at its last keys.
    """
    strip = min(width, chunk)
    for done in range(0, rows, strip):
        height = min(strip, rows - done)
        top, left = row + done, col + done
        yield from _staircase(top, left, height, MIRRORED, True, leaf, chunk)
        yield from _rectangle(top, left + height, height, width - height, False)
        yield from _staircase(top, left + width, height, CAUSAL, False, leaf, chunk)


def _staircase(row: int, col: int, side: int, edge: Band, first: bool, leaf: int, chunk: int) -> Iterator[Tile]:
    """Divide the triangle that ``edge`` (`CAUSAL` or `MIRRORED`) leaves of a square.

    A causal square becomes two smaller squares on the diagonal, which are divided further, and the full rectangle below
    the first and left of the second. Leaves come before the rectangles whose results are merged into theirs.
    """
    if side <= chunk:
        yield from _levels(row, col, side, edge, first, leaf)
        return
    half = chunk
    while 2 * half < side:
        half *= 2
    yield from _staircase(row, col, half, edge, first, leaf, chunk)
    yield from _staircase(row + half, col + half, side - half, edge, first, leaf, chunk)
    if edge == CAUSAL:
        yield Tile(row + half, col, side - half, half, FULL, False)
    else:
        yield Tile(row, col + half, half, side - half, FULL, False)


def _levels(row: int, col: int, side: int, edge: Band, first: bool, leaf: int) -> Iterator[Tile]:
    """Divide the triangle of a square into one batched call per size: leaves, then full squares of 1, 2, 4 ... leaves.

    A causal square of 4 leaves has 4 leaves on the diagonal, 2 full squares of one leaf at rows 1 and 3, and one of 2 x
    2 leaves at row 2: every 2 x ``size`` rows of the diagonal have one square of ``size``. A remainder that is shorter
    than its size becomes a tile of its own.
    """
    count, rest = divmod(side, leaf)
    if count:
        yield Tile(row, col, leaf, leaf, edge, first, count, leaf)
    if rest:
        done = count * leaf
        yield Tile(row + done, col + done, rest, rest, edge, first)
    size = leaf
    while size < side:
        count, rest = divmod(side, 2 * size)
        for done, copies, shorter in ((0, count, size), (2 * size * count, 1, rest - size)):
            if not copies or shorter <= 0:
                continue
            top, left = row + done, col + done
            if edge == CAUSAL:  # the full square is below the diagonal; ``shorter`` limits its rows
                yield Tile(top + size, left, shorter, size, FULL, False, copies, 2 * size)
            else:  # right of the diagonal; ``shorter`` limits its columns
                yield Tile(top, left + size, size, shorter, FULL, False, copies, 2 * size)
        size *= 2
