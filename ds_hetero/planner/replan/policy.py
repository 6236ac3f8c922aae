"""When do measured speeds call for another schedule, and for which?

    Observation     what some steps under the present schedule cost every rank
    GainEstimate    how much another schedule would save by one observation, and the best schedule by it
    Policy          decides, observation by observation

Three rules keep noise from moving work:

1. A candidate is found on one observation and judged on later ones only, because the best of many always looks better
   than it is on the numbers that chose it.
2. It is taken once its mean gain exceeds ``min_gain`` by three standard errors of that mean. Small gains therefore
   need more observations than large ones.
3. Every recent change doubles the gain that the next one must promise, so even a wrong model stops changing.
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
    """Means and medians over the steps since the last observation; tuples are by rank in ascending order."""

    attention_flops: tuple[float, ...]  # attention work of the rank in a step
    tokens: tuple[float, ...]  # tokens of the rank in a step
    attention_s_per_flop: tuple[float | None, ...]  # measured cost of attention; None where the rank had none
    model_s_per_token: tuple[float | None, ...]  # of the rest of both passes; None for a rank without tokens
    error: tuple[float, ...]  # relative standard error of `own_s`
    growth: tuple[float, ...]  # factor by which the work of the rank may grow before its memory is full
    step_s: float  # duration of a step
    length: int  # tokens of a typical sequence

    @property
    def own_s(self) -> tuple[float, ...]:
        """Seconds that every rank computes in a step."""
        attention = zip(self.attention_flops, self.attention_s_per_flop, strict=True)
        attention_s = (flops * (s_per_flop or 0.0) for flops, s_per_flop in attention)
        model = zip(self.tokens, self.model_s_per_token, strict=True)
        model_s = (tokens * (s_per_token or 0.0) for tokens, s_per_token in model)
        return tuple(map(add, attention_s, model_s))


def mean_observation(observations: Sequence[Observation]) -> Observation:
    """The mean of several observations of one schedule."""
    last = observations[-1]

    def mean_by_rank(name: str) -> Any:
        """The mean of a field for every rank; None where an observation has none."""
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
RECENT_OBSERVATIONS = 20  # in which a change counts against the next one
SMALLEST_MIN_GAIN = 0.01  # what counts as min_gain for that where the user gave less
CERTAINTY = 3.0  # standard errors
KEPT_EVIDENCE = 12  # observations of one candidate; after that many without certainty it is given up


class GainEstimate(Protocol):
    """How other schedules compare with the present one by one observation."""

    def gain(self, candidate: Schedule) -> float:
        """The share of a step's time that ``candidate`` is predicted to save, negative if it would lose."""

    def best(self) -> Schedule | None:
        """The best schedule that a search finds; None if no other one can run."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ProposedChange:
    """A change of schedule."""

    schedule: Schedule  # the new one
    gain: float  # the share of a step's time that it is predicted to save


class Policy:
    """Decides on a replica's schedule; reads no clock and draws no random numbers.

    Args:
        min_gain: share of a step's time that a change has to save.
    """

    def __init__(self, estimate: Callable[[Schedule, Observation], GainEstimate], min_gain: float) -> None:
        self._estimate, self._min_gain = estimate, min_gain
        self._num_observations = 0
        self._changes: list[int] = []  # numbers of the observations that led to one
        self._candidate: Schedule | None = None
        # The observation that proposed the candidate, and those since.
        self._evidence: deque[Observation] = deque(maxlen=KEPT_EVIDENCE + 1)
        self._gains: list[float] = []
        self._fruitless: Observation | None = None  # the last search, on this one, found nothing worth having

    def decide(self, schedule: Schedule, observation: Observation) -> ProposedChange | None:
        """Take an observation of the present schedule into account; None to keep the schedule."""
        self._num_observations += 1
        estimate = self._estimate(schedule, observation)
        if self._candidate is None:
            self._search(estimate, observation)
            return None
        self._evidence.append(observation)
        self._gains.append(estimate.gain(self._candidate))
        gain_error = sqrt(2) * max(observation.error)  # of two times: the slowest rank's under each schedule
        gain = fmean(self._gains)
        margin = CERTAINTY * gain_error / sqrt(len(self._gains))
        if gain - margin > self.required_gain:
            return self._change(schedule)
        if gain + margin < self.required_gain or len(self._gains) == KEPT_EVIDENCE:
            self._give_up(observation)
        return None

    @property
    def required_gain(self) -> float:
        """Share of a step's time that a change has to save now; recent changes raise it."""
        recent = sum(self._num_observations - number < RECENT_OBSERVATIONS for number in self._changes)
        if not recent:
            return self._min_gain
        return max(self._min_gain, SMALLEST_MIN_GAIN) * 2.0**recent

    def _search(self, estimate: GainEstimate, observation: Observation) -> None:
        tolerance = max(self._min_gain / 2, SMALLEST_MIN_GAIN)
        if self._fruitless is not None and not _moved(self._fruitless, observation, tolerance):
            return
        candidate = estimate.best()
        if candidate is None or estimate.gain(candidate) <= self.required_gain:
            self._give_up(observation)
            return
        self._candidate, self._gains = candidate, []
        self._evidence.clear()
        self._evidence.append(observation)

    def _give_up(self, observation: Observation) -> None:
        self._candidate, self._fruitless = None, observation

    def _change(self, schedule: Schedule) -> ProposedChange | None:
        """Change to the candidate, or to a schedule that is better still by all of its observations together."""
        assert self._candidate is not None
        estimate = self._estimate(schedule, mean_observation(self._evidence))
        options = [candidate for candidate in (self._candidate, estimate.best()) if candidate is not None]
        best = max(options, key=estimate.gain)
        self._changes.append(self._num_observations)
        self._candidate = self._fruitless = None
        return ProposedChange(schedule=best, gain=estimate.gain(best))


def _moved(before: Observation, now: Observation, tolerance: float) -> bool:
    """Whether the cost of some rank's work has changed in relation to that of the other ranks."""

    def deviations(name: str) -> list[float]:
        """How much more every rank's cost has grown than the mean, as differences of logarithms."""
        pairs = zip(getattr(before, name), getattr(now, name), strict=True)
        ratios = [log(cost_now / cost_before) for cost_before, cost_now in pairs if cost_before and cost_now]
        return [ratio - fmean(ratios) for ratio in ratios]

    tolerance += CERTAINTY * max(now.error)
    all_deviations = deviations("attention_s_per_flop") + deviations("model_s_per_token")
    return any(abs(deviation) > tolerance for deviation in all_deviations)
