"""How often to save: as often as it costs next to nothing, by the steps that were measured. No torch, no clock."""

from __future__ import annotations

import math
import statistics
from collections import deque

SAVING_SHARE = 0.02  # of the time of steps, that saves may cost
_MOST_S = 300.0  # between two saves, whatever they cost
_QUIET_STEPS, _SAVES = 20, 5  # latest, whose medians count
_LOOK_STEPS = 3  # between two saves, so that there is a step without one under way to compare with
_LOOK_AGAIN = 100  # steps in a row with saves under way


class Pace:
    """Steps with and without a save under way, of one rank."""

    def __init__(self) -> None:
        self._quiet_s: deque[float] = deque(maxlen=_QUIET_STEPS)
        self._extra_s: deque[float] = deque(maxlen=_SAVES)  # by save, seconds by which it has delayed steps
        self._busy_s: list[float] = []  # steps in a row in which saves were begun or under way
        self._num_begun = 0  # saves in them
        self._last_s = 0.0
        self.save_s = 0.0  # of the latest save, from its beginning to its last copy

    @property
    def step_s(self) -> float:
        """Seconds of a step; without saves, where there was one without."""
        return statistics.median(self._quiet_s) if self._quiet_s else self._last_s

    def add_step(self, seconds: float, *, begins: bool, is_busy: bool) -> None:
        """Note a step, with all waiting before and after it.

        Args:
            begins: whether a save was begun in it.
            is_busy: whether one was begun or under way.
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
        if self._quiet_s and self._num_begun:
            extra_s = sum(self._busy_s) - len(self._busy_s) * self.step_s
            self._extra_s.append(max(0.0, extra_s / self._num_begun))
        self._busy_s, self._num_begun = [], 0

    def needed_steps(self) -> int:
        """Steps between two saves: as many as last as long as one, and as make its delays `SAVING_SHARE` of all time.

        Where it is not known what a save delays, or not any more, as many as show it.
        """
        if self.step_s <= 0:
            return 1
        least = 1 if self._extra_s and len(self._busy_s) < _LOOK_AGAIN else _LOOK_STEPS
        by_length = math.ceil(self.save_s / self.step_s)
        by_delay = math.ceil(statistics.median(self._extra_s) / (SAVING_SHARE * self.step_s)) if self._extra_s else 1
        return max(least, by_length, min(by_delay, math.ceil(_MOST_S / self.step_s)))
