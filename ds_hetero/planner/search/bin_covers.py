"""Covering heads with devices: which mixes of equal devices make the fewest wasted heads.

If every group must be done with its share of attention in the same time, a device of speed c takes at most
``floor(tau * c)`` heads for some common tau, and a group must cover all heads of the model: bin covering over
classes of equal devices. A head cannot be cut, so mixes of fast and slow devices often fit where groups
of one kind waste part of a device.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from ds_hetero.common.arrays import Floats, Ints, distinct

MAX_PATTERNS = 20_000
THRIFT = (0.05, 0.0, 0.5)


def best_levels(speed_C: Floats, count_C: Ints, num_heads: int, keep: int) -> Iterator[tuple[float, list[Ints], Ints]]:
    """The most promising levels tau and their covers, best first.

    tau runs over the values at which some class gains a head. With b groups at level tau attention takes
    time in proportion to ``tau / b``, so that is the order.

    Args:
        speed_C: speed of each class, count_C: devices of each class.
        num_heads: heads to cover, in units of the head granularity.
        keep: how many covers to yield.

    Yields:
        tau, the groups as counts by class, and the counts left over.
    """
    levels = distinct(np.concatenate([np.arange(1, num_heads + 1) / speed for speed in speed_C]))
    heads_TC = np.minimum(np.floor(levels[:, None] * speed_C + 1e-9), num_heads)
    bins = (heads_TC @ count_C) // num_heads
    possible = np.flatnonzero(bins >= 1)
    possible = possible[np.argsort(levels[possible] / bins[possible], kind="stable")][: 3 * keep]
    covers: list[tuple[float, int, float, list[Ints], Ints]] = []
    for i in possible.tolist():
        if sum(each[0] < levels[i] / bins[i] for each in covers) >= keep:
            break  # no cover of this level or of a later one is among the best
        heads_C = heads_TC[i].astype(np.int64)
        patterns = minimal_covers(heads_C, count_C, num_heads)
        for thrift in THRIFT:
            groups, left = cover(patterns, heads_C, count_C, num_heads, thrift)
            if groups:
                covers.append((float(levels[i]) / len(groups), i, thrift, groups, left))
    covers.sort(key=lambda item: item[:3])
    for _, i, _, groups, left in covers[:keep]:
        yield float(levels[i]), groups, left


def cover(patterns: Ints, heads_C: Ints, count_C: Ints, num_heads: int, thrift: float) -> tuple[list[Ints], Ints]:
    """Form groups that each cover ``num_heads``, wasting little and keeping to the mix that is left.

    Greedy: always the pattern of least waste plus ``thrift`` times its deviation from the mix of the devices still
    free, a few times over before the mix is looked at again.

    Returns:
        groups as counts by class, and the counts left over.
    """
    left = count_C.copy()
    groups: list[Ints] = []
    while len(patterns):
        patterns = patterns[(patterns <= left).all(axis=1)]
        if not len(patterns):
            break
        waste = patterns @ heads_C - num_heads
        even = left * (num_heads / (left @ heads_C))
        deviation = np.abs(patterns - even) @ heads_C
        best = patterns[np.argmin(waste + thrift * deviation)]
        uses = best > 0
        times = int((left[uses] // best[uses]).min())
        if deviation.min() > 1e-9:
            times = max(1, times // 4)
        groups += [best] * times
        left = left - times * best
    return groups, left


def minimal_covers(heads_C: Ints, count_C: Ints, num_heads: int) -> Ints:
    """Counts by class that cover all heads with no device to spare, ``[patterns, C]``.

    Every count but the last class's is free, the last one fills up what is missing.
    """
    useful = np.flatnonzero(heads_C)
    order = useful[np.argsort(-heads_C[useful], kind="stable")]
    limits = [int(min(count_C[c], -(-num_heads // heads_C[c]))) + 1 for c in order[:-1]]
    while np.prod(limits, dtype=float) > MAX_PATTERNS:
        limits[int(np.argmax(limits))] -= 1
    grid = np.indices(limits).reshape(len(limits), int(np.prod(limits))).T
    missing = num_heads - grid @ heads_C[order[:-1]]
    last = order[-1]
    fill = np.maximum(-(-missing // heads_C[last]), 0)
    patterns = np.zeros((len(grid), len(heads_C)), dtype=np.int64)
    patterns[:, order[:-1]] = grid
    patterns[:, last] = fill
    # A cover from which a device can be taken away is not minimal.
    covered = patterns @ heads_C
    smallest = np.where(patterns[:, order] > 0, heads_C[order], np.iinfo(np.int64).max).min(axis=1)
    return np.asarray(patterns[(covered - smallest < num_heads) & (fill <= count_C[last])])
