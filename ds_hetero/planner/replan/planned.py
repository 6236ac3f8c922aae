"""Another schedule for a job that is running: the planner on devices as fast as they turned out to be.

Rank 0 decides for all replicas, since it alone has read the cluster; see `ds_hetero.planner.replan.policy` for when a
schedule changes. Where the cluster or the model has no cost model, shares follow the measured costs alone.

Another schedule without a cost model: the same groups, with heads and tokens shared by measured cost.
"""

from __future__ import annotations

import heapq
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from math import exp, inf, log
from statistics import fmean, median

from ds_hetero.cluster import Cluster
from ds_hetero.cluster.topology import DeviceSpec
from ds_hetero.common.text import time_text
from ds_hetero.cost import CostModel, make_cost_model
from ds_hetero.errors import HeteroError
from ds_hetero.planner import planning
from ds_hetero.planner.replan.policy import GainEstimate, Observation, Policy, ProposedChange
from ds_hetero.values.schedule import Group, Schedule

_STEPS_TO_BALANCE = 12  # of the fixed point for contiguous groups
_DIGITS = 6  # of token weights, for people who read schedules
_MOST_GROWTH = 16  # of a group's share in one of these steps


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


logger = logging.getLogger(__name__)

_ALIKE = 0.02  # equal devices whose speeds differ by less are taken to be equal


class Replanner:
    """The policies of all replicas; rank 0 has one.

    Args:
        costs: the cost model of every replica; none where the cluster is not known.
    """

    def __init__(
        self, num_replicas: int, costs: Sequence[CostModel], min_gain: float, layout: str | None, causal: bool
    ) -> None:
        estimates: list[Callable[[Schedule, Observation], GainEstimate]] = [
            PlannedEstimates(cost, layout) for cost in costs
        ]
        estimates = estimates or [partial(ProportionalEstimate, causal=causal)] * num_replicas
        self._estimates = estimates
        self._policies = [Policy(estimate, min_gain) for estimate in estimates]

    def decide(self, schedules: Sequence[Schedule], observations: Sequence[Observation]) -> list[ProposedChange | None]:
        """Return the decision for every replica; None where its schedule stays."""
        return [
            policy.decide(schedule, observation) if schedule.sp_size > 1 else None
            for policy, schedule, observation in zip(self._policies, schedules, observations, strict=True)
        ]

    def gains(self, schedules: Sequence[Schedule], observations: Sequence[Observation]) -> list[float | None]:
        """Return the share of a step that the best schedule of every replica would save; None where there is none."""
        return [
            _best_gain(estimate(schedule, observation)) if schedule.sp_size > 1 else None
            for estimate, schedule, observation in zip(self._estimates, schedules, observations, strict=True)
        ]


def _best_gain(estimate: GainEstimate) -> float | None:
    best = estimate.best()
    return None if best is None else estimate.gain(best)


class PlannedEstimates:
    """Makes a `PlannedEstimate` of every observation of one replica, and remembers the speeds of ranks without work."""

    def __init__(self, cost: CostModel, layout: str | None) -> None:
        self._cost, self._layout = cost, layout
        self._speeds = [1.0] * cost.cluster.num_ranks

    def __call__(self, schedule: Schedule, observation: Observation) -> PlannedEstimate:
        """Make the estimate of one observation under ``schedule``."""
        estimate = PlannedEstimate(schedule, observation, self._cost, self._layout, self._speeds)
        self._speeds = estimate.speeds
        return estimate


class PlannedEstimate:
    """The cost model with every device as fast as it was measured to be under the present schedule.

    Args:
        cost: of the replica's cluster as it is described.
        before: speeds of the ranks as far as they were known.

    Attributes:
        speeds: of every rank, over what the cluster's description makes of it.
    """

    def __init__(
        self, schedule: Schedule, observation: Observation, cost: CostModel, layout: str | None, before: Sequence[float]
    ) -> None:
        self._schedule, self._layout = schedule, layout
        sequences = sum(observation.tokens) / observation.length
        micro_batches = max(round(sequences / cost.workload.micro_batch), 1)
        workload = replace(cost.workload, seq_len=observation.length, micro_batches=micro_batches)
        described = make_cost_model(cost.name, cost.cluster, cost.model, workload)
        self.speeds = _speeds(described, schedule.shifted(0), observation, before)
        cluster = _at_speeds(cost.cluster, _snapped(cost.cluster.devices, self.speeds, max(observation.error)))
        self._cost = make_cost_model(cost.name, cluster, cost.model, workload)
        self._present_s = self._iteration_s(schedule)

    def gain(self, candidate: Schedule) -> float:
        """The share of a step's time that ``candidate`` is predicted to save."""
        return 1 - self._iteration_s(candidate) / self._present_s

    def best(self) -> Schedule | None:
        """The planner's choice; None where nothing estimates into memory."""
        started = time.perf_counter()
        try:
            plan = planning.plan(
                self._cost.cluster,
                self._cost.model,
                self._cost.workload,
                cost_model=self._cost.name,
                layout=self._layout,
            )
        except HeteroError as error:
            logger.warning("no other schedule is looked for: %s", error)
            return None
        logger.debug("searched another schedule for %s", time_text(time.perf_counter() - started))
        return plan.schedule.shifted(self._schedule.ranks[0])

    def _iteration_s(self, schedule: Schedule) -> float:
        return self._cost.predict(schedule.shifted(0)).iteration_s


def _speeds(cost: CostModel, schedule: Schedule, observation: Observation, before: Sequence[float]) -> list[float]:
    """Time that the model expects a rank to compute, over what it did; as before for a rank without work."""
    work = cost.workload
    tokens = schedule.tokens(work.seq_len)
    busy_s = cost.predict(schedule).busy_s
    expected = [
        (busy_s[rank] * cost.model.num_layers + float(cost.loss_s_per_token_D[rank]) * tokens[rank])
        * work.micro_batches
        for rank in range(cost.cluster.num_ranks)
    ]
    own_s = observation.own_s
    return [e / s if e and s else old for e, s, old in zip(expected, own_s, before, strict=True)]


def _snapped(devices: Sequence[DeviceSpec], speeds: Sequence[float], error: float) -> list[float]:
    """Speeds of equal devices made equal where they differ by noise only, which keeps the search small and exact."""
    out = list(speeds)
    for device in dict.fromkeys(devices):
        ranks = sorted((r for r, d in enumerate(devices) if d == device), key=lambda r: speeds[r])
        runs: list[list[int]] = []
        for rank in ranks:
            if runs and log(speeds[rank] / speeds[runs[-1][0]]) <= max(_ALIKE, 3 * error):
                runs[-1].append(rank)
            else:
                runs.append([rank])
        for run in runs:
            mean = exp(fmean(log(speeds[rank]) for rank in run))
            for rank in run:
                out[rank] = mean
    return out


def _at_speeds(cluster: Cluster, speeds: Sequence[float]) -> Cluster:
    """The cluster with every rank's device that much faster at everything it computes."""
    at = iter(speeds)
    return cluster.with_devices(lambda device: _at_speed(device, next(at)))


def _at_speed(device: DeviceSpec, speed: float) -> DeviceSpec:
    efficiency = replace(
        device.efficiency,
        kernel_overhead_s=device.efficiency.kernel_overhead_s / speed,
        attention_overhead_s=device.efficiency.attention_overhead_s / speed,
        message_overhead_s=device.efficiency.message_overhead_s / speed,
    )
    return replace(
        device,
        peak_flops_per_s=device.peak_flops_per_s * speed,
        memory_bytes_per_s=device.memory_bytes_per_s * speed,
        efficiency=efficiency,
    )
