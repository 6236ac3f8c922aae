"""Compare the predicted step time with the measured one at the end of a job.

Rank 0 alone has forecasts. Its `PredictionCheck` reads a clock after every optimizer step, and compares at the end:
when the engine is destroyed, when the handle is undone, or when the process exits, whichever comes first. Ranks wait
for each other in every step, so the clock of one rank is enough. No device is synchronized: the host runs ahead of its
device by a queue of bounded length, so the mean step of host and device is the same.
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
from ds_hetero.decision.forecast import Forecast
from ds_hetero.errors import HeteroError
from ds_hetero.job.monitor import WARM_UP_STEPS
from ds_hetero.runtime.attention.batch_layout import BatchLayout
from ds_hetero.values.schedule import Schedule

logger = logging.getLogger(__name__)
COMPARED_STEPS = 100  # the comparison is of so many latest steps
MicroBatches = tuple[tuple[Schedule, int, int], ...]
"""Micro-batches of a step, each as (schedule, tokens of a sequence, sequences)."""


@dataclass(frozen=True, slots=True)
class Comparison:
    """Medians of the predicted and the measured time of the same steps; each step is predicted for its batches."""

    steps: int  # number of compared steps
    predicted_s: float
    measured_s: float


class PredictionCheck:
    """Compares the forecasts for one model with the steps of its engine.

    Args:
        forecasts: one per replica, this rank's first; empty if the devices are unknown.
    """

    def __init__(self, forecasts: Sequence[Forecast]) -> None:
        self.forecasts = tuple(forecasts)
        self._batches: list[tuple[Schedule, int, int]] = []
        self._steps: deque[tuple[float, MicroBatches]] = deque(maxlen=COMPARED_STEPS)  # with their seconds
        self._num_steps = 0
        self._last_s: float | None = None

    def start(self) -> None:
        """Let `report` be called when the process exits, unless it was called before."""
        if self.forecasts:
            atexit.register(self.report)

    def record_batch(self, batch: BatchLayout) -> None:
        """Record the micro-batch of a sharded forward that begins, unless it is a forward without gradients."""
        if self.forecasts and torch.is_grad_enabled():
            self._batches.append((batch.placement.schedule, batch.placement.length, batch.batch_size))

    def record_step(self, now_s: float) -> None:
        """Record that an optimizer step of the recorded micro-batches has ended.

        Args:
            now_s: time of a monotonic clock.
        """
        if self._last_s is not None and self._batches:  # the very first step has no begin, and is not counted
            self._num_steps += 1
            if self._num_steps == WARM_UP_STEPS:
                self._steps.clear()
            self._steps.append((now_s - self._last_s, tuple(self._batches)))
        self._last_s = now_s
        self._batches.clear()

    def report(self) -> None:
        """Announce predicted and measured time once; nothing if there was no step to compare."""
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
        """Return the medians over the recorded steps; None without steps, or if they cannot be predicted."""
        steps = list(self._steps)
        if not steps:
            return None
        predict = functools.lru_cache(maxsize=None)(self._predict)  # most steps have the same batches
        try:
            predicted_s = [predict(batches) for _, batches in steps]
        except HeteroError as error:
            logger.debug("the steps cannot be predicted: %s", error)
            return None
        return Comparison(len(steps), median(predicted_s), median(seconds for seconds, _ in steps))

    def _predict(self, batches: MicroBatches) -> float:
        """Predict the seconds of a step of these micro-batches on the slowest replica.

        A micro-batch costs its share of a step of micro-batches like itself: of a step with two of 4,096 tokens and
        two of 1,024, half of a step with four of 4,096 and half of a step with four of 1,024. Other replicas are
        assumed to have batches like this rank's.
        """
        num_batches = len(batches)
        replica_of_rank = self.forecasts[0]
        step_s = []  # by replica
        for forecast in self.forecasts:
            seconds = 0.0
            for (batch_schedule, length, sequences), times in Counter(batches).items():
                schedule = batch_schedule if forecast is replica_of_rank else forecast.schedule
                seconds += forecast.iteration_s(schedule, length, sequences, num_batches) * times / num_batches
            step_s.append(seconds)
        return max(step_s)
