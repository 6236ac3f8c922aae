"""Taking small fragments off bins that wait for keys and values longer than they compute.

A fragment of x tokens of a document of n tokens makes its bin receive the other n - x, however small x is. Where that
does not hide under the bin's attention, the fragment goes to the other bins of its document.
"""

from __future__ import annotations

from collections.abc import Sequence

from ds_hetero.planner.documents.bins import Bins, Part, Pieces, water_fill

__all__ = ["trim"]


class _Times:
    """Time of every bin: outside attention, in it, and receiving, which hides under attention."""

    def __init__(self, parts: Sequence[Part], placed: list[Pieces], bins: Bins, receive_s: Sequence[float]) -> None:
        self.parts, self.placed, self.bins, self.receive_s = parts, placed, bins, receive_s
        self.received_s = [0.0] * len(receive_s)
        for part, pieces in zip(parts, placed, strict=True):
            if len(pieces) > 1:
                self.count(part, pieces, 1)

    def count(self, part: Part, pieces: Pieces, sign: int) -> None:
        """Add what the bins of a part receive for it, or take it away."""
        if len(pieces) > 1:
            for i, tokens in pieces:
                self.received_s[i] += sign * (part.length - tokens) * self.receive_s[i]

    def of(self, i: int) -> float:
        """Time of a bin."""
        linear_s = self.bins.tokens[i] * self.bins.token_s[i]
        return linear_s + max(self.bins.load_s[i] - linear_s, self.received_s[i])

    def replace(self, index: int, pieces: Pieces) -> Pieces:
        """Give a part other pieces; returns those that it had."""
        part, before = self.parts[index], self.placed[index]
        self.count(part, before, -1)
        for i, tokens in before:
            self.bins.put(i, part.length, -tokens)
        for i, tokens in pieces:
            self.bins.put(i, part.length, tokens)
        self.count(part, pieces, 1)
        self.placed[index] = pieces
        return before


def trim(parts: Sequence[Part], placed: list[Pieces], bins: Bins, receive_s: Sequence[float]) -> None:
    """Drop fragments of the slowest bin as long as that makes the slowest of all bins it concerns faster.

    Args:
        parts: what was dealt.
        placed: bins of every part with their tokens; changed in place.
        bins: hold the parts.
        receive_s: seconds per token that a bin receives, ``[bin]``.
    """
    times = _Times(parts, placed, bins, receive_s)
    fragments: dict[int, list[int]] = {}
    for index, pieces in enumerate(placed):
        if len(pieces) > 1:
            for i, _ in pieces:
                fragments.setdefault(i, []).append(index)
    for _ in range(sum(map(len, fragments.values()))):
        slowest_s, slowest = max((times.of(i), -i) for i in range(len(receive_s)))
        slowest = -slowest
        best_s = slowest_s
        best: tuple[int, Pieces] | None = None
        for index in fragments.get(slowest, ()):
            fewer = _without(times, index, slowest)
            if fewer is None:
                continue
            before = times.replace(index, fewer)
            now_s = max(times.of(i) for i, _ in before)
            times.replace(index, before)
            if now_s < best_s:
                best_s, best = now_s, (index, fewer)
        if best is None:
            return
        index, pieces = best
        times.replace(index, pieces)
        fragments[slowest].remove(index)
        if len(pieces) == 1:
            fragments[pieces[0][0]].remove(index)


def _without(times: _Times, index: int, bin_index: int) -> Pieces | None:
    """The pieces of a part if one of its bins gives its tokens to the others; None without room there."""
    part, bins = times.parts[index], times.bins
    given = sum(tokens for i, tokens in times.placed[index] if i == bin_index)
    others = [(i, tokens) for i, tokens in times.placed[index] if i != bin_index]
    per_s = [bins.token_s[i] + part.length * bins.square_s[i] for i, _ in others]
    more = water_fill([times.of(i) for i, _ in others], per_s, [bins.room[i] for i, _ in others], given)
    if more is None or not others:
        return None
    return [(i, tokens + extra) for (i, tokens), extra in zip(others, more, strict=True)]
