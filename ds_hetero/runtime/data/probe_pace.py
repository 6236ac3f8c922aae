"""Steps after which samples are probed again: so many that probes cost under 1 % of the steps' time.

    pace = ProbePace("by_cost")
    pace.begin_step()                                   # once per optimizer step
    if pace.is_due([times of all ranks]):               # alike on every rank
        with pace.timing():
            ...                                         # the probe

Every rank says what the latest probe and its steps took; by the dearest probe and the shortest step of them all ranks
come to one number of steps.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from statistics import median
from typing import NamedTuple

_SHARE = 0.01  # of the time of steps, for probes; as "by_cost" is documented
_RECENT = 20  # steps whose median is taken, so that an evaluation between two of them does not count


class ProbeTimes(NamedTuple):
    """Measured times of a rank, in seconds; 0 where nothing was measured yet."""

    probe_s: float = 0.0
    step_s: float = 0.0


class ProbePace:
    """Says when a probe is due.

    Args:
        every: ``"checks.compare_every"``: a number of steps, ``"always"``, or ``"by_cost"``; with ``"first_batch"`` and
            ``"off"`` none is due.
    """

    def __init__(self, every: int | str, now: Callable[[], float] = time.perf_counter) -> None:
        self._every, self._now = (1 if every == "always" else every), now
        self._steps = 0  # since the latest probe
        self._probe_s = self._probed_s = 0.0  # of the latest probe; of those inside the present step
        self._began: float | None = None
        self._recent: deque[float] = deque(maxlen=_RECENT)

    def begin_step(self) -> None:
        """Note that a step begins on this rank."""
        now = self._now()
        if self._began is not None:
            self._recent.append(now - self._began - self._probed_s)
            self._steps += 1
        self._began, self._probed_s = now, 0.0

    @contextmanager
    def timing(self) -> Iterator[None]:
        """Time a probe, which runs inside."""
        began = self._now()
        yield
        self._probe_s = self._now() - began
        self._probed_s += self._probe_s
        self._steps = 0

    @property
    def times(self) -> ProbeTimes:
        """Times of this rank, for `is_due`."""
        return ProbeTimes(self._probe_s, median(self._recent) if self._recent else 0.0)

    def is_due(self, of_ranks: Sequence[ProbeTimes]) -> bool:
        """Whether a probe is due at the step that has begun; the same on every rank for the same ``of_ranks``."""
        if isinstance(self._every, int):
            return self._steps >= self._every
        if self._every != "by_cost":
            return False
        step_s = min(one.step_s for one in of_ranks)
        return step_s > 0 and self._steps >= math.ceil(max(one.probe_s for one in of_ranks) / (_SHARE * step_s))
