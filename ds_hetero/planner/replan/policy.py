"""Decide when a replica changes its schedule because of measured speeds, and to which schedule.

    Observation     costs of every rank in some steps under the present schedule
    GainEstimate    from one observation: the gain of another schedule, and the best schedule
    Policy          decides after every observation

Three rules prevent changes because of noise:

1. A candidate is found on one observation and judged on later ones only. On the numbers by which it was chosen, the
   best of many always looks better than it is.
2. It is taken once its mean gain exceeds ``min_gain`` by three standard errors of this mean. So small gains need more
   observations than large ones.
3. Every recent change doubles the gain that the next change must have, so even a wrong cost model stops changing.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import log, sqrt
from operator import add
from statistics import fmean, median
from typing import Any, Protocol

from ds_hetero.values.schedule import Schedule


@dataclass(frozen=True, kw_only=True, slots=True)
class Observation:
    """Costs of the steps since the last observation; tuples are by ascending rank."""

    attention_flops: tuple[float, ...]  # attention FLOPs of a rank in a step
    tokens: tuple[float, ...]  # tokens of a rank in a step
    attention_s_per_flop: tuple[float | None, ...]  # measured cost of attention; None for a rank without attention
    model_s_per_token: tuple[float | None, ...]  # measured cost outside attention; None for a rank without tokens
    error: tuple[float, ...]  # relative standard error of `compute_s`
    growth: tuple[float, ...]  # factor by which the work of a rank may grow until its memory is full
    step_s: float  # duration of a step
    length: int  # tokens of a typical sequence

    @property
    def compute_s(self) -> tuple[float, ...]:
        """Seconds that every rank computes in a step, by rank."""
        attention = zip(self.attention_flops, self.attention_s_per_flop, strict=True)
        attention_s = (flops * (s_per_flop or 0.0) for flops, s_per_flop in attention)
        model = zip(self.tokens, self.model_s_per_token, strict=True)
        model_s = (tokens * (s_per_token or 0.0) for tokens, s_per_token in model)
        return tuple(map(add, attention_s, model_s))


def mean_observation(observations: Sequence[Observation]) -> Observation:
    """Return the mean of several observations of one schedule."""
    last = observations[-1]

    def mean_by_rank(name: str) -> Any:
        """Return the mean of a field, by rank; None if it is None in some observation."""
        by_observation = [getattr(observation, name) for observation in observations]
        by_rank = zip(*by_observation, strict=True)
        return tuple(None if None in values else fmean(values) for values in by_rank)

    return replace(
        last,
        attention_flops=mean_by_rank("attention_flops"),
        tokens=mean_by_rank("tokens"),
        attention_s_per_flop=mean_by_rank("attention_s_per_flop"),
        model_s_per_token=mean_by_rank("model_s_per_token"),
        error=tuple(error / sqrt(len(observations)) for error in last.error),
        step_s=fmean(observation.step_s for observation in observations),
        length=round(median(observation.length for observation in observations)),
    )


# Chosen, never measured alone.
RECENT_OBSERVATIONS = 20  # number of observations for which a change doubles the gain that the next change must have
SMALLEST_MIN_GAIN = 0.01  # gain that is doubled if the user's min_gain is smaller
CONFIDENCE_ERRORS = 3.0  # standard errors by which a mean gain has to differ from the required gain
KEPT_EVIDENCE = 12  # most observations of one candidate; if they do not decide, the candidate is dropped


class GainEstimate(Protocol):
    """Predicted gains of other schedules over the present one, from one observation."""

    def gain(self, candidate: Schedule) -> float:
        """Return the share of a step's time that ``candidate`` is predicted to save; negative if it is slower."""

    def best(self) -> Schedule | None:
        """Return the best schedule that a search finds; None if no other one can run."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ProposedChange:
    """A change to another schedule."""

    schedule: Schedule  # the new schedule
    gain: float  # share of a step's time that it is predicted to save


class Policy:
    """Decides on the schedule of one replica; reads no clock and draws no random numbers.

    Args:
        estimate: makes the estimate of gains from the present schedule and an observation of it.
        min_gain: share of a step's time that a change has to save.
    """

    def __init__(self, estimate: Callable[[Schedule, Observation], GainEstimate], min_gain: float) -> None:
        self._estimate, self._min_gain = estimate, min_gain
        self._num_observations = 0
        self._changes: list[int] = []  # number of the observation at every change so far
        self._candidate: Schedule | None = None
        # The observation on which the candidate was found, and all later ones.
        self._evidence: deque[Observation] = deque(maxlen=KEPT_EVIDENCE + 1)
        self._gains: list[float] = []  # gain of the candidate by each of the later observations
        self._failed_search: Observation | None = None  # observation of the last search, if it found no large gain

    def decide(self, schedule: Schedule, observation: Observation) -> ProposedChange | None:
        """Take an observation of the present schedule into account; return a change, or None to keep the schedule."""
        self._num_observations += 1
        estimate = self._estimate(schedule, observation)
        if self._candidate is None:
            self._search(estimate, observation)
            return None
        self._evidence.append(observation)
        self._gains.append(estimate.gain(self._candidate))
        gain_error = sqrt(2) * max(observation.error)  # error of a ratio of two times, each with this error
        gain = fmean(self._gains)
        margin = CONFIDENCE_ERRORS * gain_error / sqrt(len(self._gains))
        if gain - margin > self.required_gain:
            return self._change(schedule)
        if gain + margin < self.required_gain or len(self._gains) == KEPT_EVIDENCE:
            self._give_up(observation)
        return None

    @property
    def required_gain(self) -> float:
        """Share of a step's time that a change has to save now; every recent change doubles it."""
        recent = sum(self._num_observations - number < RECENT_OBSERVATIONS for number in self._changes)
        if not recent:
            return self._min_gain
        return max(self._min_gain, SMALLEST_MIN_GAIN) * 2.0**recent

    def _search(self, estimate: GainEstimate, observation: Observation) -> None:
        """Search a candidate, unless costs are still as they were at a search that failed."""
        tolerance = max(self._min_gain / 2, SMALLEST_MIN_GAIN)
        if self._failed_search is not None and not _has_changed(self._failed_search, observation, tolerance):
            return
        candidate = estimate.best()
        if candidate is None or estimate.gain(candidate) <= self.required_gain:
            self._give_up(observation)
            return
        self._candidate, self._gains = candidate, []
        self._evidence.clear()
        self._evidence.append(observation)

    def _give_up(self, observation: Observation) -> None:
        """Drop the candidate, and search again only after costs have changed."""
        self._candidate, self._failed_search = None, observation

    def _change(self, schedule: Schedule) -> ProposedChange | None:
        """Return the change to the candidate, or to a schedule that gains more by the mean of all its observations."""
        assert self._candidate is not None
        estimate = self._estimate(schedule, mean_observation(self._evidence))
        options = [candidate for candidate in (self._candidate, estimate.best()) if candidate is not None]
        best = max(options, key=estimate.gain)
        self._changes.append(self._num_observations)
        self._candidate = self._failed_search = None
        return ProposedChange(schedule=best, gain=estimate.gain(best))


def _has_changed(before: Observation, now: Observation, tolerance: float) -> bool:
    """Whether the cost of some rank's work has changed relative to the costs of the other ranks."""

    def deviations(name: str) -> list[float]:
        """Return by how much the cost of every rank has grown more than the mean, as a difference of logarithms."""
        pairs = zip(getattr(before, name), getattr(now, name), strict=True)
        ratios = [log(cost_now / cost_before) for cost_before, cost_now in pairs if cost_before and cost_now]
        return [ratio - fmean(ratios) for ratio in ratios]

    tolerance += CONFIDENCE_ERRORS * max(now.error)
    all_deviations = deviations("attention_s_per_flop") + deviations("model_s_per_token")
    return any(abs(deviation) > tolerance for deviation in all_deviations)
