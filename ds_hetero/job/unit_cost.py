"""Measure the cost of work on one rank, with its error: seconds per FLOP of attention, and per token of the rest."""

from __future__ import annotations

from collections import deque
from math import log, sqrt
from statistics import median

from ds_hetero.runtime.step_clock import StepTimes

MIN_COST_ERROR = 0.003  # relative; few steps may agree more closely by chance; chosen, never measured
_MAX_CHANGES = 64  # differences of successive steps; chosen, never measured
_STD_PER_MAD = 1.4826  # of a normal distribution: standard deviation over median absolute deviation
# Of a normal distribution: standard error of the median over that of the mean, sqrt(pi / 2).
_MEDIAN_ERROR_FACTOR = 1.2533


class UnitCost:
    """Seconds per unit of one kind of work on one rank.

    The noise of a step is estimated by the median difference between successive steps. So a single change of speed,
    however large, is one difference among many, and does not count as noise.
    """

    def __init__(self) -> None:
        self._costs: list[float] = []
        self._last: float | None = None
        self._changes: deque[float] = deque(maxlen=_MAX_CHANGES)

    def add(self, seconds: float, units: float) -> None:
        """Add one step that took ``seconds`` for ``units`` of work; a step without work or time is ignored."""
        if seconds <= 0 or units <= 0:
            return
        cost = seconds / units
        if self._last is not None:
            self._changes.append(abs(log(cost / self._last)))
        self._last = cost
        self._costs.append(cost)

    def take(self) -> tuple[float | None, float]:
        """Return the median cost of the steps since the last call, and its relative standard error.

        (None, 0) if there were no steps since then.
        """
        costs, self._costs = self._costs, []
        if not costs:
            return None, 0.0
        # A difference of two steps has the noise of both, sqrt(2) times that of one.
        spread = _STD_PER_MAD / sqrt(2) * median(self._changes) if self._changes else 0.0
        return median(costs), max(_MEDIAN_ERROR_FACTOR * spread / sqrt(len(costs)), MIN_COST_ERROR)

    def restart(self) -> None:
        """Discard the steps since the last `take`; the differences stay, because the noise is the same."""
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
        """Discard the steps since the last observation, of both costs; see `UnitCost.restart`."""
        self.attention.restart()
        self.model.restart()
