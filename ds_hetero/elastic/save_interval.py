"""Choose the number of steps between two saves, so that saves delay the steps by 2 % at most.

Steps during which a save is under way are "busy", others are "quiet". The delay by a save is the time of its busy steps
minus the time of as many quiet steps. For example, quiet steps take 1.0 s, and the three busy steps of a save take
1.1 + 1.2 + 1.0 s. The delay is 0.3 s, which is 2 % of 15 steps.

Imports no torch and reads no clock.
"""

from __future__ import annotations

import math
import statistics
from collections import deque

# All of these are chosen, never measured.
MAX_DELAY_FRACTION = 0.02  # largest delay by saves, as a fraction of the time of steps
_MAX_INTERVAL_S = 300.0  # between two saves, even if they then delay the steps by more
_NUM_QUIET_STEPS = 20  # number of latest quiet steps of which the median is taken
_NUM_SAVES = 5  # number of latest saves of whose delays the median is taken
_MEASURING_STEPS = 3  # between two saves while the delay is unknown, so that one of the steps is quiet
_STALE_AFTER = 100  # number of busy steps in a row after which the delay is unknown again


class SaveInterval:
    """Measures one rank's steps and saves, and derives the number of steps between saves."""

    def __init__(self) -> None:
        self._quiet_s: deque[float] = deque(maxlen=_NUM_QUIET_STEPS)
        self._delays_s: deque[float] = deque(maxlen=_NUM_SAVES)  # delay of the steps by each save
        self._busy_s: list[float] = []  # since the latest quiet step
        self._num_begun = 0  # saves that began in these busy steps
        self._latest_step_s = 0.0
        self.save_s = 0.0  # duration of the latest save, until its last copy was sent

    @property
    def step_s(self) -> float:
        """Median seconds of a quiet step; seconds of the latest step if there was no quiet one."""
        return statistics.median(self._quiet_s) if self._quiet_s else self._latest_step_s

    def add_step(self, seconds: float, *, begins: bool, is_busy: bool) -> None:
        """Record a step, including all waits before and after it.

        Args:
            begins: whether a save began in the step.
            is_busy: whether a save began or was under way in the step.
        """
        self._latest_step_s = seconds
        if is_busy:
            self._busy_s.append(seconds)
            self._num_begun += begins
            return
        if self._busy_s:
            self._end_save()
        self._quiet_s.append(seconds)

    def _end_save(self) -> None:
        """Record the delay per save of the busy steps that a quiet step has ended."""
        if self._quiet_s and self._num_begun:
            delay_s = sum(self._busy_s) - len(self._busy_s) * self.step_s
            self._delays_s.append(max(0.0, delay_s / self._num_begun))
        self._busy_s = []
        self._num_begun = 0

    def needed_steps(self) -> int:
        """Return the number of steps between two saves.

        It is the smallest number that fits three bounds: the steps last as long as a save; saves delay the steps by
        `MAX_DELAY_FRACTION` at most, except where this would take longer than `_MAX_INTERVAL_S`; and while the delay is
        unknown, one of the steps is quiet.
        """
        if self.step_s <= 0:
            return 1
        steps_during_save = math.ceil(self.save_s / self.step_s)
        steps_for_delay = 1
        if self._delays_s:
            delay_s = statistics.median(self._delays_s)
            steps_for_delay = math.ceil(delay_s / (MAX_DELAY_FRACTION * self.step_s))
        max_steps = math.ceil(_MAX_INTERVAL_S / self.step_s)
        is_delay_known = bool(self._delays_s) and len(self._busy_s) < _STALE_AFTER
        steps_to_measure = 1 if is_delay_known else _MEASURING_STEPS
        return max(steps_to_measure, steps_during_save, min(steps_for_delay, max_steps))
