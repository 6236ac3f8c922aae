"""Prediction beside measurement: how long the cost model says that steps take, and how long they take.

Rank 0 alone has forecasts. Its `PredictionCheck` looks at a clock when an optimizer step is done, and compares at the
end: when the engine is destroyed, when the handle is undone, or when the process exits, whichever comes first. Ranks
wait for each other in every step, so one rank's clock will do, and no device is synchronized for it: the host runs
ahead of its device by no more than it may queue, which is the same in every step.
"""

from __future__ import annotations

import atexit
import functools
import logging
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

import torch

from ds_hetero.common.announce import announce
from ds_hetero.common.text import time_text
from ds_hetero.decision.decide import Forecast
from ds_hetero.errors import HeteroError
from ds_hetero.job.monitor import WARM_UP
from ds_hetero.runtime.attention.batch_layout import BatchLayout
from ds_hetero.values.schedule import Schedule

logger = logging.getLogger(__name__)
COMPARED_STEPS = 100  # the latest ones are compared
MicroBatches = tuple[tuple[Schedule, int, int], ...]
"""Of a step, as (schedule, tokens of a sequence, sequences)."""


@dataclass(frozen=True, slots=True)
class Comparison:
    """Prediction and measurement of the same steps, each predicted for its own batches: medians."""

    steps: int  # that were compared
    predicted_s: float
    measured_s: float


class PredictionCheck:
    """The forecasts for one model, and the steps that its engine makes.

    Args:
        forecasts: one per replica, this rank's first; none where nothing is known of the devices.
    """

    def __init__(self, forecasts: Sequence[Forecast]) -> None:
        self.forecasts = tuple(forecasts)
        self._batches: list[tuple[Schedule, int, int]] = []
        self._steps: deque[tuple[float, MicroBatches]] = deque(maxlen=COMPARED_STEPS)  # with their seconds
        self._num_steps = 0
        self._last_s: float | None = None

    def start(self) -> None:
        """Report at the latest when the process exits."""
        if self.forecasts:
            atexit.register(self.report)

    def record_batch(self, batch: BatchLayout) -> None:
        """Take note that a sharded forward begins."""
        if self.forecasts and torch.is_grad_enabled():
            self._batches.append((batch.placement.schedule, batch.placement.length, batch.batch_size))

    def record_step(self, now_s: float) -> None:
        """Take note that an optimizer step of the recorded batches is done, by a clock that only goes forward."""
        if self._last_s is not None and self._batches:
            self._num_steps += 1
            if self._num_steps == WARM_UP:  # the first one took no part, as nothing came before it
                self._steps.clear()
            self._steps.append((now_s - self._last_s, tuple(self._batches)))
        self._last_s = now_s
        self._batches.clear()

    def report(self) -> None:
        """Say how prediction and measurement compare, once; silent if there was no step to compare."""
        atexit.unregister(self.report)
        comparison = self.compare()
        self._steps.clear()
        if comparison is not None:
            predicted_s, measured_s = comparison.predicted_s, comparison.measured_s
            announce(
                f"per step, median of {comparison.steps}: predicted {time_text(predicted_s)}, "
                f"measured {time_text(measured_s)} (prediction {predicted_s / measured_s - 1:+.1%})"
            )

    def compare(self) -> Comparison | None:
        """Medians over the recorded steps; None without any, or if they cannot be predicted."""
        steps = list(self._steps)
        if not steps:
            return None
        predict = functools.lru_cache(maxsize=None)(self._predict)
        try:
            predicted = [predict(batches) for _, batches in steps]
        except HeteroError as error:
            logger.debug("the steps cannot be predicted: %s", error)
            return None
        return Comparison(len(steps), median(predicted), median(seconds for seconds, _ in steps))

    def _predict(self, batches: MicroBatches) -> float:
        """Seconds of a step of these micro-batches on the slowest replica.

        Each counts as its share of a step of micro-batches like itself. Other replicas are assumed to have batches like
        this rank's.
        """
        count, own = len(batches), self.forecasts[0]
        return max(
            sum(
                forecast.iteration_s(schedule if forecast is own else forecast.schedule, length, sequences, count)
                * times
                / count
                for (schedule, length, sequences), times in Counter(batches).items()
            )
            for forecast in self.forecasts
        )
