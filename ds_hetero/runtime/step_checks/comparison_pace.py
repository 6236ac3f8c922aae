"""Optimizer steps after which a piece of a batch is compared again, whole and sharded.

A model may begin to compute something else at any step: a gate opens, the script replaces a module. The number of steps
is given, or follows from what comparisons cost: they may take 1 % of the time of steps. Each rank measures both times;
the ratios are exchanged with the numbers of the step's checks, and the largest one counts on all ranks. Comparisons
that come before that are those of `EarlyComparisons`.
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
_FEWEST_TIMED_STEPS = 5  # before their median counts: the first one is slower; chosen, never measured
_TIMED_STEPS = 64  # the latest ones; chosen, never measured


def comparison_interval(steps_of_time: float) -> int:
    """Return the fewest steps of which a comparison takes less than `SHARE`.

    Example: a comparison that takes as long as 0.3 steps comes every 31 steps.

    Args:
        steps_of_time: the comparison's time over that of a step.
    """
    return min(int(steps_of_time / SHARE) + 1, MAX_STEPS)


class ComparisonPace:
    """Optimizer steps since the latest comparison, and after how many the next one is due; a `StepCheck`.

    What it decides is the same on every rank.

    Args:
        every: ``"checks.compare_every"`` of the section.
    """

    width = 2

    def __init__(self, every: int | str) -> None:
        self.every = every
        self._steps = 0  # since the latest comparison
        self._agreed: int | None = None  # steps between two comparisons by cost; None until the first exchange
        self._comparison_s: float | None = None
        self._step_times: deque[float] = deque(maxlen=_TIMED_STEPS)  # in seconds, without comparisons
        self._step_began: float | None = None
        self._early = EarlyComparisons()

    @property
    def is_due(self) -> bool:
        """Whether a piece is to be compared before the next step, whatever its batch has."""
        if self._is_early:
            return True
        interval = self._agreed if self.every == "by_cost" else self.every
        return isinstance(interval, int) and self._steps >= interval

    @property
    def _is_early(self) -> bool:
        """Whether a piece is to be compared again since gradients were zero; a given number of steps is kept."""
        return self.every == "by_cost" and self._early.is_due(self._steps)

    @property
    def is_comparing_early(self) -> bool:
        """Whether the comparison that runs is made for gradients that were zero."""
        return self._early.runs

    def note_zeros(self) -> None:
        """Note that a gradient of the comparison that runs is exactly zero on one process."""
        self._early.has_zeros = True

    @contextlib.contextmanager
    def comparing(self, *, shows_new: bool = False) -> Iterator[None]:
        """Run a comparison inside: its time does not count as the step's.

        Args:
            shows_new: the batch is of a new kind, so the comparison is due anyway, and not an early one.
        """
        self._early.begin(is_due=self._is_early, shows_new=shows_new, num_steps=self._steps)
        began = time.perf_counter()
        yield
        self._comparison_s = time.perf_counter() - began
        if self._step_began is not None:
            self._step_began += self._comparison_s
        self._steps = 0

    def restart(self) -> None:
        """Go on as on a rank that has just begun."""
        self._steps = 0
        self._agreed = None
        self._step_began = None
        self._step_times.clear()
        self._early.learn(has_zeros_on_any=False)

    def numbers(self) -> Sequence[float]:
        """Return the latest comparison's time in steps, 0 if unknown; and whether it saw gradients of zeros."""
        now = time.perf_counter()
        if self._step_began is not None:
            self._step_times.append(now - self._step_began)
        self._step_began = now
        self._steps += 1
        has_zeros = float(self._early.has_zeros)
        if self._comparison_s is None or len(self._step_times) < _FEWEST_TIMED_STEPS:
            return [0.0, has_zeros]
        step_s = max(statistics.median(self._step_times), 1e-9)  # a clock may not have moved
        return [self._comparison_s / step_s, has_zeros]

    def verdict(self, rows: Sequence[Sequence[float]]) -> Verdict:
        """See `StepCheck`; takes over what all ranks know."""
        ratios = [ratio for ratio, _ in rows]
        self._early.learn(has_zeros_on_any=any(has_zeros for _, has_zeros in rows))
        # A ratio of 0 is that of a rank that has not timed enough steps: ranks begin to count by cost together.
        self._agreed = comparison_interval(max(ratios)) if all(ratios) else None
        return None
