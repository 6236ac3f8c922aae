"""Reductions over parts of an array that two integer keys define.

Dimension key: I items, P parts.
"""

from __future__ import annotations

from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from ds_hetero.common.arrays import Ints


class GroupBy:
    """Group items by two integer keys, ``[I]`` each, and reduce over each part.

    Parts are ordered by the major key, then by the minor key.

        major       1  0  0  1        items 1 and 2 are the parts (0, 7) and (0, 8),
        minor       7  7  8  7        items 0 and 3 the part (1, 7)
        order       1  2  0  3
        starts      0  1  2
        part_of     2  0  1  2

    Attributes:
        order: items, part after part, ``[I]``.
        starts: where every part begins in `order`, ``[P]``.
    """

    def __init__(self, major: Ints, minor: Ints) -> None:
        self.order: Ints = np.lexsort((minor, major))  # by the last key first
        sorted_major, sorted_minor = major[self.order], minor[self.order]
        differs = (sorted_major[1:] != sorted_major[:-1]) | (sorted_minor[1:] != sorted_minor[:-1])
        self.starts: Ints = np.concatenate([[0], np.flatnonzero(differs) + 1])

    @property
    def first(self) -> Ints:
        """First item of every part, ``[P]``."""
        return self.order[self.starts]

    @cached_property
    def sizes(self) -> Ints:
        """Number of items of every part, ``[P]``."""
        return np.append(self.starts[1:], len(self.order)) - self.starts

    @cached_property
    def part_of(self) -> Ints:
        """Part of every item, ``[I]``."""
        part_of = np.empty(len(self.order), dtype=np.intp)
        part_of[self.order] = np.repeat(np.arange(len(self.starts)), self.sizes)
        return part_of

    def reduce(self, reduce: np.ufunc, values_I: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """Apply ``reduce`` (such as ``np.maximum``) to the items of every part: ``[..., I]`` to ``[..., P]``."""
        return np.asarray(reduce.reduceat(values_I.take(self.order, axis=-1), self.starts, axis=-1))


def run_starts(values: Ints) -> Ints:
    """Return the indices at which runs of equal values begin: 5 5 7 -> 0 2. Values must not be negative.

    This is faster than numpy's ``diff`` on the short arrays of a search.
    """
    is_start = np.concatenate([values[:1] >= 0, values[1:] != values[:-1]])
    return np.flatnonzero(is_start)


def pairs_within_runs(labels: Ints) -> tuple[Ints, Ints]:
    """List all ordered pairs of items with equal labels, sorted by source, then by destination.

    Equal labels must be adjacent. An item is also a pair with itself.

    labels            5  5  7           runs are items 0 and 1, and item 2
    run_size          2  2  1           by item: so many pairs have it as their source
    source            0  0  1  1  2
    place_in_run      0  1  0  1  0     counts up within every source
    destination       0  1  0  1  2     first item of the source's run, plus the place
    """
    run_first = run_starts(labels)
    run_length = np.append(run_first[1:], len(labels)) - run_first
    run_size = np.repeat(run_length, run_length)
    first_of_run = np.repeat(run_first, run_length)
    source = np.repeat(np.arange(len(labels)), run_size)
    first_pair = np.cumsum(run_size) - run_size  # of every source
    place_in_run = np.arange(len(source)) - np.repeat(first_pair, run_size)
    destination = np.repeat(first_of_run, run_size) + place_in_run
    return source, destination
