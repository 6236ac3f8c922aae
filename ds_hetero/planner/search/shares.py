"""Closed forms of the search: heads over a group, tokens over groups, tokens inside groups.

All of them solve "finish together" problems exactly or by a handful of scaled guesses; the cost model then
chooses between their answers. Numbers in, numbers out: nothing here knows a cluster or a cost model.

Dimension key: D ranks, K groups. ``group_of[D]`` is the ring position of a rank's group.
Seconds per token and per head are reciprocal speeds; a rank that is to stay idle has weight zero.
"""

from __future__ import annotations

from bisect import bisect_right
from functools import lru_cache
from itertools import accumulate

import numpy as np

from ds_hetero.common.arrays import Floats, Ints

QUANTILES = np.array([0.1, 0.25, 0.5, 0.75])  # at which speeds of groups are clipped; chosen, never measured
_MOST_RATIOS = 256  # of speeds that `two_speed_fill` tries; chosen, never measured
_TRIANGLE_BISECTIONS = 50  # of `triangle_fill`, to the last bits of a number


@lru_cache(maxsize=65536)
def apportion(speeds: tuple[float, ...], total: int) -> tuple[int, ...]:
    """Whole shares of ``total`` that minimize ``max(share / speed)``; ties go to the faster, then to the lower index.

    Start from the rounded-down ideal and hand out the rest one by one where it hurts least; exchange shows
    that no other whole split is better. A speed of zero gets nothing.
    """
    all_speeds = sum(speeds)
    shares = [int(total * speed / all_speeds) for speed in speeds]
    for _ in range(total - sum(shares)):
        best = min(
            (i for i, speed in enumerate(speeds) if speed > 0),
            key=lambda i: ((shares[i] + 1) / speeds[i], -speeds[i], i),
        )
        shares[best] += 1
    return tuple(shares)


def two_speed_fill(token_speed_K: Floats, attention_speed_K: Floats) -> Floats:
    """Shares of the sequence by group when each token passes through two machines, one after the other.

    Group k handles its tokens at ``token_speed_K[k]`` outside attention and at ``attention_speed_K[k]`` in it; all
    groups wait for the slowest after each. The linear program

        minimize t1 + t2   subject to   x_k <= t1 * token_speed_k,  x_k <= t2 * attention_speed_k,  sum x = 1

    has its optimum where t2 / t1 is the ratio of the two speeds of some group, so all K ratios are tried.

    Returns:
        x_K, summing to 1.
    """
    # Plain numbers: of a few groups, and there are seldom more, an array's operations take longer.
    pairs = [(t, a) for t, a in zip(token_speed_K.tolist(), attention_speed_K.tolist(), strict=True) if a > 0]
    pairs.sort(key=lambda pair: pair[0] / pair[1])
    ratio_of_group = [t / a for t, a in pairs]  # ascending
    ratios = sorted(set(ratio_of_group))
    if len(ratios) > _MOST_RATIOS:
        some = np.linspace(0, len(ratios) - 1, _MOST_RATIOS).astype(int)
        ratios = [ratios[i] for i in some.tolist()]
    # Token speeds of the first k groups, and attention speeds of all from group k on.
    token_speed_of_first = [0.0, *accumulate(t for t, _ in pairs)]
    attention_speed_from_last = [*accumulate(a for _, a in reversed(pairs))]
    attention_speed_from = [*reversed(attention_speed_from_last), 0.0]

    def time_at(ratio: float) -> float:
        """Time with t2 = ratio * t1: tokens limit the groups up to this ratio, attention limits the others."""
        below = bisect_right(ratio_of_group, ratio)
        return float((1 + ratio) / (token_speed_of_first[below] + ratio * attention_speed_from[below]))

    share_K = np.minimum(token_speed_K, min(ratios, key=time_at) * attention_speed_K)
    return np.asarray(share_K / share_K.sum())


def fill_groups(token_speed_K: Floats, attention_speed_K: Floats, sees_everything: bool) -> Floats:
    """Candidate shares of the sequence by group, ``[C, K]``, best guesses first: HexiSeq's stage II with more forms.

    One group after the other as fast as both machines together allow (no barrier between them), the optimum with a
    barrier (`two_speed_fill`), shares in proportion to either speed and to square roots (arXiv:2605.07569,
    section 4.3), equal shares, and proportional ones clipped at quantiles: a barrier at every ring step favours
    equal groups, its absence favours proportional ones.

    Args:
        token_speed_K: shares per second outside attention.
        attention_speed_K: shares per second in attention, when a group sees the whole sequence.
        sees_everything: False for contiguous causal groups, which see themselves and what comes before.
    """
    active = (token_speed_K > 0) & (attention_speed_K > 0)
    both = np.zeros(len(active))
    both[active] = 1 / (1 / token_speed_K[active] + 1 / attention_speed_K[active])
    two = two_speed_fill(token_speed_K, attention_speed_K)
    equal = active.astype(float)
    candidates = [] if sees_everything else [triangle_fill(attention_speed_K)]
    candidates += [both, two, equal, attention_speed_K, np.sqrt(both), token_speed_K]
    candidates += [np.sqrt(attention_speed_K), np.sqrt(token_speed_K)]
    candidates += [np.minimum(attention_speed_K, most) for most in _quantiles(attention_speed_K[active])]
    share_CK = np.where(active, np.array(candidates), 0.0)
    share_CK = share_CK / share_CK.sum(axis=1, keepdims=True)
    first: dict[bytes, int] = {}  # candidate of every row; the same twice costs evaluations
    for c, row_K in enumerate(np.round(share_CK, 9)):
        first.setdefault(row_K.tobytes(), c)
    return np.asarray(share_CK[list(first.values())])


def _quantiles(values: Floats) -> Floats:
    """Four quantiles, between two values as numpy's are: `numpy.quantile` takes longer than all else here."""
    ordered = np.sort(values)
    place = QUANTILES * (len(ordered) - 1)
    below = np.floor(place).astype(np.int64)
    above = np.minimum(below + 1, len(ordered) - 1)
    low, high, part = ordered[below], ordered[above], place - below
    # From the nearer end, as numpy does, so that rounding is the same.
    from_low, from_high = low + (high - low) * part, high - (high - low) * (1 - part)
    return np.asarray(np.where(part < 0.5, from_low, from_high))


def triangle_fill(attention_speed_K: Floats) -> Floats:
    """Shares with which contiguous causal groups finish together.

    A group that holds x after p sees ``x * (p + x / 2)`` of the square. For a common finishing time every x follows
    from the ones before; the time is found by bisection.
    """

    def shares(time_s: float) -> Floats:
        out = np.empty(len(attention_speed_K))
        before = 0.0
        for k, speed in enumerate(attention_speed_K.tolist()):
            out[k] = (before * before + 2 * time_s * speed) ** 0.5 - before
            before += out[k]
        return out

    low, high = 0.0, 1 / float(attention_speed_K.max())
    for _ in range(_TRIANGLE_BISECTIONS):
        middle = (low + high) / 2
        if shares(middle).sum() > 1:
            high = middle
        else:
            low = middle
    return shares(high)


def fill_ranks(share_CK: Floats, group_of: Ints, token_speed: Floats) -> Floats:
    """Shares of the sequence by rank, ``[C, D]``: inside each group all ranks finish together outside attention."""
    of_group_K = _group_sum(token_speed, group_of, share_CK.shape[1])
    return np.asarray(token_speed * (share_CK / of_group_K)[:, group_of])


def cap_shares(share_K: Floats, group_of: Ints, token_speed: Floats, cap: Floats) -> Floats | None:
    """Like `fill_ranks`, but no rank holds more than its cap: full ranks are fixed, the rest share what remains.

    Returns None where the caps of a group do not hold its share.
    """
    num_groups = len(share_K)
    cap = np.where(token_speed > 0, cap, 0.0)
    if np.any(_group_sum(cap, group_of, num_groups) < share_K * (1 - 1e-12)):
        return None
    full = token_speed <= 0
    while True:
        rest_K = share_K - _group_sum(np.where(full, cap, 0.0), group_of, num_groups)
        speed_K = _group_sum(np.where(full, 0.0, token_speed), group_of, num_groups)
        level_K = np.divide(rest_K, speed_K, out=np.zeros(num_groups), where=speed_K > 0)
        share = np.where(full, cap, token_speed * level_K[group_of])
        over = (share > cap) & ~full
        if not over.any():
            return share
        full = full | over


def whole_shares(share: Floats, total: int, unit: int) -> Ints:
    """``total`` tokens in whole multiples of ``unit``, in proportion to ``share[..., D]``, by largest remainder.

    What does not fill a unit goes to the last rank that has tokens.
    """
    num_units, rest = divmod(total, unit)
    ideal = share * (num_units / share.sum(axis=-1, keepdims=True))
    units = np.floor(ideal + 1e-9).astype(np.int64)
    missing = num_units - units.sum(axis=-1, keepdims=True)
    by_remainder = np.argsort(np.where(share > 0, units - ideal, np.inf), axis=-1, kind="stable")
    # Place of every rank in that order: the first `missing` get one unit more.
    place = np.empty_like(by_remainder)
    np.put_along_axis(place, by_remainder, np.arange(share.shape[-1]), axis=-1)
    units += place < missing
    tokens = units * unit
    if rest:
        from_the_end = np.argmax(units[..., ::-1] > 0, axis=-1)
        last = np.expand_dims(share.shape[-1] - 1 - from_the_end, -1)
        tokens_of_last = np.take_along_axis(tokens, last, axis=-1)
        np.put_along_axis(tokens, last, tokens_of_last + rest, axis=-1)
    return np.asarray(tokens)


def _group_sum(values: Floats, group_of: Ints, num_groups: int) -> Floats:
    """Sums over the ranks of every group, ``[K]``."""
    return np.asarray(np.bincount(group_of, weights=values, minlength=num_groups), dtype=np.float64)
