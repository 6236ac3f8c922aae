"""Moves of single documents off the slowest bin, a unit or a node, while all bins concerned become faster.

A fragment of x tokens of a document of n tokens makes its bin receive the other n - x, however small x is. Dealing does
not look at that, so a bin may wait for keys and values longer than it computes while another has time left.

Two bins take 10 and 6 seconds; a document of 2 seconds lies on the first. Moved whole they take 8 and 8, and the move
is made: both are below 10, which was the slowest. The next move has to bring the slowest below 8.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ds_hetero.planner.document_search.bins import Bins, DocumentPart, water_fill
from ds_hetero.planner.document_search.unit_costs import Pieces

# Chosen, never measured alone; `python -m benchmarks.documents plan` says how far placements with them are from the
# ideal.
MOST_MOVES = 16  # parts that change their bins, one after the other
MOST_WHOLE = 4  # whole parts of the slowest bin that are tried, longest first


class _Times:
    """Time of every bin: outside attention, in it, and receiving, which hides under attention."""

    def __init__(
        self, parts: Sequence[DocumentPart], placed: list[Pieces], bins: Bins, receive_s: Sequence[float]
    ) -> None:
        self.parts, self.placed, self.bins, self.receive_s = parts, placed, bins, receive_s
        self.received_s = [0.0] * len(receive_s)
        for part, pieces in zip(parts, placed, strict=True):
            if len(pieces) > 1:
                self._count(part, pieces, 1)

    def of(self, i: int) -> float:
        """Time of a bin."""
        linear_s = self.bins.tokens[i] * self.bins.token_s[i]
        return linear_s + max(self.bins.load_s[i] - linear_s, self.received_s[i])

    def put(self, index: int, pieces: Pieces, sign: int = 1) -> None:
        """Add pieces of a part to its bins, or take them away."""
        part = self.parts[index]
        for i, tokens in pieces:
            self.bins.put(i, part.length, sign * tokens)
        self._count(part, pieces, sign)

    def _count(self, part: DocumentPart, pieces: Pieces, sign: int) -> None:
        if len(pieces) > 1:
            for i, tokens in pieces:
                self.received_s[i] += sign * (part.length - tokens) * self.receive_s[i]


def rebalance(
    parts: Sequence[DocumentPart], placed: list[Pieces], bins: Bins, receive_s: Sequence[float], good_s: float
) -> None:
    """Change the pieces of parts on the slowest bin while all bins that a change concerns become faster than it was.

    A part may leave the slowest bin, gain the fastest bin, or both.

    Args:
        placed: bins of every part with their tokens; changed in place.
        bins: hold the parts; changed in place.
        receive_s: seconds per token that a bin receives, ``[bin]``.
        good_s: no bin has to be faster than this.
    """
    times = _Times(parts, placed, bins, receive_s)
    for _ in range(MOST_MOVES):
        by_time = sorted((times.of(i), i) for i in range(len(receive_s)))
        slowest_s, _ = by_time[-1]
        if slowest_s <= good_s:
            return
        change = _best_change(times, [i for _, i in by_time], slowest_s)
        if change is None:
            return
        index, pieces = change
        times.put(index, placed[index], -1)
        times.put(index, pieces)
        placed[index] = pieces


def _best_change(times: _Times, by_time: Sequence[int], slowest_s: float) -> tuple[int, Pieces] | None:
    """The part whose new pieces lower the slowest bin most, and these; None where no change lowers it.

    Args:
        by_time: bins, the slowest last; it takes ``slowest_s``.
    """
    slowest = by_time[-1]
    best_s, best = slowest_s, None
    for index in _parts_on(times.placed, slowest):
        before = times.placed[index]
        times.put(index, before, -1)
        for ring in _other_rings(before, slowest, by_time):
            pieces = _shared(times, index, ring)
            if pieces is None:
                continue
            times.put(index, pieces)
            changed = {*ring, slowest, *(i for i, _ in before)}
            now_s = max(times.of(i) for i in changed)
            times.put(index, pieces, -1)
            if now_s < best_s:
                best_s, best = now_s, (index, pieces)
        times.put(index, before)
    return best


def _parts_on(placed: Sequence[Pieces], i: int) -> list[int]:
    """Parts that are cut and have a piece on a bin, and the longest whole ones."""
    cut: list[int] = []
    whole: list[int] = []
    for index, pieces in enumerate(placed):
        if len(pieces) > 1:
            if any(held == i for held, _ in pieces):
                cut.append(index)
        elif pieces[0][0] == i and len(whole) < MOST_WHOLE:
            whole.append(index)
    return cut + whole


def _other_rings(pieces: Pieces, slowest: int, by_time: Sequence[int]) -> Iterator[list[int]]:
    """Bins over which a part on the slowest bin could lie instead."""
    ring = [i for i, _ in pieces]
    fastest = next((i for i in by_time if i not in ring), None)
    without = [i for i in ring if i != slowest]
    if without:
        yield without
    if fastest is not None:
        yield sorted([*ring, fastest])
        yield sorted([*without, fastest])


def _shared(times: _Times, index: int, ring: Sequence[int]) -> Pieces | None:
    """A part shared over bins so that they end together; None without room."""
    part, bins = times.parts[index], times.bins
    per_s = [bins.token_s[i] + part.length * bins.square_s[i] for i in ring]
    shares = water_fill([times.of(i) for i in ring], per_s, [bins.room[i] for i in ring], part.tokens)
    if shares is None:
        return None
    return [(i, tokens) for i, tokens in zip(ring, shares, strict=True) if tokens]
