"""Decide after how many optimizer steps a piece of a batch is compared again, whole and sharded.

A model may begin to compute something else at any step: a gate opens, the script replaces a module. The user sets the
number of steps, or it follows from the time of comparisons, which may be 1 % of the time of steps. Each rank measures
both times. The ratios are exchanged with the numbers of the step's checks, and all ranks use the largest one.
`EarlyComparisons` decides on comparisons before that number of steps.
"""

from __future__ import annotations

import contextlib
import statistics
import time
from collections import deque
from collections.abc import Iterator, Sequence

from ds_hetero.common.reading import MAX_STEPS
from ds_hetero.runtime.step_checks.early_comparisons import EarlyComparisons
from ds_hetero.runtime.step_checks.protocol import Verdict

SHARE = 0.01  # of the steps' time that comparisons may take; chosen: the goal for what all checks cost
_MIN_TIMED_STEPS = 5  # until their median is used: the first step is slower; chosen, never measured
_TIMED_STEPS = 64  # latest steps whose median is taken; chosen, never measured


def comparison_interval(time_in_steps: float) -> int:
    """Return the smallest number of steps such that a comparison takes less than `SHARE` of their time.

    Example: a comparison that takes as long as 0.3 steps is made every 31 steps.

    Args:
        time_in_steps: time of a comparison over the time of a step.
    """
    return min(int(time_in_steps / SHARE) + 1, MAX_STEPS)


class ComparisonPace:
    """Counts the optimizer steps since the latest comparison and decides when the next one is due; a `StepCheck`.

    Its decisions are the same on every rank.

    Args:
        every: ``"checks.compare_every"`` of the section.
    """

    width = 2

    def __init__(self, every: int | str) -> None:
        self.every = every
        self._steps = 0  # since the latest comparison
        self._interval_by_cost: int | None = None  # steps between comparisons; None until all ranks have timed steps
        self._comparison_s: float | None = None  # time of the latest comparison
        self._step_times: deque[float] = deque(maxlen=_TIMED_STEPS)  # in seconds, without comparisons
        self._step_began_s: float | None = None  # when the present step began, later by the time of its comparisons
        self._early = EarlyComparisons()

    @property
    def is_due(self) -> bool:
        """Whether a piece of the next batch has to be compared, even if the batch is not of a new kind."""
        if self._is_early:
            return True
        interval = self._interval_by_cost if self.every == "by_cost" else self.every
        return isinstance(interval, int) and self._steps >= interval

    @property
    def _is_early(self) -> bool:
        """Whether a comparison is due early because gradients were zero; never if the user set the number of steps."""
        return self.every == "by_cost" and self._early.is_due(self._steps)

    @property
    def is_comparing_early(self) -> bool:
        """Whether the present comparison came early because gradients were zero."""
        return self._early.runs

    def note_zeros(self) -> None:
        """Note that the present comparison has a gradient that is exactly zero on one process."""
        self._early.has_zeros = True

    @contextlib.contextmanager
    def comparing(self, *, shows_new: bool = False) -> Iterator[None]:
        """Time the comparison that runs inside, and leave its time out of the step's.

        Args:
            shows_new: the comparison is made because its batch is of a new kind, so it does not count as an early one.
        """
        self._early.begin(is_due=self._is_early, shows_new=shows_new, num_steps=self._steps)
        began_s = time.perf_counter()
        yield
        self._comparison_s = time.perf_counter() - began_s
        if self._step_began_s is not None:
            self._step_began_s += self._comparison_s
        self._steps = 0

    def restart(self) -> None:
        """Forget all times and counts, as if the job had just begun."""
        self._steps = 0
        self._interval_by_cost = None
        self._step_began_s = None
        self._step_times.clear()
        self._early.learn(has_zeros_on_any=False)

    def numbers(self) -> Sequence[float]:
        """Return the latest comparison's time over a step's, 0 if unknown, and whether a gradient was zero."""
        now = time.perf_counter()
        if self._step_began_s is not None:
            self._step_times.append(now - self._step_began_s)
        self._step_began_s = now
        self._steps += 1
        has_zeros = float(self._early.has_zeros)
        if self._comparison_s is None or len(self._step_times) < _MIN_TIMED_STEPS:
            return [0.0, has_zeros]
        step_s = max(statistics.median(self._step_times), 1e-9)  # a clock may not have moved
        return [self._comparison_s / step_s, has_zeros]

    def verdict(self, rows: Sequence[Sequence[float]]) -> Verdict:
        """Use the largest ratio of all ranks, and note whether any rank saw zero gradients; always return None."""
        ratios = [ratio for ratio, _ in rows]
        self._early.learn(has_zeros_on_any=any(has_zeros for _, has_zeros in rows))
        # A rank that has not timed enough steps has the ratio 0: all ranks begin to use the interval together.
        self._interval_by_cost = comparison_interval(max(ratios)) if all(ratios) else None
        return None
