"""Covers of heads: which mixes of unlike devices waste the fewest heads.

If every group must be done with its share of attention in the same time, a device of speed c takes at most
``floor(tau * c)`` heads for some common tau, and a group must cover all heads of the model: bin covering over
classes of equal devices. A head cannot be cut, so mixes of fast and slow devices often fit where groups
of one kind waste part of a device. Ten heads, devices of speeds 3 and 1, tau = 1: four fast devices hold 12 heads and
waste two; three fast devices and a slow one hold 10.

Dimension key: C classes of equal devices, T levels tau.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from ds_hetero.common.arrays import Floats, Ints, distinct

# Covers that are looked at for one level. Chosen, never measured.
MAX_PATTERNS = 20_000
# Weights of the mix against wasted heads: a little, none at all, much. Chosen, never measured.
THRIFT = (0.05, 0.0, 0.5)
# A pattern is used for so large a part of the devices that it could use, before the mix is looked at again. Chosen.
_USES_AT_ONCE = 4


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
    levels_T = distinct(np.concatenate([np.arange(1, num_heads + 1) / speed for speed in speed_C]))
    heads_TC = np.minimum(np.floor(levels_T[:, None] * speed_C + 1e-9), num_heads)
    most_groups_T = (heads_TC @ count_C) // num_heads  # if no head were wasted
    possible = np.flatnonzero(most_groups_T >= 1)
    least_time_T = levels_T[possible] / most_groups_T[possible]
    possible = possible[np.argsort(least_time_T, kind="stable")][: 3 * keep]
    covers: list[tuple[float, int, float, list[Ints], Ints]] = []  # time, level, thrift, groups, devices left over
    for t in possible.tolist():
        num_better = sum(time < levels_T[t] / most_groups_T[t] for time, *_ in covers)
        if num_better >= keep:
            break  # no cover of this level or of a later one is among the best
        heads_C = heads_TC[t].astype(np.int64)
        patterns = minimal_covers(heads_C, count_C, num_heads)
        for thrift in THRIFT:
            groups, left = cover(patterns, heads_C, count_C, num_heads, thrift)
            if groups:
                covers.append((float(levels_T[t]) / len(groups), t, thrift, groups, left))
    covers.sort(key=lambda item: item[:3])
    for _, t, _, groups, left in covers[:keep]:
        yield float(levels_T[t]), groups, left


def cover(patterns: Ints, heads_C: Ints, count_C: Ints, num_heads: int, thrift: float) -> tuple[list[Ints], Ints]:
    """Groups, as counts by class, that cover ``num_heads`` with little waste and keep the mix; and what is left.

    Greedy: always the pattern of least waste plus ``thrift`` times its deviation from the mix of the devices still
    free, a few times over before the mix is looked at again.
    """
    left = count_C.copy()
    groups: list[Ints] = []
    while len(patterns):
        patterns = patterns[(patterns <= left).all(axis=1)]
        if not len(patterns):
            break
        waste = patterns @ heads_C - num_heads
        even_mix_C = left * (num_heads / (left @ heads_C))
        deviation = np.abs(patterns - even_mix_C) @ heads_C
        cost = np.round(waste + thrift * deviation, 9)  # ties are ties on every machine
        best = patterns[np.argmin(cost)]
        is_used_C = best > 0
        times = int((left[is_used_C] // best[is_used_C]).min())
        is_exact_mix = deviation.min() <= 1e-9
        if not is_exact_mix:
            times = max(1, times // _USES_AT_ONCE)
        groups += [best] * times
        left = left - times * best
    return groups, left


def minimal_covers(heads_C: Ints, count_C: Ints, num_heads: int) -> Ints:
    """Counts by class that cover all heads with no device to spare, ``[patterns, C]``.

    The counts of all classes but the slowest run over a grid; the slowest class fills up what is missing. Of 3 and 1
    heads a device and 8 heads to cover: (0, 8), (1, 5), (2, 2), (3, 0).
    """
    useful = np.flatnonzero(heads_C)
    fastest_first = useful[np.argsort(-heads_C[useful], kind="stable")]
    limits = [int(min(count_C[c], -(-num_heads // heads_C[c]))) + 1 for c in fastest_first[:-1]]
    while np.log(limits).sum() > np.log(MAX_PATTERNS) + 1e-9:
        limits[int(np.argmax(limits))] -= 1
    # Axes of the grid: classes of which more than none can be used. Of unlike devices there are more classes than axes
    # that an array can have.
    axes = [i for i, limit in enumerate(limits) if limit > 1]
    size = [limits[i] for i in axes]
    grid = np.indices(size).reshape(len(size), int(np.prod(size))).T  # [patterns, axes]
    free, slowest = fastest_first[axes], fastest_first[-1]
    missing = num_heads - grid @ heads_C[free]
    fill = np.maximum(-(-missing // heads_C[slowest]), 0)
    patterns = np.zeros((len(grid), len(heads_C)), dtype=np.int64)
    patterns[:, free] = grid
    patterns[:, slowest] = fill
    # A cover from which a device can be taken away is not minimal.
    covered = patterns @ heads_C
    heads_of_used = np.where(patterns[:, fastest_first] > 0, heads_C[fastest_first], np.iinfo(np.int64).max)
    is_minimal = covered - heads_of_used.min(axis=1) < num_heads
    exist = fill <= count_C[slowest]
    return np.asarray(patterns[is_minimal & exist])
