"""Choose the micro-batches of replicas with different speeds, so that a step of the global batch is fastest.

Replica i trains m_i micro-batches of b_i samples; the products m_i b_i sum to the global batch. With t_i(b) the time of
a micro-batch of b samples:

    ZeRO 0 and 1    communicate once in a step, so it takes max over i of m_i t_i(b_i)
    ZeRO 2 and 3    wait for each other in every micro-batch, so all have m of them: m times max over i of t_i(b_i)

Both are solved exactly. The time of the step is found by bisection over all times that occur. For each, a bit set of
the sums that the first replicas can reach within this time shows whether all of them can train the global batch.
Example: two replicas that can train 2 or 4, and 3 or 6 samples: the sums are 5, 7, 8 and 10.
"""

from __future__ import annotations

import itertools
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from ds_hetero.cluster.topology import Cluster
from ds_hetero.common.reading import MAX_BATCH, expect_whole_number
from ds_hetero.cost import make_cost_model
from ds_hetero.cost.workload import Workload
from ds_hetero.errors import PlanError
from ds_hetero.models.shapes import ModelSpec
from ds_hetero.planner.planning import plan
from ds_hetero.planner.results.schedule import PlannedSchedule
from ds_hetero.values.plans import BatchSplit
from ds_hetero.values.schedule import Schedule


@dataclass(frozen=True, kw_only=True, slots=True)
class ReplicasPlan:
    """Schedules and batches of all replicas."""

    plans: tuple[PlannedSchedule, ...]  # planned schedule of every replica, with ranks from 0 on
    schedules: tuple[Schedule, ...]  # the same schedules with ranks of the job, replica after replica
    split: BatchSplit  # batches of all replicas
    step_s: float  # predicted time of an optimizer step
    busy_s: tuple[float, ...]  # the part of ``step_s`` that every replica computes
    even_s: float | None  # ``step_s`` with equal batches on all replicas; None if the global batch has no such split


def plan_replicas(
    clusters: Sequence[Cluster],
    model: ModelSpec,
    workload: Workload,
    global_batch: int,
    *,
    cost_model: str = "calibrated",
    layout: str | None = None,
) -> ReplicasPlan:
    """Plan the schedule of every replica, and the micro-batches of all.

    Args:
        clusters: devices of every replica.
        workload: workload of one replica; its ``micro_batch`` and ``micro_batches`` are ignored, since they are chosen
            here.
        layout: ``"zigzag"`` or ``"contiguous"``; left out, zigzag wherever it matters.

    Raises:
        PlanError: a replica does not fit into memory, or no micro-batches give the global batch.
    """
    expect_whole_number("global_batch", global_batch, 1, MAX_BATCH, PlanError)
    work = replace(workload, micro_batch=1, micro_batches=1, data_parallel=len(clusters))
    plans = tuple(plan(cluster, model, work, cost_model=cost_model, layout=layout) for cluster in clusters)
    times = []
    schedules = []
    first_rank = 0
    for cluster, planned in zip(clusters, plans, strict=True):
        times.append(_times(cluster, model, work, planned.schedule, global_batch, cost_model))
        schedules.append(planned.schedule.shifted(first_rank))
        first_rank += cluster.num_ranks
    lockstep = workload.zero_stage >= 2
    split = split_batch(times, global_batch, lockstep=lockstep)
    return ReplicasPlan(
        plans=plans,
        schedules=tuple(schedules),
        split=split,
        step_s=_step_s(times, split, lockstep),
        busy_s=_busy_s(times, split),
        even_s=_even_s(times, global_batch, lockstep),
    )


def split_batch(times: Sequence[Sequence[float]], global_batch: int, *, lockstep: bool) -> BatchSplit:
    """Return the micro-batches with which a step is fastest.

    Args:
        times: seconds of one micro-batch of 1, 2, ... samples, by replica; as many as fit into its memory.
        lockstep: whether replicas wait for each other in every micro-batch.

    Raises:
        PlanError: no micro-batches give the global batch.
    """
    splits = list(_lockstep_splits(times, global_batch) if lockstep else _free_splits(times, global_batch))
    if not splits:
        most_samples = [len(replica_times) for replica_times in times]
        raise PlanError(
            f"{len(times)} replicas that hold at most {most_samples} samples at a time cannot make up a global batch "
            f"of {global_batch}{' in equally many micro-batches, as ZeRO 2 and 3 require' if lockstep else ''}. "
            "Change the global batch, or the clusters of the replicas."
        )
    fastest = min(splits, key=lambda timed: (timed.step_s, timed.split.micro_steps))
    return fastest.split


class _TimedSplit(NamedTuple):
    """A split, and the time of its step."""

    step_s: float
    split: BatchSplit


class _Option(NamedTuple):
    """The time in which a replica trains a number of samples, and the micro-batches that it needs for them."""

    seconds: float
    micro_batches: int


def _free_splits(times: Sequence[Sequence[float]], global_batch: int) -> Iterator[_TimedSplit]:
    """Yield the best split of replicas that wait for each other once in a step; nothing if there is none."""
    filled = _fill([_fastest_options(replica_times, global_batch) for replica_times in times], global_batch)
    if filled is None:
        return
    samples, chosen = filled
    counts = tuple(option.micro_batches for option in chosen)
    sizes = tuple(number // count for number, count in zip(samples, counts, strict=True))
    split = BatchSplit(micro_batch_sizes=sizes, micro_batches=counts)
    yield _TimedSplit(max(option.seconds for option in chosen), split)


def _lockstep_splits(times: Sequence[Sequence[float]], global_batch: int) -> Iterator[_TimedSplit]:
    """Yield the best split for every number of micro-batches that divides the global batch, the same on all replicas.

    Example: a global batch of 12 in 3 micro-batches needs sizes that sum to 4 over the replicas.
    """
    for steps in range(1, global_batch + 1):
        if global_batch % steps:
            continue
        options = []
        for replica_times in times:
            options.append({size: _Option(seconds * steps, steps) for size, seconds in enumerate(replica_times, 1)})
        filled = _fill(options, global_batch // steps)
        if filled is not None:
            sizes, chosen = filled
            split = BatchSplit(micro_batch_sizes=tuple(sizes), micro_batches=(steps,) * len(sizes))
            yield _TimedSplit(max(option.seconds for option in chosen), split)


def _fastest_options(times: Sequence[float], max_samples: int) -> dict[int, _Option]:
    """Return the fastest way for a replica to train 1, 2, ... ``max_samples`` samples, by their number."""
    options: dict[int, _Option] = {}
    for size, seconds in enumerate(times, 1):
        for count in range(1, max_samples // size + 1):
            option = _Option(seconds * count, count)
            options[size * count] = min(option, options.get(size * count, _Option(float("inf"), 0)))
    return options


def _fill(options: Sequence[Mapping[int, _Option]], total: int) -> tuple[list[int], list[_Option]] | None:
    """Choose one option of every replica: their samples sum to ``total``, and the largest time is as small as possible.

    Args:
        options: by replica and number of samples.

    Returns:
        Samples and option of every replica; None if no samples sum to ``total``.
    """
    if not all(options):
        return None
    all_options = itertools.chain.from_iterable(replica_options.values() for replica_options in options)
    limits = sorted({option.seconds for option in all_options})

    def reaches_total(limit: float) -> bool:
        return bool(_reachable(options, total, limit)[-1] >> total & 1)

    first = bisect_left(limits, True, key=reaches_total)
    if first == len(limits):
        return None
    # From the last replica to the first: the fastest option with which the earlier replicas can reach the rest.
    limit, samples, rest = limits[first], [], total
    reachable = _reachable(options, total, limit)
    for i in range(len(options) - 1, -1, -1):
        candidates = []
        for number, option in options[i].items():
            if option.seconds <= limit and number <= rest and reachable[i] >> (rest - number) & 1:
                candidates.append((option, number))
        _, number = min(candidates)
        samples.append(number)
        rest -= number
    samples.reverse()
    return samples, [options[i][number] for i, number in enumerate(samples)]


def _reachable(options: Sequence[Mapping[int, _Option]], total: int, limit: float) -> list[int]:
    """Return bit sets: in the i-th, bit n says that the first i replicas can train n samples within ``limit`` seconds.

    The first one is 1: without any replica, only 0 samples can be trained.
    """
    mask, reached = (1 << (total + 1)) - 1, [1]
    for replica_options in options:
        sums = 0
        for number, option in replica_options.items():
            if option.seconds <= limit and number <= total:
                sums |= reached[-1] << number
        reached.append(sums & mask)
    return reached


def _times(
    cluster: Cluster, model: ModelSpec, workload: Workload, schedule: Schedule, max_samples: int, cost_model: str
) -> list[float]:
    """Predict the seconds of a micro-batch of 1, 2, ... samples under ``schedule``, as long as they fit into memory."""
    times: list[float] = []
    for size in range(1, max_samples + 1):
        work = replace(workload, micro_batch=size)
        prediction = make_cost_model(cost_model, cluster, model, work).predict(schedule)
        if not prediction.feasible:
            break
        times.append(prediction.iteration_s)
    return times


def _busy_s(times: Sequence[Sequence[float]], split: BatchSplit) -> tuple[float, ...]:
    """Seconds that every replica computes in a step."""
    replicas = zip(times, split.micro_batch_sizes, split.micro_batches, strict=True)
    return tuple(replica_times[size - 1] * count for replica_times, size, count in replicas)


def _step_s(times: Sequence[Sequence[float]], split: BatchSplit, lockstep: bool) -> float:
    """Time of a step with this split."""
    if not lockstep:
        return max(_busy_s(times, split))
    # In lockstep a micro-batch lasts as long as that of the slowest replica that still has one.
    replicas = list(zip(times, split.micro_batch_sizes, split.micro_batches, strict=True))
    slowest_s = []
    for step in range(split.micro_steps):
        slowest_s.append(max(replica_times[size - 1] for replica_times, size, count in replicas if count > step))
    return sum(slowest_s)


def _even_s(times: Sequence[Sequence[float]], global_batch: int, lockstep: bool) -> float | None:
    """Time of the fastest step with equal micro-batches on all replicas; None if the global batch has no such split."""
    num_replicas = len(times)
    samples, rest = divmod(global_batch, num_replicas)
    if rest:
        return None
    sizes = [size for size in range(1, min(map(len, times)) + 1) if samples % size == 0]
    splits = [
        BatchSplit(micro_batch_sizes=(size,) * num_replicas, micro_batches=(samples // size,) * num_replicas)
        for size in sizes
    ]
    return min((_step_s(times, split, lockstep) for split in splits), default=None)
