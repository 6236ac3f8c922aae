"""A band of a score matrix, cut into tiles that simple kernels can compute.

torch's flash operator for CPU knows full rectangles and aligned causal squares. On the diagonal it computes whole
512-wide key tiles, so that a causal square of 1,024 costs half as much again as it should. Here any band is cut into
full rectangles, squares on its edges, and a few small masked rectangles. An edge is halved down to squares of `LEAF`;
up to `CHUNK` the equal pieces of each size are one batched call, above it the pieces follow each other depth first,
which keeps keys and gradients in cache.

Plain integers; nothing here imports torch.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from itertools import chain
from typing import NamedTuple

# Measured with 1, 2 and 8 heads of 64 at 372 to 4,096 tokens, one thread. Leaves of 128 lose 4 % at 1,024 tokens, and
# leaves of 32 save nothing. Without chunks the overhead of calls eats the gain at 1 head, with chunks of 1,024 the
# caches do at 8.
LEAF = 64
CHUNK = 512


class Band(NamedTuple):
    """Query i of a block sees key j of it iff lo <= j - i <= hi; None is no bound.

    A causal square is ``Band(None, 0)``, with a sliding window of w keys ``Band(1 - w, 0)``, and ``Band(None, None)``
    hides nothing.
    """

    lo: int | None
    hi: int | None

    def bounds(self, num_queries: int, num_keys: int) -> tuple[int, int]:
        """(lo, hi) with None replaced by, and everything clipped to, the outermost diagonals of the block."""
        first, last = 1 - num_queries, num_keys - 1
        return (first if self.lo is None else max(self.lo, first), last if self.hi is None else min(self.hi, last))

    def window(self, num_queries: int, num_keys: int) -> tuple[int, int]:
        """``window_size`` of flash-attention, (left, right), whose diagonal ends in the last query and the last key.

        With c = num_keys - num_queries, query i sees keys ``i + c - left`` to ``i + c + right``, and -1 is no bound.
        Otherwise neither is negative, as the last query sees a key and some query sees the last key.
        """
        lo, hi = self.bounds(num_queries, num_keys)
        corner = num_keys - num_queries
        return (-1 if lo == 1 - num_queries else corner - lo, -1 if hi == num_keys - 1 else hi - corner)

    def pairs(self, num_queries: int, num_keys: int) -> int:
        """Pairs of query and key that see each other."""

        def below(diagonal: int) -> int:  # pairs with j - i <= diagonal: a triangle, less what lies outside the block
            keys_of_last = num_queries + diagonal  # that the last query would see in a block without end
            beyond_keys = _triangle(keys_of_last - num_keys) - _triangle(diagonal - num_keys)
            return _triangle(keys_of_last) - _triangle(diagonal) - beyond_keys

        lo, hi = self.bounds(num_queries, num_keys)
        return below(hi) - below(lo - 1)


def _triangle(side: int) -> int:
    return side * (side + 1) // 2 if side > 0 else 0


FULL = Band(None, None)
CAUSAL = Band(None, 0)  # of a square: j <= i
MIRRORED = Band(0, None)  # of a square: j >= i


class Tile(NamedTuple):
    """``copies`` equal rectangles in a diagonal row.

    Copy c takes the queries from ``row + c * step`` and the keys from ``col + c * step``; ``band`` counts from there.
    Every query of a tile sees a key of it, and no two copies share a query or a key.
    """

    row: int
    col: int
    rows: int
    cols: int
    band: Band
    first: bool  # no earlier tile holds any of these queries
    copies: int = 1
    step: int = 0


@lru_cache(maxsize=512)
def decompose(
    num_queries: int, num_keys: int, band: Band, leaf: int = LEAF, chunk: int = CHUNK, side: int | None = None
) -> tuple[Tile, ...]:
    """Tiles that cover exactly the visible pairs of a block, each once.

    Args:
        num_queries: at least 1, each with a visible key.
        num_keys: at least 1, each with a query that sees it.
        leaf: the largest square on an edge that is computed whole.
        chunk: the largest square on an edge whose pieces are batched.
        side: the largest side of a full rectangle, if there shall be a limit.
    """
    lo, hi = band.bounds(num_queries, num_keys)
    hides_right, hides_left = hi < num_keys - 1, lo > 1 - num_queries
    right = num_keys - hi if hides_right else 0  # queries [0, right) have the band's upper edge in the block
    left = -lo if hides_left else num_queries  # queries [left, num_queries) have its lower edge in the block
    tiles: list[Tile] = []
    if top := min(left, right):
        tiles += _staircase(0, hi, top, CAUSAL, True, leaf, chunk)
        tiles += _rectangle(0, 0, top, hi, False)
    if right < left:
        tiles += _rectangle(right, 0, left - right, num_keys, True)
    elif left < right and hi - lo < leaf:
        tiles += _narrow(left, left + lo, right - left, hi - lo, leaf)
    elif left < right:
        tiles += _wide(left, left + lo, right - left, hi - lo, leaf, chunk)
    if (bottom := max(left, right)) < num_queries:
        tiles += _staircase(bottom, bottom + lo, num_queries - bottom, MIRRORED, True, leaf, chunk)
        tiles += _rectangle(bottom, num_queries + lo, num_queries - bottom, num_keys - num_queries - lo, False)
    if side is None:
        return tuple(tiles)
    return tuple(chain.from_iterable(_cut(tile, side) for tile in tiles))


def _cut(tile: Tile, side: int) -> Iterator[Tile]:
    """A single full rectangle in pieces of at most ``side`` x ``side``; others as they are."""
    if tile.copies > 1 or tile.band != FULL or max(tile.rows, tile.cols) <= side:
        yield tile
        return
    for row in range(0, tile.rows, side):
        for col in range(0, tile.cols, side):
            rows, cols = min(side, tile.rows - row), min(side, tile.cols - col)
            yield Tile(tile.row + row, tile.col + col, rows, cols, FULL, tile.first and col == 0)


def _rectangle(row: int, col: int, rows: int, cols: int, first: bool) -> Iterator[Tile]:
    if rows and cols:
        yield Tile(row, col, rows, cols, FULL, first)


def _narrow(row: int, col: int, rows: int, width: int, leaf: int) -> Iterator[Tile]:
    """Rows that see ``width + 1`` keys each, too few for rectangles: masked strips."""
    for done in range(0, rows, leaf):
        height = min(leaf, rows - done)
        yield Tile(row + done, col + done, height, height + width, Band(0, width), True)


def _wide(row: int, col: int, rows: int, width: int, leaf: int, chunk: int) -> Iterator[Tile]:
    """Rows that see ``width + 1`` keys each: strips of lower edge, rectangle, upper edge."""
    strip = min(width, chunk)
    for done in range(0, rows, strip):
        height = min(strip, rows - done)
        top, left = row + done, col + done
        yield from _staircase(top, left, height, MIRRORED, True, leaf, chunk)
        yield from _rectangle(top, left + height, height, width - height, False)
        yield from _staircase(top, left + width, height, CAUSAL, False, leaf, chunk)


def _staircase(row: int, col: int, side: int, edge: Band, first: bool, leaf: int, chunk: int) -> Iterator[Tile]:
    """The triangle that ``edge`` leaves of a square of ``side``; leaves come before what is merged into them.

    A causal square becomes a square of ``half``, the square of the rest behind it on the diagonal, both cut further,
    and below the first one a full rectangle.
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
    """The triangle in one call per size: leaves, then rectangles of 1, 2, 4 ... leaves, each with a shorter last one.

    A causal square of 4 leaves: 4 leaves on the diagonal; 2 rectangles of one leaf, at rows 1 and 3; one of 2 x 2
    leaves, at row 2. Every 2 x ``size`` rows of the diagonal have one rectangle of ``size``.
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
            if edge == CAUSAL:
                yield Tile(top + size, left, shorter, size, FULL, False, copies, 2 * size)
            else:
                yield Tile(top, left + size, size, shorter, FULL, False, copies, 2 * size)
        size *= 2
