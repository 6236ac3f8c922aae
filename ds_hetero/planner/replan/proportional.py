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
        # A group that takes twice the mean gets half its share, and so on, until all take the mean. Of contiguous
        # groups a later one attends to more keys, so its time also changes with the shares of those before it.
        for _ in range(_STEPS_TO_BALANCE):
            schedule = self._with_shares(heads, weights)
            tried.append(schedule)
            times = self._group_times(schedule)  # in ring order
            time_of_group = dict(zip(self._schedule.ring, times, strict=True))
            mean_s = fmean(times)
            least_s = mean_s / _MOST_GROWTH
            weights = [weight * mean_s / max(time_of_group[i], least_s) for i, weight in enumerate(weights)]
        best = min(tried, key=lambda schedule: max(self._group_times(schedule)))
        # Where memory does not allow all of the way there, a part of it.
        for part in (1.0, 0.75, 0.5, 0.25):
            between = best if part == 1 else self._between(best, part)
            if self._fits(between):
                return between
        return None

    def _group_times(self, schedule: Schedule) -> list[float]:
        """Seconds that each group computes in a step, in ring order."""
        length = self._observation.length
        tokens = schedule.tokens(length)
        attention = attention_shares(schedule, length, self._causal)
        times = []
        for group in schedule.ring_groups:
            model_s = max(tokens[rank] / length * self._model_s[rank] for rank in group.ranks)
            attention_s = max(attention[rank] * self._attention_s[rank] for rank in group.ranks)
            times.append(model_s + attention_s)
        return times

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
        present_total = sum(group.weight for group in self._schedule.groups)

        def mixed(present: Group, targeted: Group) -> Group:
            pairs = zip(present.tokens, targeted.tokens, strict=True)
            return replace(targeted, tokens=tuple((1 - part) * a / present_total + part * b for a, b in pairs))

        return replace(target, groups=tuple(map(mixed, self._schedule.groups, target.groups)))

    def _fits(self, candidate: Schedule) -> bool:
        """Whether no rank's tokens, nor what its heads see of its group's tokens, grow beyond its memory."""
        before = _sizes(self._schedule, self._observation.length)
        after = _sizes(candidate, self._observation.length)
        for rank, growth in zip(self._schedule.ranks, self._observation.growth, strict=True):
            for old, new in zip(before[rank], after[rank], strict=True):
                if growth < inf and new > max(old * growth, old):
                    return False
        return True


def attention_shares(schedule: Schedule, length: int, causal: bool) -> dict[int, float]:
    """The part of all pairs of query, key and head that every rank computes.

    Query i of a causal sequence sees i + 1 keys, so the queries [a, b) see (b (b + 1) - a (a + 1)) / 2.
    """

    def twice_the_pairs(start: int, stop: int) -> int:
        return stop * (stop + 1) - start * (start + 1) if causal else 2 * length * (stop - start)

    pairs = [sum(twice_the_pairs(*chunk) for chunk in chunks) for chunks in schedule.chunks(length)]
    all_pairs = sum(pairs) * schedule.num_heads
    shares = {}
    for group_pairs, group in zip(pairs, schedule.ring_groups, strict=True):
        for rank, heads in zip(group.ranks, group.heads, strict=True):
            shares[rank] = group_pairs * heads / all_pairs
    return shares


def _sizes(schedule: Schedule, length: int) -> dict[int, tuple[float, float]]:
    """Two sizes of every rank: its tokens, and its heads times the tokens of its group, for attention."""
    tokens = schedule.tokens(length)
    sizes: dict[int, tuple[float, float]] = {}
    for group in schedule.groups:
        group_tokens = sum(tokens[rank] for rank in group.ranks)
        for rank, heads in zip(group.ranks, group.heads, strict=True):
            sizes[rank] = tokens[rank], heads * group_tokens
    return sizes


def _completed(observation: Observation) -> tuple[list[float], list[float]]:
    """Seconds per FLOP of attention and per token of the rest, by rank, without gaps.

    A rank that had no work of one kind gets its cost from the other kind, at the median ratio of both over the ranks;
    one without any work the mean over the ranks.
    """
    s_per_flop, s_per_token = observation.attention_s_per_flop, observation.model_s_per_token
    ratios = [flop / token for flop, token in zip(s_per_flop, s_per_token, strict=True) if flop and token]
    ratio = median(ratios) if ratios else None

    def completed(
        costs: Sequence[float | None], other_costs: Sequence[float | None], factor: float | None
    ) -> list[float]:
        mean = fmean([cost for cost in costs if cost] or [1.0])

        def completed_cost(cost: float | None, other: float | None) -> float:
            if cost:
                return cost
            return other * factor if other and factor else mean

        return list(map(completed_cost, costs, other_costs))

    return completed(s_per_flop, s_per_token, ratio), completed(s_per_token, s_per_flop, ratio and 1 / ratio)
