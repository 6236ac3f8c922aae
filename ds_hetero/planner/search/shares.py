"""Closed forms of the search: shares of heads and tokens with which all finish at the same time.

They divide the heads of a group over its ranks (`apportion`), the sequence over groups (`fill_groups` and the functions
it calls), and the tokens of a group over its ranks (`fill_ranks`, `cap_shares`). Some are exact, others give a few
guesses, of which the cost model then chooses the best. Inputs and results are plain numbers, without a cluster or a
cost model. A rank that has to stay idle has speed zero.

Dimension key: C candidates, D ranks, K groups. ``group_of[D]`` is the ring position of a rank's group.
"""

from __future__ import annotations

import heapq
from bisect import bisect_right
from functools import lru_cache
from itertools import accumulate

import numpy as np

from ds_hetero.common.arrays import Floats, Ints

QUANTILES = np.array([0.1, 0.25, 0.5, 0.75])  # quantiles at which group speeds are clipped; chosen, never measured
_MAX_RATIOS = 256  # ratios of speeds that `two_speed_fill` tries; chosen, never measured
_TRIANGLE_BISECTIONS = 50  # steps of `triangle_fill`, down to the last bits of a number


@lru_cache(maxsize=65536)
def apportion(speeds: tuple[float, ...], total: int) -> tuple[int, ...]:
    """Divide ``total`` into whole shares that minimize ``max(share / speed)``; ties go to the faster, then lower index.

    Start with the ideal shares, rounded down, and give the remaining units one by one to the share that then takes
    least time. An exchange argument shows that no other whole shares are better. A speed of zero gets nothing. Example:
    10 by speeds 4, 2 and 1 is 5, 2 and 1 rounded down. The remaining two go to the first (6 / 4 = 1.5) and to the
    second (3 / 2 = 1.5), not to the third (2 / 1 = 2): 6, 3 and 1.
    """
    all_speeds = sum(speeds)
    shares = [int(total * speed / all_speeds) for speed in speeds]
    # (time with one unit more, -speed, index) of every share that may grow
    next_ends = [((shares[i] + 1) / speed, -speed, i) for i, speed in enumerate(speeds) if speed > 0]
    heapq.heapify(next_ends)
    for _ in range(total - sum(shares)):
        _, negative_speed, best = next_ends[0]
        shares[best] += 1
        heapq.heapreplace(next_ends, ((shares[best] + 1) / -negative_speed, negative_speed, best))
    return tuple(shares)


def two_speed_fill(token_speed_K: Floats, attention_speed_K: Floats) -> Floats:
    """Share the sequence over groups that wait for each other twice: outside attention, and in attention.

    Group k computes its tokens at ``token_speed_K[k]`` outside attention and at ``attention_speed_K[k]`` in attention;
    all groups wait for the slowest one after each. The linear program

        minimize t1 + t2   subject to   x_k <= t1 * token_speed_k,  x_k <= t2 * attention_speed_k,  sum x = 1

    has its optimum where t2 / t1 is the ratio of the two speeds of some group, so all K ratios are tried. Example:
    token speeds 4 and 1, attention speeds 2 and 1, so the ratios are 2 and 1. With t2 = 2 t1 the groups compute 4 t1
    and t1, so t1 = 1/5 and t1 + t2 = 0.6. With t2 = t1 they compute 2 t1 and t1, so t1 = 1/3 and t1 + t2 = 0.67. The
    first is better, with shares of 0.8 and 0.2.

    Returns:
        Shares x_K, which sum to 1.
    """
    # Plain numbers and no arrays: there are seldom more than a few groups, for which arrays take longer.
    pairs = [(t, a) for t, a in zip(token_speed_K.tolist(), attention_speed_K.tolist(), strict=True) if a > 0]
    pairs.sort(key=lambda pair: pair[0] / pair[1])
    ratio_of_group = [t / a for t, a in pairs]  # ascending
    ratios = sorted(set(ratio_of_group))
    if len(ratios) > _MAX_RATIOS:
        sampled = np.linspace(0, len(ratios) - 1, _MAX_RATIOS).astype(int)
        ratios = [ratios[i] for i in sampled.tolist()]
    # Token speeds of the first k groups, and attention speeds of all from group k on.
    token_speed_of_first = [0.0, *accumulate(t for t, _ in pairs)]
    attention_speed_from_last = [*accumulate(a for _, a in reversed(pairs))]
    attention_speed_from = [*reversed(attention_speed_from_last), 0.0]

    def time_at(ratio: float) -> float:
        """Return t1 + t2 for t2 = ratio * t1: tokens limit the groups up to this ratio, attention limits the others."""
        num_below = bisect_right(ratio_of_group, ratio)
        return float((1 + ratio) / (token_speed_of_first[num_below] + ratio * attention_speed_from[num_below]))

    share_K = np.minimum(token_speed_K, min(ratios, key=time_at) * attention_speed_K)
    return np.asarray(share_K / share_K.sum())


def fill_groups(token_speed_K: Floats, attention_speed_K: Floats, sees_everything: bool) -> Floats:
    """Return candidate shares of the sequence by group, ``[C, K]``, best guesses first: HexiSeq's stage II and more.

    The candidates are: shares by the speed of both parts of a layer together, best if groups do not wait for each other
    between them; the optimum if groups wait (`two_speed_fill`); shares in proportion to either speed and to square
    roots (arXiv:2605.07569, section 4.3); equal shares; and shares in proportion to speeds that are clipped at
    quantiles. If groups wait for each other at every ring step, equal shares are better, else proportional ones.

    Args:
        token_speed_K: shares of the sequence per second outside attention.
        attention_speed_K: shares per second in attention, if a group sees the whole sequence.
        sees_everything: False for contiguous groups with causal attention, which see themselves and earlier groups.
    """
    is_active_K = (token_speed_K > 0) & (attention_speed_K > 0)
    layer_speed_K = np.zeros(len(is_active_K))
    layer_speed_K[is_active_K] = 1 / (1 / token_speed_K[is_active_K] + 1 / attention_speed_K[is_active_K])
    with_barrier_K = two_speed_fill(token_speed_K, attention_speed_K)
    equal_K = is_active_K.astype(float)
    candidates = [] if sees_everything else [triangle_fill(attention_speed_K)]
    candidates += [layer_speed_K, with_barrier_K, equal_K, attention_speed_K, np.sqrt(layer_speed_K), token_speed_K]
    candidates += [np.sqrt(attention_speed_K), np.sqrt(token_speed_K)]
    candidates += [np.minimum(attention_speed_K, limit) for limit in _quantiles(attention_speed_K[is_active_K])]
    share_CK = np.where(is_active_K, np.array(candidates), 0.0)
    share_CK = share_CK / share_CK.sum(axis=1, keepdims=True)
    # Equal candidates would be evaluated twice: only the first is kept.
    first_of_row: dict[bytes, int] = {}
    for c, row_K in enumerate(np.round(share_CK, 9)):
        first_of_row.setdefault(row_K.tobytes(), c)
    return np.asarray(share_CK[list(first_of_row.values())])


def _quantiles(values: Floats) -> Floats:
    """Return the values at `QUANTILES`, interpolated as by `numpy.quantile`, which would be the slowest call here."""
    ordered = np.sort(values)
    place = QUANTILES * (len(ordered) - 1)
    below = np.floor(place).astype(np.int64)
    above = np.minimum(below + 1, len(ordered) - 1)
    low, high, fraction = ordered[below], ordered[above], place - below
    # Interpolated from the nearer end, as numpy does, so that rounding is the same.
    from_low, from_high = low + (high - low) * fraction, high - (high - low) * (1 - fraction)
    return np.asarray(np.where(fraction < 0.5, from_low, from_high))


def triangle_fill(attention_speed_K: Floats) -> Floats:
    """Return shares with which contiguous groups finish causal attention at the same time, ``[K]``.

    A group with a share x behind a share p of earlier groups computes ``x * (p + x / 2)`` of the square of queries and
    keys. For a given time every share follows from the earlier ones; the time is found by bisection.
    """

    def shares(time_s: float) -> Floats:
        """Return the shares that the groups compute in this time, ``[K]``; their sum may differ from 1."""
        share_K = np.empty(len(attention_speed_K))
        earlier_share = 0.0  # p of the formula: x solves x * (p + x / 2) = time * speed
        for k, speed in enumerate(attention_speed_K.tolist()):
            share_K[k] = (earlier_share * earlier_share + 2 * time_s * speed) ** 0.5 - earlier_share
            earlier_share += share_K[k]
        return share_K

    low, high = 0.0, 1 / float(attention_speed_K.max())
    for _ in range(_TRIANGLE_BISECTIONS):
        middle = (low + high) / 2
        if shares(middle).sum() > 1:
            high = middle
        else:
            low = middle
    return shares(high)


def fill_ranks(share_CK: Floats, group_of: Ints, token_speed: Floats) -> Floats:
    """Return shares of the sequence by rank, ``[C, D]``: the ranks of a group finish together outside attention.

    Args:
        share_CK: shares of the groups.
    """
    token_speed_K = _group_sum(token_speed, group_of, share_CK.shape[1])
    return np.asarray(token_speed * (share_CK / token_speed_K)[:, group_of])


def cap_shares(share_K: Floats, group_of: Ints, token_speed: Floats, cap: Floats) -> Floats | None:
    """Return shares as `fill_ranks` does, ``[D]``, but no rank gets more than its cap.

    A rank that would get more gets its cap, and the others of its group share the remainder. None if the caps of a
    group sum to less than its share.
    """
    num_groups = len(share_K)
    cap = np.where(token_speed > 0, cap, 0.0)
    if np.any(_group_sum(cap, group_of, num_groups) < share_K * (1 - 1e-12)):
        return None
    is_full = token_speed <= 0
    while True:
        remaining_K = share_K - _group_sum(np.where(is_full, cap, 0.0), group_of, num_groups)
        speed_K = _group_sum(np.where(is_full, 0.0, token_speed), group_of, num_groups)
        time_K = np.divide(remaining_K, speed_K, out=np.zeros(num_groups), where=speed_K > 0)
        share = np.where(is_full, cap, token_speed * time_K[group_of])
        is_over = (share > cap) & ~is_full
        if not is_over.any():
            return share
        is_full = is_full | is_over


def whole_shares(share: Floats, total: int, unit: int) -> Ints:
    """Divide ``total`` tokens in proportion to ``share[..., D]``, in multiples of ``unit``, by largest remainder.

    The tokens that do not fill a unit go to the last rank that has tokens.
    """
    num_units, remainder = divmod(total, unit)
    ideal = share * (num_units / share.sum(axis=-1, keepdims=True))
    units = np.floor(ideal + 1e-9).astype(np.int64)
    missing = num_units - units.sum(axis=-1, keepdims=True)
    by_remainder = np.argsort(np.where(share > 0, units - ideal, np.inf), axis=-1, kind="stable")
    # Place of every rank in that order: the first `missing` get one unit more.
    place = np.empty_like(by_remainder)
    np.put_along_axis(place, by_remainder, np.arange(share.shape[-1]), axis=-1)
    units += place < missing
    tokens = units * unit
    if remainder:
        place_from_end = np.argmax(units[..., ::-1] > 0, axis=-1)
        last = np.expand_dims(share.shape[-1] - 1 - place_from_end, -1)
        tokens_of_last = np.take_along_axis(tokens, last, axis=-1)
        np.put_along_axis(tokens, last, tokens_of_last + remainder, axis=-1)
    return np.asarray(tokens)


def _group_sum(values: Floats, group_of: Ints, num_groups: int) -> Floats:
    """Return the sum of ``values`` over the ranks of every group, ``[K]``."""
    return np.asarray(np.bincount(group_of, weights=values, minlength=num_groups), dtype=np.float64)
