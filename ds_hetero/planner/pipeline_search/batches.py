"""Micro-batches of pipelines that take ``fill + (m - 1) period`` seconds for m of them, so that the last ends soonest.

Every pipeline trains at least one micro-batch, and all together exactly the global batch.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from math import floor

TOLERANCE = 1e-9  # of a time, for micro-batches that just fit; less is rounding


def batch_bound_s(fill_s: Sequence[float], period_s: Sequence[float], sizes: Sequence[int], samples: int) -> float:
    """Return a time that no split undercuts: fractions of micro-batches, and negative ones, are allowed."""
    missing, rate = float(samples), 0.0
    for fill, period, size in zip(fill_s, period_s, sizes, strict=True):
        missing += size * (fill / period - 1)
        rate += size / period
    return max(missing / rate, max(fill_s))


def split_global_batch(
    fill_s: Sequence[float], period_s: Sequence[float], sizes: Sequence[int], samples: int
) -> list[int] | None:
    """Return the micro-batches of every pipeline; None if no numbers >= 1 of them make up the global batch.

    Exact where every size divides the next larger one, as powers of two do; other sizes may miss a split.

    Args:
        fill_s: time of the first micro-batch, by pipeline.
        period_s: of each following one.
    """
    if sum(sizes) > samples:
        return None
    bound = batch_bound_s(fill_s, period_s, sizes, samples)
    counts = _within(bound, fill_s, period_s)
    if len(set(sizes)) == 1:
        if samples % sizes[0]:
            return None
        return _exact_count(counts, samples // sizes[0], fill_s, period_s)
    return _mixed(bound, fill_s, period_s, sizes, samples)


def _within(limit_s: float, fill_s: Sequence[float], period_s: Sequence[float]) -> list[int]:
    """Micro-batches that end by ``limit_s``, at least one of each."""
    pairs = zip(fill_s, period_s, strict=True)
    return [max(1, floor((limit_s - fill) / period + TOLERANCE) + 1) for fill, period in pairs]


def _exact_count(counts: list[int], total: int, fill_s: Sequence[float], period_s: Sequence[float]) -> list[int]:
    """Add the micro-batches that end first, or remove the ones that end last, until there are ``total``."""
    missing = total - sum(counts)
    if missing > 0:
        ends = [(fill_s[i] + counts[i] * period_s[i], i) for i in range(len(counts))]
        heapq.heapify(ends)
        for _ in range(missing):
            end, i = ends[0]
            counts[i] += 1
            heapq.heapreplace(ends, (end + period_s[i], i))
    elif missing < 0:
        ends = [(-fill_s[i] - (counts[i] - 1) * period_s[i], i) for i in range(len(counts)) if counts[i] > 1]
        heapq.heapify(ends)
        for _ in range(-missing):
            end, i = ends[0]
            counts[i] -= 1
            if counts[i] > 1:
                heapq.heapreplace(ends, (end + period_s[i], i))
            else:
                heapq.heappop(ends)
    return counts


def _mixed(
    bound_s: float, fill_s: Sequence[float], period_s: Sequence[float], sizes: Sequence[int], samples: int
) -> list[int] | None:
    """The least limit under which exactly ``samples`` can be made up, by bisection."""
    # First upwards to a limit that is wide enough: 1.1^40 is 45 times the bound. Chosen, never measured.
    low, high = bound_s, bound_s
    chosen = None
    for _ in range(40):
        chosen = _make_up(_within(high, fill_s, period_s), sizes, samples)
        if chosen is not None:
            break
        high = 1.1 * high + max(period_s)
    if chosen is None:
        return None
    while high - low > TOLERANCE * high:
        middle = (low + high) / 2
        counts = _make_up(_within(middle, fill_s, period_s), sizes, samples)
        if counts is None:
            low = middle
        else:
            high, chosen = middle, counts
    return chosen


def _make_up(most: Sequence[int], sizes: Sequence[int], samples: int) -> list[int] | None:
    """Counts of at least 1 and at most ``most`` with the given sum; takes away large micro-batches first."""
    counts = list(most)
    excess = sum(size * count for size, count in zip(sizes, counts, strict=True)) - samples
    for i in sorted(range(len(sizes)), key=lambda i: (-sizes[i], i)):
        fewer = min(counts[i] - 1, max(excess, 0) // sizes[i])
        counts[i] -= fewer
        excess -= fewer * sizes[i]
    return counts if excess == 0 else None
