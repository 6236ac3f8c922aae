"""Choose the number of steps between two saves, so that saves delay the steps by 2 % at most.

The delay by a save is the time of the steps during which it was under way ("busy") beyond that of as many "quiet"
steps. For example, quiet steps take 1.0 s, and the three busy steps of a save take 1.1 + 1.2 + 1.0 s. The save delays
by 0.3 s, which is 2 % of 15 steps.

Imports no torch and reads no clock.
"""

from __future__ import annotations

import math
import statistics
from collections import deque

# All of these are chosen, never measured.
SAVING_SHARE = 0.02  # of the time of steps: the delay by saves that is allowed
_MAX_INTERVAL_S = 300.0  # between two saves, even if they then delay the steps by more
_NUM_QUIET_STEPS = 20  # latest ones, whose median counts
_NUM_SAVES = 5  # latest ones, the median of whose delays counts
_MEASURING_STEPS = 3  # between two saves while the delay is unknown, so that a quiet step is among them
_STALE_AFTER = 100  # busy steps in a row, after which the delay counts as unknown


class Pace:
    """Times of one rank's steps, with a save under way (busy) and without (quiet)."""

    def __init__(self) -> None:
        self._quiet_s: deque[float] = deque(maxlen=_NUM_QUIET_STEPS)
        self._delays_s: deque[float] = deque(maxlen=_NUM_SAVES)  # by each save, of the steps
        self._busy_s: list[float] = []  # since the latest quiet step
        self._num_begun = 0  # saves that began in these busy steps
        self._last_s = 0.0
        self.save_s = 0.0  # duration of the latest save, until its last copy was sent

    @property
    def step_s(self) -> float:
        """Seconds of a quiet step; of the latest step if no quiet one was seen."""
        return statistics.median(self._quiet_s) if self._quiet_s else self._last_s

    def add_step(self, seconds: float, *, begins: bool, is_busy: bool) -> None:
        """Record a step, including all waits before and after it.

        Args:
            begins: whether a save began in it.
            is_busy: whether a save began or was under way in it.
        """
        self._last_s = seconds
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

        It is the smallest number that fits three bounds: the steps last as long as a save; saves delay them by
        `SAVING_SHARE` at most (but no longer interval than `_MAX_INTERVAL_S` for this); and while the delay is unknown,
        a quiet step is among them.
        """
        if self.step_s <= 0:
            return 1
        steps_of_a_save = math.ceil(self.save_s / self.step_s)
        steps_for_share = 1
        if self._delays_s:
            delay_s = statistics.median(self._delays_s)
            steps_for_share = math.ceil(delay_s / (SAVING_SHARE * self.step_s))
        most_steps = math.ceil(_MAX_INTERVAL_S / self.step_s)
        is_delay_known = bool(self._delays_s) and len(self._busy_s) < _STALE_AFTER
        steps_to_measure = 1 if is_delay_known else _MEASURING_STEPS
        return max(steps_to_measure, steps_of_a_save, min(steps_for_share, most_steps))
