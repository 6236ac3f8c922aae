"""Number of steps between two probes of samples, so large that probes take less than 1 % of the steps' time.

    pace = ProbePace("by_cost")
    pace.begin_step()                                   # once per optimizer step
    if pace.is_due([times of all ranks]):               # alike on every rank
        with pace.timing():
            ...                                         # the probe

Every rank sends the others the time of its latest probe and the median time of its steps. All compute the same number
of steps, from the longest probe and the shortest step of any rank. Example: a probe of 0.5 s and steps of 0.2 s make
0.5 / (0.01 * 0.2) = 250 steps.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from statistics import median
from typing import NamedTuple

_MAX_SHARE = 0.01  # of the time of steps that probes may take; the documented share of "by_cost"
_TIMED_STEPS_OF_PROBES = 20  # latest steps whose median is taken, so that an evaluation between two of them is ignored


class ProbeTimes(NamedTuple):
    """Times that a rank has measured, in seconds; 0 if not measured yet."""

    probe_s: float = 0.0
    step_s: float = 0.0


class ProbePace:
    """Counts and times the steps since the latest probe, and decides when the next one is due.

    Args:
        every: ``"checks.compare_every"`` of the section: a number of steps, ``"always"`` or ``"by_cost"``; with
            ``"first_batch"`` and ``"off"`` no probe is due.
        now: the clock, in seconds.
    """

    def __init__(self, every: int | str, now: Callable[[], float] = time.perf_counter) -> None:
        self._every, self._now = (1 if every == "always" else every), now
        self._steps = 0  # since the latest probe
        self._probe_s = 0.0  # time of the latest probe
        self._probes_in_step_s = 0.0  # time of the probes inside the present step
        self._step_began_s: float | None = None  # when the present step began
        self._step_times: deque[float] = deque(maxlen=_TIMED_STEPS_OF_PROBES)

    def begin_step(self) -> None:
        """Note that a step begins on this rank."""
        now = self._now()
        if self._step_began_s is not None:
            self._step_times.append(now - self._step_began_s - self._probes_in_step_s)
            self._steps += 1
        self._step_began_s, self._probes_in_step_s = now, 0.0

    @contextmanager
    def timing(self) -> Iterator[None]:
        """Time the probe that runs inside."""
        began_s = self._now()
        yield
        self._probe_s = self._now() - began_s
        self._probes_in_step_s += self._probe_s
        self._steps = 0

    @property
    def times(self) -> ProbeTimes:
        """Times of this rank, for `is_due`."""
        return ProbeTimes(self._probe_s, median(self._step_times) if self._step_times else 0.0)

    def is_due(self, times_of_ranks: Sequence[ProbeTimes]) -> bool:
        """Whether a probe is due at the step that has begun; the same on every rank for the same ``times_of_ranks``."""
        if isinstance(self._every, int):
            return self._steps >= self._every
        if self._every != "by_cost":
            return False
        step_s = min(times.step_s for times in times_of_ranks)
        probe_s = max(times.probe_s for times in times_of_ranks)
        return step_s > 0 and self._steps >= math.ceil(probe_s / (_MAX_SHARE * step_s))
