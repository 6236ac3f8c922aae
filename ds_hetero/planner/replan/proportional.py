"""Another schedule without a cost model: the same groups, with heads and tokens shared by measured cost."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import replace
from math import inf
from statistics import fmean, median

from ds_hetero.planner.replan.policy import Observation
from ds_hetero.values.schedule import Group, Schedule

_STEPS_TO_BALANCE = 12  # of the fixed point for contiguous groups; chosen, never measured
_DIGITS = 6  # of token weights, for people who read schedules
_MOST_GROWTH = 16  # of a group's share in one of these steps, so that they do not oscillate; chosen, never measured


class ProportionalEstimate:
    """Keeps groups, ring and layout, and shares heads and tokens by measured cost; transfers stay what they are.

    Ranks of a group wait for each other at both exchanges, and the groups of a ring for the slowest of them, so a step
    computes as long as ``max over groups (max model time + max attention time)``.

    Args:
        causal: attention is causal; in a zigzag layout this makes no difference.
    """

    def __init__(self, schedule: Schedule, observation: Observation, causal: bool = True) -> None:
        self._schedule, self._observation, self._causal = schedule, observation, causal
        per_flop, per_token = _completed(observation)
        flops, tokens = sum(observation.attention_flops), sum(observation.tokens)
        self._attention_s = dict(zip(schedule.ranks, (x * flops for x in per_flop), strict=True))
        self._model_s = dict(zip(schedule.ranks, (x * tokens for x in per_token), strict=True))
        self._present_s = max(self._group_times(schedule))

    def gain(self, candidate: Schedule) -> float:
        """The share of a step's time that ``candidate`` is predicted to save."""
        saved = self._present_s - max(self._group_times(candidate))
        return saved / max(self._observation.step_s, self._present_s)

    def best(self) -> Schedule | None:
        """Heads by the cost of attention, tokens so that all groups end together; as far as memory allows."""
        if self._observation.length < self._schedule.sp_size:
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
        best = min(tried, key=lambda schedule: max(self._group_times(schedule)))
        for part in (1.0, 0.75, 0.5, 0.25):
            between = best if part == 1 else self._between(best, part)
            if self._fits(between):
                return between
        return None

    def _group_times(self, schedule: Schedule) -> list[float]:
        """Seconds that each group computes in a step, in ring order."""
        length = self._observation.length
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

    def _between(self, target: Schedule, part: float) -> Schedule:
        """Tokens on the way from the present schedule to ``target``, heads as in the target."""
        total = sum(group.weight for group in self._schedule.groups)
        groups = tuple(
            replace(
                new,
                tokens=tuple((1 - part) * a / total + part * b for a, b in zip(old.tokens, new.tokens, strict=True)),
            )
            for old, new in zip(self._schedule.groups, target.groups, strict=True)
        )
        return replace(target, groups=groups)

    def _fits(self, candidate: Schedule) -> bool:
        """Whether no rank's tokens, nor what its heads see of its group's tokens, grow beyond its memory."""
        before, after = (_sizes(schedule, self._observation.length) for schedule in (self._schedule, candidate))
        growth = dict(zip(self._schedule.ranks, self._observation.growth, strict=True))
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


def _completed(observation: Observation) -> tuple[list[float], list[float]]:
    """Costs of ranks that had no work of a kind: by that of the other kind, or else the mean over the ranks."""
    flop, token = observation.attention_s_per_flop, observation.model_s_per_token
    both = [a / c for a, c in zip(flop, token, strict=True) if a and c]
    ratio = median(both) if both else None

    def completed(own: Sequence[float | None], other: Sequence[float | None], factor: float | None) -> list[float]:
        known = fmean([x for x in own if x] or [1.0])
        return [x or (y * factor if y and factor else known) for x, y in zip(own, other, strict=True)]

    return completed(flop, token, ratio), completed(token, flop, ratio and 1 / ratio)
