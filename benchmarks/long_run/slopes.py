"""Whether a quantity grows over a run: the slope of a line through it, with its confidence interval."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import fmean

from scipy.stats import linregress, t

WARM_UP = 0.25  # of the run: caches fill, allocators reach their size
BLOCKS = 20
FEWEST_READINGS = math.ceil(BLOCKS / (1 - WARM_UP))
_CONFIDENCE = 0.95


@dataclass(frozen=True)
class Slope:
    """Growth per 1,000 steps.

    Args:
        mean: of the quantity, after the warm-up.
        per_1000_steps: slope.
        low, high: its confidence interval.
    """

    mean: float
    per_1000_steps: float
    low: float
    high: float

    @property
    def grows(self) -> bool:
        """Whether the slope is positive beyond noise."""
        return self.low > 0


def slope_of(steps: Sequence[int], values: Sequence[float], num_series: int = 1, warm_up: int | None = None) -> Slope:
    """Fit a line to the means of blocks of equal length, after the warm-up.

    Readings that follow each other are alike, which would make the interval of a line through all of them too narrow;
    means of blocks are nearly independent.

    Args:
        steps: of the readings, increasing.
        num_series: number of quantities that are judged together. Each interval is widened, so that all of them hold
            with a confidence of 95 % (Bonferroni).
        warm_up: steps that do not count; None for the first quarter of the readings.

    Raises:
        ValueError: there are too few readings.
    """
    first = int(len(steps) * WARM_UP) if warm_up is None else bisect_right(steps, warm_up)
    steps, values = steps[first:], values[first:]
    if len(steps) < BLOCKS:
        raise ValueError(f"{len(steps)} readings after the warm-up are fewer than {BLOCKS} blocks.")
    bounds = [len(steps) * block // BLOCKS for block in range(BLOCKS + 1)]
    blocks = [slice(begin, end) for begin, end in pairwise(bounds)]
    x = [fmean(steps[block]) / 1000 for block in blocks]
    y = [fmean(values[block]) for block in blocks]
    fit = linregress(x, y)
    factor = t.ppf(1 - (1 - _CONFIDENCE) / (2 * num_series), BLOCKS - 2)
    margin = float(factor * fit.stderr) if math.isfinite(fit.stderr) else 0.0
    slope = float(fit.slope)
    return Slope(fmean(values), slope, slope - margin, slope + margin)
