"""Split the global batch over pipelines so that the slowest one ends as early as possible.

A pipeline takes ``fill + (m - 1) period`` seconds for m micro-batches. Each trains at least one, and all together
exactly the global batch. Example: 8 samples, micro-batches of 1, fills of 2 s, periods of 1 and 3 s. With 6 and 2
micro-batches the pipelines take 2 + 5 = 7 s and 2 + 3 = 5 s; with 5 and 3 they take 6 s and 8 s, so 6 and 2 is chosen.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from math import floor

TOLERANCE = 1e-9  # relative error of a time; micro-batches that end later by less still end in time


def batch_bound_s(fill_s: Sequence[float], period_s: Sequence[float], sizes: Sequence[int], samples: int) -> float:
    """Return a lower bound of the slowest pipeline's time, for which numbers of micro-batches may be any fractions.

    If all pipelines end at the time T, pipeline i trains size_i ((T - fill_i) / period_i + 1) samples. The bound is the
    T at which these sum to ``samples``, or the longest fill. The arguments are those of `split_global_batch`.
    """
    samples_at_full_rate, samples_per_s = float(samples), 0.0
    for fill, period, size in zip(fill_s, period_s, sizes, strict=True):
        samples_at_full_rate += size * (fill / period - 1)
        samples_per_s += size / period
    return max(samples_at_full_rate / samples_per_s, max(fill_s))


def split_global_batch(
    fill_s: Sequence[float], period_s: Sequence[float], sizes: Sequence[int], samples: int
) -> list[int] | None:
    """Return the micro-batches of every pipeline; None if no numbers of at least 1 add up to the global batch.

    The result is optimal if every size divides the next larger one, as powers of two do; with other sizes a possible
    split may be missed.

    Args:
        fill_s: time of the first micro-batch, by pipeline.
        period_s: additional time of each further micro-batch, by pipeline.
        sizes: samples of a micro-batch, by pipeline.
        samples: global batch.
    """
    if sum(sizes) > samples:
        return None
    bound = batch_bound_s(fill_s, period_s, sizes, samples)
    counts = _counts_within(bound, fill_s, period_s)
    if len(set(sizes)) == 1:
        if samples % sizes[0]:
            return None
        return _with_total(counts, samples // sizes[0], fill_s, period_s)
    return _split_unequal_sizes(bound, fill_s, period_s, sizes, samples)


def _counts_within(limit_s: float, fill_s: Sequence[float], period_s: Sequence[float]) -> list[int]:
    """Return for every pipeline the largest number of micro-batches that end by ``limit_s``, but at least one."""
    pairs = zip(fill_s, period_s, strict=True)
    return [max(1, floor((limit_s - fill) / period + TOLERANCE) + 1) for fill, period in pairs]


def _with_total(counts: list[int], total: int, fill_s: Sequence[float], period_s: Sequence[float]) -> list[int]:
    """Change the numbers of micro-batches so that their sum is ``total``; return them, changed in place.

    Pipelines that would end first get more, pipelines that end last get fewer, but at least one.
    """
    missing = total - sum(counts)
    if missing > 0:
        # Heap of (time at which one more micro-batch would end, pipeline).
        next_ends = [(fill_s[i] + counts[i] * period_s[i], i) for i in range(len(counts))]
        heapq.heapify(next_ends)
        for _ in range(missing):
            end_s, i = next_ends[0]
            counts[i] += 1
            heapq.heapreplace(next_ends, (end_s + period_s[i], i))
    elif missing < 0:
        # Heap of (time at which the last micro-batch ends, pipeline); negative, so that the latest comes first.
        # A pipeline keeps one: those that have no more are left out.
        removable = [i for i, count in enumerate(counts) if count > 1]
        last_ends = [(-(fill_s[i] + (counts[i] - 1) * period_s[i]), i) for i in removable]
        heapq.heapify(last_ends)
        for _ in range(-missing):
            negative_end_s, i = last_ends[0]
            counts[i] -= 1
            if counts[i] > 1:
                heapq.heapreplace(last_ends, (negative_end_s + period_s[i], i))
            else:
                heapq.heappop(last_ends)
    return counts


def _split_unequal_sizes(
    bound_s: float, fill_s: Sequence[float], period_s: Sequence[float], sizes: Sequence[int], samples: int
) -> list[int] | None:
    """Return the micro-batches for the shortest time in which exactly ``samples`` can be trained, by bisection.

    None if no time up to about 45 times the bound allows it.
    """
    # First upwards to a limit that is wide enough: 1.1^40 is 45 times the bound. Chosen, never measured.
    low_s, high_s = bound_s, bound_s
    best_counts = None
    for _ in range(40):
        best_counts = _with_sum(_counts_within(high_s, fill_s, period_s), sizes, samples)
        if best_counts is not None:
            break
        high_s = 1.1 * high_s + max(period_s)
    if best_counts is None:
        return None
    while high_s - low_s > TOLERANCE * high_s:
        middle_s = (low_s + high_s) / 2
        counts = _with_sum(_counts_within(middle_s, fill_s, period_s), sizes, samples)
        if counts is None:
            low_s = middle_s
        else:
            high_s, best_counts = middle_s, counts
    return best_counts


def _with_sum(limits: Sequence[int], sizes: Sequence[int], samples: int) -> list[int] | None:
    """Return numbers of micro-batches, from 1 to ``limits``, that together hold exactly ``samples``; None if none do.

    The method begins at the limits and removes large micro-batches first. Example: limits 3 and 3, sizes 4 and 1, 12
    samples. The limits hold 15 samples, 3 too many. No micro-batch of 4 can be removed, and two of 1 can. One sample is
    still too many, so the result is None.
    """
    counts = list(limits)
    excess = sum(size * count for size, count in zip(sizes, counts, strict=True)) - samples
    for i in sorted(range(len(sizes)), key=lambda i: (-sizes[i], i)):
        fewer = min(counts[i] - 1, max(excess, 0) // sizes[i])
        counts[i] -= fewer
        excess -= fewer * sizes[i]
    return counts if excess == 0 else None
