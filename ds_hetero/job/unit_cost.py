"""Cost of a unit of work on one rank, with its standard error: seconds per FLOP of attention, per token of the rest."""

from __future__ import annotations

from collections import deque
from math import log, sqrt
from statistics import median

from ds_hetero.runtime.step_clock import StepTimes

LEAST_ERROR_OF_COSTS = 0.003  # relative, as few steps can agree by chance; chosen, never measured
_KEPT_CHANGES = 64  # differences of successive steps; chosen, never measured
_STD_PER_MAD = 1.4826  # of a normal distribution: standard deviation over median absolute deviation
_ERROR_OF_MEDIAN = 1.2533  # of a normal distribution: standard error of the median over that of the mean, sqrt(pi / 2)


class UnitCost:
    """Seconds per unit of one kind of work on one rank.

    The spread is that of differences between successive steps. So a change of speed, however large, is one difference
    among many, and is not taken for noise.
    """

    def __init__(self) -> None:
        self._costs: list[float] = []
        self._last: float | None = None
        self._changes: deque[float] = deque(maxlen=_KEPT_CHANGES)

    def add(self, seconds: float, units: float) -> None:
        """Add one step; ignore a step without work, or too short to be measured."""
        if seconds <= 0 or units <= 0:
            return
        cost = seconds / units
        if self._last is not None:
            self._changes.append(abs(log(cost / self._last)))
        self._last = cost
        self._costs.append(cost)

    def take(self) -> tuple[float | None, float]:
        """Return the median cost of the steps since the last call, and its relative standard error.

        Without steps since then: None and 0.
        """
        costs, self._costs = self._costs, []
        if not costs:
            return None, 0.0
        # A difference of two steps has the noise of both, sqrt(2) times that of one.
        spread = _STD_PER_MAD / sqrt(2) * median(self._changes) if self._changes else 0.0
        return median(costs), max(_ERROR_OF_MEDIAN * spread / sqrt(len(costs)), LEAST_ERROR_OF_COSTS)

    def restart(self) -> None:
        """Forget the steps since the last `take`; the differences stay, as the noise is the same."""
        self._costs, self._last = [], None


class RankUnitCosts:
    """Unit costs of attention, and of the rest of a layer, on this rank."""

    def __init__(self) -> None:
        self.attention, self.model = UnitCost(), UnitCost()

    def add(self, step: StepTimes) -> None:
        """Add one step."""
        self.attention.add(step.attention_s, step.attention_flops)
        self.model.add(step.model_s, step.tokens)

    def restart(self) -> None:
        """See `UnitCost.restart`."""
        self.attention.restart()
        self.model.restart()
