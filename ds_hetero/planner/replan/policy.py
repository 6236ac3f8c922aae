"""When do measured speeds call for another schedule, and for which?

    Look      what some steps under the present schedule have cost every rank
    Fit       what follows from a look: the gain of another schedule, and the best one to be found
    Policy    decides, look by look

Noise is kept from moving work by three rules. A candidate is found on one look and judged on later ones only, because
the best of many always looks better than it is on the numbers that chose it. It is taken once its mean gain exceeds
``min_gain`` by three standard errors of that mean, so small gains have to be seen for longer than large ones. And every
recent change doubles the gain that the next one must promise, so that not even a wrong model changes for ever.

`ProportionalFit` knows nothing but the look. Where the cluster is known, the planner searches instead
(`ds_hetero.planner.replan.planned`).
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import inf, log, sqrt
from statistics import fmean, median
from typing import Any, Protocol

from ds_hetero.schedule import Group, Schedule

__all__ = ["Decision", "Fit", "Look", "Policy", "ProportionalFit", "attention_shares", "mean_look"]

RECENT_LOOKS = 20  # in which a change counts against the next one
LEAST_GAIN = 0.01  # what counts as min_gain for that where the user gave less
CERTAINTY = 3.0  # standard errors
KEPT_EVIDENCE = 12  # looks at one candidate; one that has convinced nobody by then is given up
_STEPS_TO_BALANCE = 12  # of the fixed point for contiguous groups
_DIGITS = 6  # of token weights, for people who read schedules
_MOST_GROWTH = 16  # of a group's share in one of them


@dataclass(frozen=True, kw_only=True, slots=True)
class Look:
    """Means and medians over the steps since the last look, by rank in ascending order.

    Args:
        attention_flops, tokens: work of the rank in a step.
        attention_s_per_flop, model_s_per_token: its cost, of attention and of the rest of forward and backward; None
            where the rank had no such work.
        error: relative standard error of `own_s`.
        growth: by what factor the work on the rank may grow before its memory is full.
        step_s: duration of a step. length: tokens of a typical sequence.
    """

    attention_flops: tuple[float, ...]
    tokens: tuple[float, ...]
    attention_s_per_flop: tuple[float | None, ...]
    model_s_per_token: tuple[float | None, ...]
    error: tuple[float, ...]
    growth: tuple[float, ...]
    step_s: float
    length: int

    @property
    def own_s(self) -> tuple[float, ...]:
        """What every rank computes in a step."""
        return tuple(
            flops * (per_flop or 0.0) + tokens * (per_token or 0.0)
            for flops, per_flop, tokens, per_token in zip(
                self.attention_flops, self.attention_s_per_flop, self.tokens, self.model_s_per_token, strict=True
            )
        )


class Fit(Protocol):
    """What a look says of schedules; made from the present schedule and the look."""

    def gain(self, candidate: Schedule) -> float:
        """The share of a step's time that ``candidate`` is predicted to save, negative if it would lose."""

    def best(self) -> Schedule | None:
        """The best schedule that a search finds; None if it finds none that can run."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Decision:
    """A change of schedule, and the share of a step's time that it is predicted to save."""

    schedule: Schedule
    gain: float


class Policy:
    """Decides on a replica's schedule; has no clock and no randomness.

    Args:
        fit: from the present schedule and a look to a `Fit`.
        min_gain: share of a step's time that a change has to save.
    """

    def __init__(self, fit: Callable[[Schedule, Look], Fit], min_gain: float) -> None:
        self._fit, self._min_gain = fit, min_gain
        self._looks = 0
        self._changes: list[int] = []  # the looks that led to one
        self._candidate: Schedule | None = None
        self._seen: deque[Look] = deque(maxlen=KEPT_EVIDENCE + 1)  # the look that found the candidate, and those since
        self._gains: list[float] = []
        self._fruitless: Look | None = None  # a search found nothing worth having on this one

    def decide(self, schedule: Schedule, look: Look) -> Decision | None:
        """Take a look at the present schedule; None to keep it."""
        self._looks += 1
        fit = self._fit(schedule, look)
        error = sqrt(2) * max(look.error)  # of a gain: that of the rank which decides now, and of the one which would
        if self._candidate is None:
            self._search(fit, look)
            return None
        self._seen.append(look)
        self._gains.append(fit.gain(self._candidate))
        gain, margin = fmean(self._gains), CERTAINTY * error / sqrt(len(self._gains))
        if gain - margin > self.required_gain:
            return self._change(schedule)
        if gain + margin < self.required_gain or len(self._gains) == KEPT_EVIDENCE:
            self._give_up(look)
        return None

    @property
    def required_gain(self) -> float:
        """What a change has to save now."""
        recent = sum(self._looks - look < RECENT_LOOKS for look in self._changes)
        return max(self._min_gain, LEAST_GAIN) * 2**recent if recent else self._min_gain

    def _search(self, fit: Fit, look: Look) -> None:
        if self._fruitless is not None and not _moved(self._fruitless, look, max(self._min_gain / 2, LEAST_GAIN)):
            return
        candidate = fit.best()
        if candidate is None or fit.gain(candidate) <= self.required_gain:
            self._give_up(look)
            return
        self._candidate, self._gains = candidate, []
        self._seen.clear()
        self._seen.append(look)

    def _give_up(self, look: Look) -> None:
        self._candidate, self._fruitless = None, look

    def _change(self, schedule: Schedule) -> Decision | None:
        """To the candidate, or to what is better still when all looks that speak for it are taken together."""
        assert self._candidate is not None
        fit = self._fit(schedule, mean_look(self._seen))
        found = [candidate for candidate in (self._candidate, fit.best()) if candidate is not None]
        best = max(found, key=fit.gain)
        self._changes.append(self._looks)
        self._candidate = self._fruitless = None
        return Decision(schedule=best, gain=fit.gain(best))


def mean_look(looks: Sequence[Look]) -> Look:
    """Looks at one schedule taken together."""
    last = looks[-1]

    def mean(name: str) -> Any:
        rows = zip(*(getattr(look, name) for look in looks), strict=True)
        return tuple(None if None in row else fmean(row) for row in rows)

    names = ("attention_flops", "tokens", "attention_s_per_flop", "model_s_per_token")
    return replace(
        last,
        **{name: mean(name) for name in names},
        error=tuple(error / sqrt(len(looks)) for error in last.error),
        step_s=fmean(look.step_s for look in looks),
        length=round(median(look.length for look in looks)),
    )


def _moved(before: Look, now: Look, tolerance: float) -> bool:
    """Whether some rank's work has become dearer or cheaper in relation to that of the others."""

    def shape(name: str) -> list[float]:
        pairs = list(zip(getattr(before, name), getattr(now, name), strict=True))
        ratios = [log(b / a) for a, b in pairs if a and b]
        return [ratio - fmean(ratios) for ratio in ratios]

    tolerance += CERTAINTY * max(now.error)
    return any(abs(x) > tolerance for name in ("attention_s_per_flop", "model_s_per_token") for x in shape(name))


# --- without a cost model -----------------------------------------------------------------------------


class ProportionalFit:
    """Keeps groups, ring and layout, and shares heads and tokens by measured cost; transfers stay what they are.

    Ranks of a group wait for each other at both exchanges, and the groups of a ring for the slowest of them, so a step
    computes as long as ``max over groups (max model time + max attention time)``.

    Args:
        schedule: the present one.
        look: at it.
        causal: attention is causal; in a zigzag layout this makes no difference.
    """

    def __init__(self, schedule: Schedule, look: Look, causal: bool = True) -> None:
        self._schedule, self._look, self._causal = schedule, look, causal
        per_flop, per_token = _completed(look)
        self._attention_s = dict(zip(schedule.ranks, (x * sum(look.attention_flops) for x in per_flop), strict=True))
        self._model_s = dict(zip(schedule.ranks, (x * sum(look.tokens) for x in per_token), strict=True))
        self._present_s = max(self._group_times(schedule))

    def gain(self, candidate: Schedule) -> float:
        """The share of a step's time that ``candidate`` is predicted to save."""
        saved = self._present_s - max(self._group_times(candidate))
        return saved / max(self._look.step_s, self._present_s)

    def best(self) -> Schedule | None:
        """Heads by the cost of attention, tokens so that all groups end together; as far as memory allows."""
        if self._look.length < self._schedule.sp_size:
            return None
        heads = [self._share_heads(group) for group in self._schedule.groups]
        weights = [1.0] * len(heads)
        tried = []
        for _ in range(_STEPS_TO_BALANCE):
            tried.append(self._with_shares(heads, weights))
            times = self._group_times(tried[-1])  # in ring order
            time_of = dict(zip(self._schedule.ring, times, strict=True))
            least = fmean(times) / _MOST_GROWTH
            weights = [weight * fmean(times) / max(time_of[i], least) for i, weight in enumerate(weights)]
        found = min(tried, key=lambda schedule: max(self._group_times(schedule)))
        for part in (1.0, 0.75, 0.5, 0.25):
            between = found if part == 1 else self._between(found, part)
            if self._fits(between):
                return between
        return None

    def _group_times(self, schedule: Schedule) -> list[float]:
        """Seconds that each group computes in a step, in ring order."""
        length = self._look.length
        tokens, attention = schedule.tokens(length), attention_shares(schedule, length, self._causal)
        return [
            max(tokens[r] / length * self._model_s[r] for r in group.ranks)
            + max(attention[r] * self._attention_s[r] for r in group.ranks)
            for group in schedule.ring_groups
        ]

    def _share_heads(self, group: Group) -> tuple[int, ...]:
        """One by one to the rank that has them done first."""
        heads = dict.fromkeys(group.ranks, 0)
        queue = [(self._attention_s[rank], i, rank) for i, rank in enumerate(group.ranks)]
        heapq.heapify(queue)
        for _ in range(self._schedule.num_heads):
            _, i, rank = queue[0]
            heads[rank] += 1
            heapq.heapreplace(queue, ((heads[rank] + 1) * self._attention_s[rank], i, rank))
        return tuple(heads.values())

    def _with_shares(self, heads: Sequence[tuple[int, ...]], weights: Sequence[float]) -> Schedule:
        groups = []
        for group, group_heads, weight in zip(self._schedule.groups, heads, weights, strict=True):
            speeds = [1 / self._model_s[rank] for rank in group.ranks]
            shares = [weight / sum(weights) * speed / sum(speeds) for speed in speeds]
            tokens = tuple(round(share, _DIGITS) or share for share in shares)
            groups.append(replace(group, heads=group_heads, tokens=tokens))
        return replace(self._schedule, groups=tuple(groups))

    def _between(self, found: Schedule, part: float) -> Schedule:
        """Tokens on the way from the present schedule to ``found``, heads as there."""
        total = sum(group.weight for group in self._schedule.groups)
        groups = tuple(
            replace(
                new,
                tokens=tuple((1 - part) * a / total + part * b for a, b in zip(old.tokens, new.tokens, strict=True)),
            )
            for old, new in zip(self._schedule.groups, found.groups, strict=True)
        )
        return replace(found, groups=groups)

    def _fits(self, candidate: Schedule) -> bool:
        """Whether no rank's tokens, nor what its heads see of its group's tokens, grow beyond its memory."""
        before, after = (_sizes(schedule, self._look.length) for schedule in (self._schedule, candidate))
        growth = dict(zip(self._schedule.ranks, self._look.growth, strict=True))
        return all(
            new <= max(old * growth[rank], old)
            for rank in growth
            if growth[rank] < inf
            for old, new in zip(before[rank], after[rank], strict=True)
        )


def attention_shares(schedule: Schedule, length: int, causal: bool) -> dict[int, float]:
    """The part of all pairs of query, key and head that every rank computes."""
    pairs = [
        sum((b * (b + 1) - a * (a + 1)) if causal else 2 * length * (b - a) for a, b in chunks)
        for chunks in schedule.chunks(length)
    ]
    unit = sum(pairs) * schedule.num_heads
    return {
        rank: own * heads / unit
        for own, group in zip(pairs, schedule.ring_groups, strict=True)
        for rank, heads in zip(group.ranks, group.heads, strict=True)
    }


def _sizes(schedule: Schedule, length: int) -> dict[int, tuple[float, float]]:
    """By rank: tokens that it holds, and tokens times heads that it attends with."""
    tokens = schedule.tokens(length)
    return {
        rank: (tokens[rank], heads * sum(tokens[r] for r in group.ranks))
        for group in schedule.groups
        for rank, heads in zip(group.ranks, group.heads, strict=True)
    }


def _completed(look: Look) -> tuple[list[float], list[float]]:
    """Costs of ranks that had no work of a kind: by that of the other kind, or else the mean over the ranks."""
    flop, token = look.attention_s_per_flop, look.model_s_per_token
    both = [a / c for a, c in zip(flop, token, strict=True) if a and c]
    ratio = median(both) if both else None

    def completed(own: Sequence[float | None], other: Sequence[float | None], factor: float | None) -> list[float]:
        known = fmean([x for x in own if x] or [1.0])
        return [x or (y * factor if y and factor else known) for x, y in zip(own, other, strict=True)]

    return completed(flop, token, ratio), completed(token, flop, ratio and 1 / ratio)
