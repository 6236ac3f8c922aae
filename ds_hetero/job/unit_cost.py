"""Cost of a unit of work on one rank, and how sure it is: seconds per FLOP of attention, per token of the rest."""

from __future__ import annotations

from collections import deque
from math import log, sqrt
from statistics import median

from ds_hetero.runtime.step_clock import StepTimes

LEAST_ERROR_OF_COSTS = 0.003  # relative; few steps can agree by chance
_KEPT_CHANGES = 64
_SPREAD_OF_MEDIAN = 1.4826  # standard deviation over median absolute deviation, of a normal distribution
_ERROR_OF_MEDIAN = 1.2533  # its standard error over that of the mean


class UnitCost:
    """Seconds per unit of one kind of work on one rank.

    The spread is taken from the differences of successive steps, over many of them. Hence a change of speed, however
    large, is one difference among many, and does not pass for noise.
    """

    def __init__(self) -> None:
        self._costs: list[float] = []
        self._last: float | None = None
        self._changes: deque[float] = deque(maxlen=_KEPT_CHANGES)

    def add(self, seconds: float, units: float) -> None:
        """One step; a step without work, or too short to be measured, says nothing."""
        if seconds <= 0 or units <= 0:
            return
        cost = seconds / units
        if self._last is not None:
            self._changes.append(abs(log(cost / self._last)))
        self._last = cost
        self._costs.append(cost)

    def take(self) -> tuple[float | None, float]:
        """Median cost of the steps since the last call, and its relative standard error; None, 0 without any."""
        costs, self._costs = self._costs, []
        if not costs:
            return None, 0.0
        spread = _SPREAD_OF_MEDIAN / sqrt(2) * median(self._changes) if self._changes else 0.0
        return median(costs), max(_ERROR_OF_MEDIAN * spread / sqrt(len(costs)), LEAST_ERROR_OF_COSTS)

    def restart(self) -> None:
        """Forget the steps since the last `take`; what is known of the spread stays."""
        self._costs, self._last = [], None


class RankUnitCosts:
    """Costs of attention and of the rest of a layer on this rank."""

    def __init__(self) -> None:
        self.attention, self.model = UnitCost(), UnitCost()

    def add(self, step: StepTimes) -> None:
        """Take one step into account."""
        self.attention.add(step.attention_s, step.attention_flops)
        self.model.add(step.model_s, step.tokens)

    def restart(self) -> None:
        """See `UnitCost.restart`."""
        self.attention.restart()
        self.model.restart()
