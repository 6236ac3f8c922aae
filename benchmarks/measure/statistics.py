"""Compare alternating runs by a robust ratio: the median over pairs with its spread."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import comb
from statistics import median, quantiles


@dataclass(frozen=True)
class Comparison:
    """Times of a peer and of ours.

    Args:
        pairs: number of runs of each.
        peer_s, ours_s: median seconds.
        ratio: median over pairs of peer / ours; above 1 ours is faster.
        quartiles: of the same ratios.
        interval: 95 % interval of the median by the sign test; all ratios if there are too few pairs for it.
    """

    pairs: int
    peer_s: float
    ours_s: float
    ratio: float
    quartiles: tuple[float, float]
    interval: tuple[float, float]


def compare(peer_s: Sequence[float], ours_s: Sequence[float]) -> Comparison:
    """Compare runs that were made in pairs, one right after the other, so that both had the same machine."""
    ratios = sorted(peer / ours for peer, ours in zip(peer_s, ours_s, strict=True))
    low, _, high = quantiles(ratios, n=4, method="inclusive") if len(ratios) > 1 else ratios * 3
    trim = _outside_of_interval(len(ratios))
    return Comparison(
        pairs=len(ratios),
        peer_s=median(peer_s),
        ours_s=median(ours_s),
        ratio=median(ratios),
        quartiles=(low, high),
        interval=(ratios[trim], ratios[-1 - trim]),
    )


def within_bound(text: str, share_of_bound: float) -> str:
    """Return ``text``, a figure for people, or "invalid" if the measurement is better than its bound.

    Nothing is faster than its bound: other work on the machine has disturbed one of the two measurements.
    """
    return text if round(share_of_bound, 3) <= 1 else "invalid"  # to a tenth of a percent, as figures are shown


def _outside_of_interval(pairs: int) -> int:
    """Return how many of the sorted ratios at each end are outside of the median's 95 % interval.

    The true median is below the k-th smallest of n values with the probability that fewer than k of n fair coins show
    heads; both ends together may have 5 %.
    """
    below, trim = 1, 0  # ways to have at most `trim` heads
    while 2 * below <= 0.05 * 2**pairs:
        trim += 1
        below += comb(pairs, trim)
    return max(0, trim - 1)
