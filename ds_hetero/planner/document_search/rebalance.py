"""Improve a placement: move documents off the slowest bin, a unit or a node, while that lowers the slowest time.

A fragment of x tokens of a document of n tokens makes its bin receive the other n - x, however small x is. `deal` does
not count this, so a bin may wait for keys and values longer than it computes, while another bin is idle.

Example: two bins take 10 and 6 s, and a document of 2 s is on the first. After a move both take 8 s, which is less than
10 s, the slowest time before; so it is made. The next change has to bring the slowest time below 8 s.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from ds_hetero.planner.document_search.bins import Bins, DocumentPart, water_fill
from ds_hetero.planner.document_search.unit_costs import Pieces

# Chosen, never measured alone; `python -m benchmarks.documents plan` says how far placements with them are from the
# ideal.
MAX_REBALANCING_CHANGES = 16  # most changes that are made, one after the other
MAX_WHOLE_TRIED = 4  # most uncut parts of the slowest bin that are tried, longest first


class _Times:
    """Times of all bins, updated as parts are added and removed; receiving overlaps with attention."""

    def __init__(
        self, parts: Sequence[DocumentPart], pieces_by_part: list[Pieces], bins: Bins, receive_s: Sequence[float]
    ) -> None:
        self.parts, self.pieces_by_part, self.bins = parts, pieces_by_part, bins
        self.receive_s = receive_s  # seconds per token that a bin receives
        self.received_s = [0.0] * len(receive_s)  # seconds that a bin receives
        for part, pieces in zip(parts, pieces_by_part, strict=True):
            if len(pieces) > 1:
                self._count(part, pieces, 1)

    def bin_s(self, i: int) -> float:
        """Return the time of bin ``i``."""
        linear_s = self.bins.tokens[i] * self.bins.token_s[i]
        return linear_s + max(self.bins.load_s[i] - linear_s, self.received_s[i])

    def put(self, index: int, pieces: Pieces, sign: int = 1) -> None:
        """Add pieces of part ``index`` to their bins; with a sign of -1, remove them."""
        part = self.parts[index]
        for i, tokens in pieces:
            self.bins.put(i, part.length, sign * tokens)
        self._count(part, pieces, sign)

    def _count(self, part: DocumentPart, pieces: Pieces, sign: int) -> None:
        """Add (``sign`` 1) or subtract (-1) the time in which bins of a cut part receive the tokens of other bins."""
        if len(pieces) > 1:
            for i, tokens in pieces:
                self.received_s[i] += sign * (part.length - tokens) * self.receive_s[i]


def rebalance(
    parts: Sequence[DocumentPart], pieces_by_part: list[Pieces], bins: Bins, receive_s: Sequence[float], good_s: float
) -> None:
    """Change the bins of single parts while that lowers the slowest time of the bins concerned.

    A part of the slowest bin may leave this bin, or be cut over the fastest bin as well, or move from the slowest to
    the fastest bin.

    Args:
        pieces_by_part: bins of every part, with their tokens; they are changed in place.
        bins: bins that have these parts; they are changed in place.
        receive_s: seconds per token that a bin receives, ``[bin]``.
        good_s: time of the slowest bin at which the search ends.
    """
    times = _Times(parts, pieces_by_part, bins, receive_s)
    for _ in range(MAX_REBALANCING_CHANGES):
        by_time = sorted((times.bin_s(i), i) for i in range(len(receive_s)))
        slowest_s, _ = by_time[-1]
        if slowest_s <= good_s:
            return
        change = _best_change(times, [i for _, i in by_time], slowest_s)
        if change is None:
            return
        times.put(change.part, pieces_by_part[change.part], -1)
        times.put(change.part, change.pieces)
        pieces_by_part[change.part] = change.pieces


class _PartChange(NamedTuple):
    """New bins for one part, with the tokens that each bin gets."""

    part: int  # its index
    pieces: Pieces


def _best_change(times: _Times, by_time: Sequence[int], slowest_s: float) -> _PartChange | None:
    """Find the change that lowers the slowest time of the bins concerned most; None if no change lowers it.

    Args:
        by_time: bins, the slowest last.
        slowest_s: time of the slowest bin.
    """
    slowest = by_time[-1]
    best_s: float = slowest_s
    best_change: _PartChange | None = None
    for index in _parts_on(times.pieces_by_part, slowest):
        # Every choice is made, measured and taken back; so the bins are unchanged at the end.
        current_pieces = times.pieces_by_part[index]
        times.put(index, current_pieces, -1)
        for ring in _other_rings(current_pieces, slowest, by_time):
            pieces = _share_part(times, index, ring)
            if pieces is None:
                continue
            times.put(index, pieces)
            bins_concerned = {*ring, slowest, *(i for i, _ in current_pieces)}
            changed_s = max(times.bin_s(i) for i in bins_concerned)
            times.put(index, pieces, -1)
            if changed_s < best_s:
                best_s, best_change = changed_s, _PartChange(index, pieces)
        times.put(index, current_pieces)
    return best_change


def _parts_on(pieces_by_part: Sequence[Pieces], i: int) -> list[int]:
    """Return the indices of parts on bin ``i``: all parts that are cut, and the longest uncut ones."""
    cut_parts: list[int] = []
    uncut_parts: list[int] = []
    for index, pieces in enumerate(pieces_by_part):
        if len(pieces) > 1:
            if any(piece_bin == i for piece_bin, _ in pieces):
                cut_parts.append(index)
            continue
        ((only_bin, _),) = pieces
        if only_bin == i and len(uncut_parts) < MAX_WHOLE_TRIED:
            uncut_parts.append(index)
    return cut_parts + uncut_parts


def _other_rings(pieces: Pieces, slowest: int, by_time: Sequence[int]) -> Iterator[list[int]]:
    """Yield other sets of bins for a part: without the slowest bin; with the fastest bin as well; with it instead.

    The fastest bin is the fastest that has no piece of the part.
    """
    ring = [i for i, _ in pieces]
    fastest = next((i for i in by_time if i not in ring), None)
    without_slowest = [i for i in ring if i != slowest]
    if without_slowest:
        yield without_slowest
    if fastest is not None:
        yield sorted([*ring, fastest])
        yield sorted([*without_slowest, fastest])


def _share_part(times: _Times, index: int, ring: Sequence[int]) -> Pieces | None:
    """Share part ``index`` over the bins of ``ring`` so that they end at the same time; None if they have no room."""
    part, bins = times.parts[index], times.bins
    s_per_token = [bins.token_s[i] + part.length * bins.square_s[i] for i in ring]
    busy_s = [times.bin_s(i) for i in ring]
    room = [bins.room[i] for i in ring]
    shares = water_fill(busy_s, s_per_token, room, part.tokens)
    if shares is None:
        return None
    return [(i, tokens) for i, tokens in zip(ring, shares, strict=True) if tokens]
