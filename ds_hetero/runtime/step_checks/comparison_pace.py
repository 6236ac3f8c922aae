"""When a piece of a batch is compared again, whole and sharded: every so many optimizer steps.

A gate that opens, a module that the script replaces: a model may begin to compute something else at any step. The
number of steps is given, or follows from what comparisons cost: they may take 1 % of the time of steps. Each rank
measures both; the ratios are exchanged with the numbers of the step's checks, and the largest one counts on all ranks.

A gradient that is exactly zero shows nothing: that of a layer behind a head of zeros, of LoRA's A behind a B of zeros.
As long as there are such, the next comparisons come after 1, 2, 4 and 8 steps, whatever they cost.
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
# Comparisons that come early where gradients are zero: the first step moves a head of zeros, the second what is behind
# it, and so on; a parameter that is never used has zeros for ever. Chosen, never measured.
_MOST_EARLY = 4


def comparison_interval(steps_of_time: float) -> int:
    """Return the fewest steps that a comparison takes less than `SHARE` of; it takes the time of ``steps_of_time``."""
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
        self._has_zeros = False  # a gradient was zero in the latest comparison, on this rank
        self._has_zeros_on_any = False
        self._num_early = 0  # comparisons that came early
        self.is_comparing_early = False  # the comparison that runs is one of them

    @property
    def is_due(self) -> bool:
        """Whether a piece is to be compared before the next step, whatever its batch has."""
        if self._is_early:
            return True
        interval = self._agreed if self.every == "by_cost" else self.every
        return isinstance(interval, int) and self._steps >= interval

    @property
    def _is_early(self) -> bool:
        """Whether a piece is to be compared again since gradients were zero."""
        may_be_early = self.every == "by_cost" and self._has_zeros_on_any and self._num_early < _MOST_EARLY
        return may_be_early and self._steps >= 2**self._num_early

    def note_zeros(self) -> None:
        """A gradient of the comparison that runs is exactly zero on one process."""
        self._has_zeros = True

    @contextlib.contextmanager
    def comparing(self, *, shows_new: bool = False) -> Iterator[None]:
        """A comparison runs inside, whose time is not the step's.

        Args:
            shows_new: its batch can show what none before could, so that it is not made for the zeros alone.
        """
        self.is_comparing_early = self._is_early and not shows_new
        self._num_early += self._is_early
        if self._steps > 0:  # else another batch of the same step has been compared
            self._has_zeros = False
        began = time.perf_counter()
        yield
        self._comparison_s = time.perf_counter() - began
        if self._step_began is not None:
            self._step_began += self._comparison_s
        self._steps = 0

    def restart(self) -> None:
        """Go on as on a rank that has just begun."""
        self._steps, self._agreed, self._step_began = 0, None, None
        self._has_zeros_on_any = False
        self._step_times.clear()

    def numbers(self) -> Sequence[float]:
        """How many steps would take as long as the latest comparison, 0 if that is not known; whether it saw zeros."""
        now = time.perf_counter()
        if self._step_began is not None:
            self._step_times.append(now - self._step_began)
        self._step_began = now
        self._steps += 1
        if self._comparison_s is None or len(self._step_times) < _FEWEST_TIMED_STEPS:
            return [0.0, float(self._has_zeros)]
        return [self._comparison_s / max(statistics.median(self._step_times), 1e-9), float(self._has_zeros)]

    def verdict(self, rows: Sequence[Sequence[float]]) -> Verdict:
        """See `StepCheck`; takes over what all ranks know."""
        ratios = [ratio for ratio, _ in rows]
        self._has_zeros_on_any = any(has_zeros for _, has_zeros in rows)
        self._agreed = comparison_interval(max(ratios)) if all(ratios) else None
        return None
