"""Find groups of unlike devices that compute all heads of the model and waste little speed (bin covering).

All groups should end attention at the same time, which a common level tau expresses: a device of speed c computes at
most ``floor(tau * c)`` heads. A group needs devices that together cover all heads of the model. A head cannot be cut,
so a mix of fast and slow devices often fits exactly where devices of one kind waste a part. Example: 10 heads, speeds 3
and 1, tau = 1. Four fast devices cover 12 heads and waste two; three fast devices and a slow one cover exactly 10.

Dimension key: C classes of equal devices, T levels tau.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from ds_hetero.common.arrays import Floats, Ints, distinct

# Minimal covers that are listed for one level. Chosen, never measured.
MAX_PATTERNS = 20_000
# Weights of an even mix of kinds against wasted heads, see `cover`: a little, none, much. Chosen, never measured.
THRIFT = (0.05, 0.0, 0.5)
# A pattern is used for one in so many of the groups that it could form, before the best pattern is chosen again.
# Chosen, never measured.
_REUSE_DIVISOR = 4


def best_levels(speed_C: Floats, count_C: Ints, num_heads: int, keep: int) -> Iterator[tuple[float, list[Ints], Ints]]:
    """Yield the most promising levels tau and their groups, best first.

    The levels are those at which a device of some class gains a head. With b groups at level tau, attention takes time
    in proportion to ``tau / b``, which gives the order.

    Args:
        speed_C: speed of a device of each class.
        count_C: devices of each class.
        num_heads: heads to cover, in units of the head granularity.
        keep: number of covers to yield.

    Yields:
        tau; the devices of every group, as counts by class; and the devices in no group, as counts by class.
    """
    # At level i / speed a device of this speed computes i heads, and at any lower level fewer.
    levels_T = distinct(np.concatenate([np.arange(1, num_heads + 1) / speed for speed in speed_C]))
    heads_TC = np.minimum(np.floor(levels_T[:, None] * speed_C + 1e-9), num_heads)
    most_groups_T = (heads_TC @ count_C) // num_heads  # if no head were wasted
    possible_levels = np.flatnonzero(most_groups_T >= 1)
    least_times = levels_T[possible_levels] / most_groups_T[possible_levels]
    promising_levels = possible_levels[np.argsort(least_times, kind="stable")][: 3 * keep]
    covers: list[tuple[float, int, float, list[Ints], Ints]] = []  # time, level, thrift, groups, unused devices
    for t in promising_levels.tolist():
        num_better = sum(time < levels_T[t] / most_groups_T[t] for time, *_ in covers)
        if num_better >= keep:
            break  # no cover of this level or of a later one is among the best
        heads_C = heads_TC[t].astype(np.int64)
        patterns = minimal_covers(heads_C, count_C, num_heads)
        for thrift in THRIFT:
            groups, unused = cover(patterns, heads_C, count_C, num_heads, thrift)
            if groups:
                covers.append((float(levels_T[t]) / len(groups), t, thrift, groups, unused))
    covers.sort(key=lambda item: item[:3])
    for _, t, _, groups, unused in covers[:keep]:
        yield float(levels_T[t]), groups, unused


def cover(patterns: Ints, heads_C: Ints, count_C: Ints, num_heads: int, thrift: float) -> tuple[list[Ints], Ints]:
    """Form groups that cover ``num_heads`` with little waste; return them and the unused devices, as counts by class.

    Greedy: the next group takes the pattern with the least sum of waste and ``thrift`` times its deviation from the mix
    of the unused devices, both in heads. A group that takes the kinds evenly leaves an even mix for later groups. A
    pattern is used several times before the mix is computed again.

    Args:
        patterns: sets of devices that cover all heads, as counts by class, ``[patterns, C]``.
        heads_C: heads that a device of each class computes.
        count_C: devices of each class.
    """
    unused = count_C.copy()
    groups: list[Ints] = []
    while len(patterns):
        patterns = patterns[(patterns <= unused).all(axis=1)]
        if not len(patterns):
            break
        waste = patterns @ heads_C - num_heads
        even_mix_C = unused * (num_heads / (unused @ heads_C))
        deviation = np.abs(patterns - even_mix_C) @ heads_C
        cost = np.round(waste + thrift * deviation, 9)  # ties are ties on every machine
        best = patterns[np.argmin(cost)]
        is_used_C = best > 0
        times = int((unused[is_used_C] // best[is_used_C]).min())
        is_exact_mix = deviation.min() <= 1e-9
        if not is_exact_mix:  # every use changes the mix, and may make another pattern better
            times = max(1, times // _REUSE_DIVISOR)
        groups += [best] * times
        unused = unused - times * best
    return groups, unused


def minimal_covers(heads_C: Ints, count_C: Ints, num_heads: int) -> Ints:
    """List the sets of devices that cover all heads and of which no device can be left out.

    The counts of all classes but the slowest run over a grid, and devices of the slowest class compute the missing
    heads. Example: devices with 3 and with 1 head, 8 heads to cover: (0, 8), (1, 5), (2, 2), (3, 0).

    Args:
        heads_C: heads that a device of each class computes.
        count_C: devices of each class.

    Returns:
        Counts by class, ``[patterns, C]``. With very many patterns some are left out, see `MAX_PATTERNS`.
    """
    useful = np.flatnonzero(heads_C)
    fastest_first = useful[np.argsort(-heads_C[useful], kind="stable")]
    limits = [int(min(count_C[c], -(-num_heads // heads_C[c]))) + 1 for c in fastest_first[:-1]]
    while np.log(limits).sum() > np.log(MAX_PATTERNS) + 1e-9:
        limits[int(np.argmax(limits))] -= 1
    # Axes of the grid: classes of which at least one device can be used. With very unlike devices there are more
    # classes than an array can have axes.
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
    is_available = fill <= count_C[slowest]
    return np.asarray(patterns[is_minimal & is_available])
