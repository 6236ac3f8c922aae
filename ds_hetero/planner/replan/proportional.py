"""Find a better schedule without a cost model: the same groups, with heads and tokens shared by measured costs."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import replace
from math import inf
from statistics import fmean, median

from ds_hetero.planner.replan.policy import Observation
from ds_hetero.values.schedule import Group, Schedule

_STEPS_TO_BALANCE = 12  # steps of a fixed-point iteration that balances the groups; chosen, never measured
_DIGITS = 6  # digits of token weights, since people read schedules
_MAX_GROUP_GROWTH = 16  # factor by which a group's share may grow in a step, against oscillation; never measured


class ProportionalEstimate:
    """Gains of schedules that share heads and tokens in another way, from measured costs of the present schedule.

    Groups, ring and layout stay, and so does the time of sends. Ranks of a group wait for each other at both
    all-to-alls, and all groups wait for the slowest one. So the time of computing in a step is ``max over groups (max
    model time + max attention time)``, where model time is all time outside attention.

    Args:
        schedule: the present schedule.
        observation: costs that were measured under it.
        causal: whether attention is causal; with a zigzag layout this makes no difference.
    """

    def __init__(self, schedule: Schedule, observation: Observation, causal: bool = True) -> None:
        self._schedule, self._observation, self._causal = schedule, observation, causal
        s_per_flop, s_per_token = _without_gaps(observation)
        all_flops, all_tokens = sum(observation.attention_flops), sum(observation.tokens)
        # Seconds in which every rank would compute all attention, and all tokens, of a step.
        self._attention_s = dict(zip(schedule.ranks, (seconds * all_flops for seconds in s_per_flop), strict=True))
        self._model_s = dict(zip(schedule.ranks, (seconds * all_tokens for seconds in s_per_token), strict=True))
        self._present_s = max(self._group_times(schedule))

    def gain(self, candidate: Schedule) -> float:
        """Return the share of a step's time that ``candidate`` is predicted to save."""
        saved_s = self._present_s - max(self._group_times(candidate))
        return saved_s / max(self._observation.step_s, self._present_s)

    def best(self) -> Schedule | None:
        """Return the schedule with heads by the cost of attention, and tokens with which all groups end together.

        If memory does not allow it, the schedule is a part of the way there. The result is None if there are fewer
        tokens than ranks, or if memory allows no part of the change.
        """
        if self._observation.length < self._schedule.sp_size:
            return None
        heads = [self._share_heads(group) for group in self._schedule.groups]
        weights = [1.0] * len(heads)  # share of the tokens, by group
        candidates = []
        # A group that takes twice the mean time gets half its share, and so on, until all take the mean time. With a
        # contiguous layout a later group attends to more keys, so its time also depends on the shares of earlier ones.
        for _ in range(_STEPS_TO_BALANCE):
            schedule = self._with_shares(heads, weights)
            candidates.append(schedule)
            times = self._group_times(schedule)  # in ring order
            time_of_group = dict(zip(self._schedule.ring, times, strict=True))
            mean_s = fmean(times)
            least_s = mean_s / _MAX_GROUP_GROWTH
            weights = [weight * mean_s / max(time_of_group[i], least_s) for i, weight in enumerate(weights)]
        best = min(candidates, key=lambda schedule: max(self._group_times(schedule)))
        # If memory does not allow the full change, a part of it is made.
        for fraction in (1.0, 0.75, 0.5, 0.25):
            candidate = best if fraction == 1 else self._part_way(best, fraction)
            if self._fits(candidate):
                return candidate
        return None

    def _group_times(self, schedule: Schedule) -> list[float]:
        """Return the seconds that every group computes in a step, in ring order."""
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
        """Give the heads of the model to a group's ranks one by one, each to the rank that would finish it first.

        Returns:
            Heads of every rank, in the order of the group.
        """
        heads = dict.fromkeys(group.ranks, 0)
        # Heap of (seconds with one head more, place in the group, rank).
        queue = [(self._attention_s[rank], i, rank) for i, rank in enumerate(group.ranks)]
        heapq.heapify(queue)
        for _ in range(self._schedule.num_heads):
            _, i, rank = queue[0]
            heads[rank] += 1
            heapq.heapreplace(queue, ((heads[rank] + 1) * self._attention_s[rank], i, rank))
        return tuple(heads.values())

    def _with_shares(self, heads: Sequence[tuple[int, ...]], weights: Sequence[float]) -> Schedule:
        """Return the schedule with these heads, and with tokens by weights of the groups and speeds of their ranks."""
        groups = []
        for group, group_heads, weight in zip(self._schedule.groups, heads, weights, strict=True):
            speeds = [1 / self._model_s[rank] for rank in group.ranks]
            shares = [weight / sum(weights) * speed / sum(speeds) for speed in speeds]
            tokens = tuple(round(share, _DIGITS) or share for share in shares)
            groups.append(replace(group, heads=group_heads, tokens=tokens))
        return replace(self._schedule, groups=tuple(groups))

    def _part_way(self, target: Schedule, fraction: float) -> Schedule:
        """Return the target schedule, with tokens at ``fraction`` of the way from the present schedule to it."""
        present_total = sum(group.weight for group in self._schedule.groups)

        def mix(present: Group, targeted: Group) -> Group:
            pairs = zip(present.tokens, targeted.tokens, strict=True)
            return replace(targeted, tokens=tuple((1 - fraction) * a / present_total + fraction * b for a, b in pairs))

        return replace(target, groups=tuple(map(mix, self._schedule.groups, target.groups)))

    def _fits(self, candidate: Schedule) -> bool:
        """Whether every rank has memory for its tokens, and for its heads over the tokens of its group."""
        present_sizes = _memory_sizes(self._schedule, self._observation.length)
        new_sizes = _memory_sizes(candidate, self._observation.length)
        for rank, growth in zip(self._schedule.ranks, self._observation.growth, strict=True):
            for present, new in zip(present_sizes[rank], new_sizes[rank], strict=True):
                if growth < inf and new > max(present * growth, present):
                    return False
        return True


def attention_shares(schedule: Schedule, length: int, causal: bool) -> dict[int, float]:
    """Return by rank the share of attention that it computes: of all pairs of query and key, over all heads.

    With causal attention query i sees i + 1 keys, so the queries [a, b) see (b (b + 1) - a (a + 1)) / 2 keys.

    Args:
        length: tokens of the sequence.
    """

    def twice_the_pairs(start: int, stop: int) -> int:
        """Return twice the number of pairs of queries [start, stop) and their keys."""
        return stop * (stop + 1) - start * (start + 1) if causal else 2 * length * (stop - start)

    pairs = [sum(twice_the_pairs(*chunk) for chunk in chunks) for chunks in schedule.chunks(length)]
    all_pairs = sum(pairs) * schedule.num_heads
    shares = {}
    for group_pairs, group in zip(pairs, schedule.ring_groups, strict=True):
        for rank, heads in zip(group.ranks, group.heads, strict=True):
            shares[rank] = group_pairs * heads / all_pairs
    return shares


def _memory_sizes(schedule: Schedule, length: int) -> dict[int, tuple[float, float]]:
    """Return two sizes that memory depends on, by rank: its tokens, and its heads times the tokens of its group."""
    tokens = schedule.tokens(length)
    sizes: dict[int, tuple[float, float]] = {}
    for group in schedule.groups:
        group_tokens = sum(tokens[rank] for rank in group.ranks)
        for rank, heads in zip(group.ranks, group.heads, strict=True):
            sizes[rank] = tokens[rank], heads * group_tokens
    return sizes


def _without_gaps(observation: Observation) -> tuple[list[float], list[float]]:
    """Return seconds per FLOP of attention, and seconds per token outside attention, by rank, with gaps filled.

    A rank that had no attention, or no tokens, has no measured cost of this kind of work. Its cost follows from its
    cost of the other kind, by the median ratio of both over all ranks. A rank without any work gets the mean over the
    ranks.
    """
    s_per_flop, s_per_token = observation.attention_s_per_flop, observation.model_s_per_token
    ratios = [flop / token for flop, token in zip(s_per_flop, s_per_token, strict=True) if flop and token]
    ratio = median(ratios) if ratios else None

    def fill_gaps(
        costs: Sequence[float | None], other_costs: Sequence[float | None], factor: float | None
    ) -> list[float]:
        """Replace None and 0 in ``costs`` by the rank's cost in ``other_costs`` times ``factor``, or by the mean."""
        mean_cost = fmean([cost for cost in costs if cost] or [1.0])

        def fill(cost: float | None, other_cost: float | None) -> float:
            if cost:
                return cost
            return other_cost * factor if other_cost and factor else mean_cost

        return list(map(fill, costs, other_costs))

    return fill_gaps(s_per_flop, s_per_token, ratio), fill_gaps(s_per_token, s_per_flop, ratio and 1 / ratio)
