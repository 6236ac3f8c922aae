"""Splits of an axis, and what two splits have in common.

A split cuts an axis of ``total`` units (tokens, heads, elements of a flat gradient) into contiguous
parts, one per owner in order; parts may be empty. Every uneven thing in ds_hetero is the intersection
of two splits: the all-to-all tables are tokens x heads, the sub-ring tasks are the common refinement of
the groups' head cuts. Plain integers; nothing here imports torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import accumulate, pairwise


@dataclass(frozen=True, slots=True)
class Split:
    """Contiguous parts of an axis; part ``i`` is ``[cuts[i], cuts[i + 1])``. Raises `ValueError`: a size < 0."""

    sizes: tuple[int, ...]  # units of each part, zero allowed

    def __post_init__(self) -> None:
        if any(not isinstance(size, int) or isinstance(size, bool) or size < 0 for size in self.sizes):
            raise ValueError(f"a split takes whole sizes >= 0, got {self.sizes}")

    @property
    def total(self) -> int:
        """Units of the whole axis."""
        return sum(self.sizes)

    @property
    def cuts(self) -> tuple[int, ...]:
        """Boundaries of the parts, ``len(sizes) + 1`` of them, from 0 to ``total``."""
        return tuple(accumulate(self.sizes, initial=0))

    @property
    def ranges(self) -> tuple[tuple[int, int], ...]:
        """Range ``(start, stop)`` of every part."""
        return tuple(pairwise(self.cuts))

    def owner(self, unit: int) -> int:
        """The part that holds ``unit``; empty parts hold nothing. Raises `IndexError`: it lies outside the axis."""
        for part, (start, stop) in enumerate(self.ranges):
            if start <= unit < stop:
                return part
        raise IndexError(f"unit {unit} lies outside a split of {self.total} units")


@dataclass(frozen=True, slots=True)
class Piece:
    """A range of the axis; ``owners[i]`` is the part of the i-th split that contains ``[start, stop)``."""

    start: int
    stop: int
    owners: tuple[int, ...]

    @property
    def size(self) -> int:
        """Units in the piece, at least one."""
        return self.stop - self.start


def refine(splits: Sequence[Split]) -> tuple[Piece, ...]:
    """The coarsest pieces that no cut of any split divides, in order. Raises `ValueError`: unlike totals, or no split.

    With the head cuts of the groups as ``splits`` the pieces are HexiSeq's sub-ring tasks
    (arXiv:2605.07569, section 3.3); with the cuts of replicas and of ZeRO owners they are HexiScale's
    gradient chunks.
    """
    totals = {split.total for split in splits}
    if len(totals) != 1:
        raise ValueError(f"only splits of one axis have a common refinement, got totals {sorted(totals)}")
    parts = [0] * len(splits)
    ranges = [split.ranges for split in splits]
    pieces = []
    start = 0
    while start < splits[0].total:
        for i, split_ranges in enumerate(ranges):
            while split_ranges[parts[i]][1] <= start:
                parts[i] += 1
        stop = min(split_ranges[part][1] for split_ranges, part in zip(ranges, parts, strict=True))
        pieces.append(Piece(start, stop, tuple(parts)))
        start = stop
    return tuple(pieces)


def share(total: int, weights: Sequence[float]) -> tuple[int, ...]:
    """Return whole shares of ``total`` in proportion to ``weights``, by largest remainder; ties go to the lower index.

    Computed in exact rational arithmetic, so every rank and every machine gets the same answer. A zero
    weight gets nothing.

    Raises:
        ValueError: negative ``total``, a weight that is negative or not finite, or no positive weight.
    """
    if total < 0:
        raise ValueError(f"cannot share {total} units")
    if any(not 0 <= weight < float("inf") for weight in weights) or not any(weights):
        raise ValueError(f"weights must be finite, >= 0 and not all zero, got {tuple(weights)}")
    exact = [Fraction(weight) for weight in weights]
    whole = sum(exact)
    ideal = [total * weight / whole for weight in exact]
    shares = [int(x) for x in ideal]
    by_remainder = sorted(range(len(ideal)), key=lambda i: (shares[i] - ideal[i], i))
    for i in by_remainder[: total - sum(shares)]:
        shares[i] += 1
    return tuple(shares)


def share_in_units(total: int, weights: Sequence[float], unit: int) -> tuple[int, ...]:
    """Like `share`, with every boundary a multiple of ``unit`` except the end of the axis.

    The rest that does not fill a unit goes to the last part with a positive weight.
    """
    if unit < 1:
        raise ValueError(f"unit must be >= 1, got {unit}")
    shares = [units * unit for units in share(total // unit, weights)]
    last = max(i for i, weight in enumerate(weights) if weight)
    shares[last] += total % unit
    return tuple(shares)
