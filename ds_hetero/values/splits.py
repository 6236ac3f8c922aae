"""Splits of an axis into contiguous parts, and the common refinement of several splits.

A split divides an axis of ``total`` units (tokens, heads, elements of a flat gradient) into contiguous
parts, one for each owner, in order; parts may be empty. Uneven work in ds_hetero is described by two or
more splits: all-to-all tables by a split of tokens and a split of heads, sub-ring tasks by the common
refinement of the groups' head splits. Nothing here imports torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import accumulate, pairwise
from math import lcm


@dataclass(frozen=True, slots=True)
class Split:
    """Contiguous parts of an axis; part ``i`` is ``[cuts[i], cuts[i + 1])``. Raises `ValueError`: a size < 0."""

    sizes: tuple[int, ...]  # units of each part, zero allowed

    def __post_init__(self) -> None:
        if any(not isinstance(size, int) or isinstance(size, bool) or size < 0 for size in self.sizes):
            raise ValueError(f"a split takes whole sizes >= 0, got {self.sizes}")

    @property
    def total(self) -> int:
        """Number of units of the whole axis."""
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
        """Return the part that holds ``unit``; empty parts hold none. Raises `IndexError`: it is outside the axis."""
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
        """Number of units in the piece, at least one."""
        return self.stop - self.start


def refine(splits: Sequence[Split]) -> tuple[Piece, ...]:
    """Return the common refinement: the largest pieces that no boundary of any split divides, in order.

    Splits (3, 1) and (1, 3) of four units have the pieces 0, 1-2 and 3. With the head splits of the groups
    the pieces are HexiSeq's sub-ring tasks (arXiv:2605.07569, section 3.3); with the splits of replicas and
    of ZeRO owners they are HexiScale's gradient chunks.

    Raises:
        ValueError: the splits have different totals, or there is no split.
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
    weight gets nothing. Example: 10 units by weights 3, 2 and 2 are 4.29, 2.86 and 2.86, so the shares are 4, 3 and 3.

    Raises:
        ValueError: negative ``total``, a weight that is negative or not finite, or no positive weight.
    """
    if total < 0:
        raise ValueError(f"cannot share {total} units")
    if any(not 0 <= weight < float("inf") for weight in weights) or not any(weights):
        raise ValueError(f"weights must be finite, >= 0 and not all zero, got {tuple(weights)}")
    whole_weights = _as_whole_numbers(weights)
    total_weight = sum(whole_weights)
    shares = [total * weight // total_weight for weight in whole_weights]
    remainders = [total * weight % total_weight for weight in whole_weights]
    # Rounding down leaves less than one unit per share; these go to the shares that lost most.
    by_remainder = sorted(range(len(shares)), key=lambda i: (-remainders[i], i))
    for i in by_remainder[: total - sum(shares)]:
        shares[i] += 1
    return tuple(shares)


def _as_whole_numbers(weights: Sequence[float]) -> list[int]:
    """Return whole numbers in the exact ratios of the weights: 0.5, 2 and 0.75 are 2, 8 and 3."""
    fractions = [Fraction(weight) for weight in weights]
    common = lcm(*(fraction.denominator for fraction in fractions))
    return [fraction.numerator * (common // fraction.denominator) for fraction in fractions]


def share_in_units(total: int, weights: Sequence[float], unit: int) -> tuple[int, ...]:
    """Return shares as `share` does, with every boundary a multiple of ``unit`` except the end of the axis.

    The remainder that does not fill a unit goes to the last part with a positive weight.
    """
    if unit < 1:
        raise ValueError(f"unit must be >= 1, got {unit}")
    shares = [units * unit for units in share(total // unit, weights)]
    last = max(i for i, weight in enumerate(weights) if weight)
    shares[last] += total % unit
    return tuple(shares)
