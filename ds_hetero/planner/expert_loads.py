"""How evenly a router loads the ranks that divide the experts, and the shares that would balance its choice.

Divided experts are planned as if every expert got equally many rows (`ds_hetero.cost.divided_experts`). If a router
prefers some, the ranks of these compute more, and all ranks wait for them in every layer:

    time of experts = sum over layers of the most rows of a rank, divided by its weight

A weight is the rank's part of the work that the job has planned for it: its speed with ``"by_speed"``, or the number
that the section gives it.

    two ranks of weights 1, and rows 70, 10, 10, 10 of four experts: 2 | 2 experts take 80, 1 | 3 take 70

Dimension key: L layers, E experts of a layer, R ranks of a replica.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

from ds_hetero.values.splits import Split

_TRIED_RANKS = 4  # most and least loaded ones between which experts move; more take longer on many ranks

RowsLE = Sequence[Sequence[int]]
"""Rows that every expert of every layer got, [L][E]."""


def rows_of_ranks(rows_LE: RowsLE, sizes_R: Sequence[int]) -> list[int]:
    """Return the rows of every rank over all layers, ``[R]``. ``sizes_R``: experts of a layer on each rank."""
    rows_of_experts = [sum(of_layers) for of_layers in zip(*rows_LE, strict=True)]
    return [sum(rows_of_experts[start:stop]) for start, stop in Split(tuple(sizes_R)).ranges]


def experts_time(rows_LE: RowsLE, sizes_R: Sequence[int], weights_R: Sequence[float]) -> float:
    """Return the time of all layers' experts, in rows by a rank of weight 1.

    Args:
        sizes_R: experts of a layer on each rank; 0 where the weight is 0.
    """
    return _time(_sums_before(rows_LE), sizes_R, weights_R)


def _sums_before(rows_LE: RowsLE) -> list[list[int]]:
    """Return for each layer the rows of the experts before every expert, and at the end of all."""
    return [list(accumulate(rows_E, initial=0)) for rows_E in rows_LE]


def _time(before_LE: Sequence[Sequence[int]], sizes_R: Sequence[int], weights_R: Sequence[float]) -> float:
    """Return `experts_time` from the sums of rows."""
    ranges = Split(tuple(sizes_R)).ranges
    working = [(*cut, weight) for cut, weight in zip(ranges, weights_R, strict=True) if weight > 0]
    total = 0.0
    for before in before_LE:  # all ranks wait for the slowest in every layer
        total += max((before[stop] - before[start]) / weight for start, stop, weight in working)
    return total


def balanced_experts(rows_LE: RowsLE, sizes_R: Sequence[int], weights_R: Sequence[float]) -> tuple[int, ...]:
    """Return the experts of every rank under which these rows take least time, as far as single moves find it.

    From ``sizes_R`` on, an expert moves from one of the most loaded ranks to a neighbour or to one of the least loaded
    ones, while that shortens `experts_time`; the ranges of the ranks between move along. Ranks of weight 0 get none.
    """
    before_LE = _sums_before(rows_LE)
    best, best_s = list(sizes_R), _time(before_LE, sizes_R, weights_R)
    working = [rank for rank, weight in enumerate(weights_R) if weight > 0]
    while True:
        loads = rows_of_ranks(rows_LE, best)
        by_load = sorted(
            working, key=[load / (weight or 1.0) for load, weight in zip(loads, weights_R, strict=True)].__getitem__
        )
        moved: list[int] | None = None
        for giver in by_load[-_TRIED_RANKS:]:
            place = working.index(giver)
            neighbours = working[max(place - 1, 0) : place + 2]
            for taker in sorted({*by_load[:_TRIED_RANKS], *neighbours} - {giver}):
                if not best[giver]:
                    continue
                sizes = list(best)
                sizes[giver] -= 1
                sizes[taker] += 1
                sizes_s = _time(before_LE, sizes, weights_R)
                if sizes_s < best_s:
                    moved, best_s = sizes, sizes_s
        if moved is None:
            return tuple(best)
        best = moved
