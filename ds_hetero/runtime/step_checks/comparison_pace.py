"""When a piece of a batch is compared again, whole and sharded: every so many optimizer steps.

A gate that opens, a module that the script replaces: a model may begin to compute something else at any step. The
number of steps is given, or follows from what comparisons cost: they may take 1 % of the time of steps. Each rank
measures both; the ratios are exchanged with the numbers of the step's checks, and the largest one counts on all ranks.
"""

from __future__ import annotations

import contextlib
import statistics
import time
from collections import deque
from collections.abc import Iterator, Sequence

from ds_hetero.common.reading import MAX_STEPS
from ds_hetero.runtime.step_checks.protocol import Verdict

SHARE = 0.01  # of the steps' time that comparisons may take
_FEWEST_TIMED_STEPS = 5  # before their median counts: the first one is slower
_TIMED_STEPS = 64  # the latest ones


def comparison_interval(steps_of_time: float) -> int:
    """Return the fewest steps that a comparison takes less than `SHARE` of; it takes the time of ``steps_of_time``."""
    return min(int(steps_of_time / SHARE) + 1, MAX_STEPS)


class ComparisonPace:
    """Optimizer steps since the latest comparison, and after how many the next one is due; a `StepCheck`.

    What it decides is the same on every rank.

    Args:
        every: ``"checks.compare_every"`` of the section.
    """

    width = 1

    def __init__(self, every: int | str) -> None:
        self.every = every
        self._steps = 0  # since the latest comparison
        self._agreed: int | None = None  # steps between two comparisons by cost; None until the first exchange
        self._comparison_s: float | None = None
        self._step_times: deque[float] = deque(maxlen=_TIMED_STEPS)  # in seconds, without comparisons
        self._step_began: float | None = None

    @property
    def is_due(self) -> bool:
        """Whether a piece is to be compared before the next step, whatever its batch has."""
        interval = self._agreed if self.every == "by_cost" else self.every
        return isinstance(interval, int) and self._steps >= interval

    @contextlib.contextmanager
    def comparing(self) -> Iterator[None]:
        """A comparison runs inside, whose time is not the step's."""
        began = time.perf_counter()
        yield
        self._comparison_s = time.perf_counter() - began
        if self._step_began is not None:
            self._step_began += self._comparison_s
        self._steps = 0

    def restart(self) -> None:
        """Go on as on a rank that has just begun."""
        self._steps, self._agreed, self._step_began = 0, None, None
        self._step_times.clear()

    def numbers(self) -> Sequence[float]:
        """How many steps would take as long as the latest comparison; 0 as long as that is not known."""
        now = time.perf_counter()
        if self._step_began is not None:
            self._step_times.append(now - self._step_began)
        self._step_began = now
        self._steps += 1
        if self._comparison_s is None or len(self._step_times) < _FEWEST_TIMED_STEPS:
            return [0.0]
        return [self._comparison_s / max(statistics.median(self._step_times), 1e-9)]

    def verdict(self, rows: Sequence[Sequence[float]]) -> Verdict:
        """See `StepCheck`; takes over what all ranks know."""
        ratios = [ratio for (ratio,) in rows]
        self._agreed = comparison_interval(max(ratios)) if all(ratios) else None
        return None
