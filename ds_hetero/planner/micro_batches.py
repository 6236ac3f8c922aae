"""Micro-batches for replicas of different speed, so that an optimizer step of a given global batch ends soonest.

Each replica i trains b_i x m_i samples, m_i micro-batches of b_i, which sum to the global batch. With t_i(b) the time
of one micro-batch:

    ZeRO 0 and 1    communicate once per optimizer step, so the step takes max over i of m_i t_i(b_i)
    ZeRO 2 and 3    wait for each other in every micro-batch, so all take m of them: m times max over i of t_i(b_i)

Either is a minimax over sets of reachable sample counts, solved exactly: the step time is found by bisection over the
times that occur, and a bit set of reachable sums tells whether the replicas can fill the global batch within one.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

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

    plans: tuple[PlannedSchedule, ...]  # the planned schedule of every replica; its ranks begin at 0
    schedules: tuple[Schedule, ...]  # the same schedules in ranks of the job, where the replicas follow one another
    split: BatchSplit  # the batches of all replicas
    step_s: float  # predicted time of an optimizer step
    busy_s: tuple[float, ...]  # the part of ``step_s`` that every replica spends on its own micro-batches
    even_s: float | None  # ``step_s`` with the same micro-batches on all; None if the batch cannot be cut so


def plan_replicas(
    clusters: Sequence[Cluster],
    model: ModelSpec,
    workload: Workload,
    global_batch: int,
    *,
    cost_model: str = "calibrated",
    layout: str | None = None,
) -> ReplicasPlan:
    """Plan every replica, and the micro-batches of all. Raises `PlanError`: no memory, or no way to fill the batch.

    Args:
        workload: of one replica; its ``micro_batch`` and ``micro_batches`` are ignored, because they are chosen here.
        layout: ``"zigzag"`` or ``"contiguous"``; left out, zigzag wherever it matters.
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
    """Micro-batches with which a step ends soonest. Raises `PlanError`: none make up the global batch.

    Args:
        times: seconds of one micro-batch of 1, 2, ... samples, by replica; as many as fit into its memory.
        lockstep: replicas wait for each other in every micro-batch.
    """
    splits = list(_lockstep_splits(times, global_batch) if lockstep else _free_splits(times, global_batch))
    if not splits:
        raise PlanError(
            f"{len(times)} replicas that hold at most {[len(of_replica) for of_replica in times]} samples at a time "
            f"cannot make up a global batch of {global_batch}"
            f"{' in equally many micro-batches, as ZeRO 2 and 3 need them' if lockstep else ''}. "
            "Change the global batch, or the clusters of the replicas."
        )
    _, split = min(splits, key=lambda timed: (timed[0], timed[1].micro_steps))
    return split


def _free_splits(times: Sequence[Sequence[float]], global_batch: int) -> Iterator[tuple[float, BatchSplit]]:
    """The best split of replicas that wait for each other once a step, and its time; nothing if there is none."""
    filled = _fill([_counts(of_replica, global_batch) for of_replica in times], global_batch)
    if filled is None:
        return
    samples, chosen = filled
    counts = tuple(count for _, count in chosen)
    sizes = tuple(number // count for number, count in zip(samples, counts, strict=True))
    yield max(seconds for seconds, _ in chosen), BatchSplit(micro_batch_sizes=sizes, micro_batches=counts)


def _lockstep_splits(times: Sequence[Sequence[float]], global_batch: int) -> Iterator[tuple[float, BatchSplit]]:
    """The best split into every number of micro-batches that divides the batch, alike for all replicas, and its time.

    A global batch of 12 in 3 micro-batches: sizes that sum to 4 over the replicas.
    """
    for steps in range(1, global_batch + 1):
        if global_batch % steps:
            continue
        options = []
        for of_replica in times:
            options.append({size: (seconds * steps, steps) for size, seconds in enumerate(of_replica, 1)})
        filled = _fill(options, global_batch // steps)
        if filled is not None:
            sizes, chosen = filled
            split = BatchSplit(micro_batch_sizes=tuple(sizes), micro_batches=(steps,) * len(sizes))
            yield max(seconds for seconds, _ in chosen), split


Option = tuple[float, int]
"""Seconds that a number of samples takes a replica, and micro-batches in which it does."""


def _counts(times: Sequence[float], most: int) -> dict[int, Option]:
    """The fastest way to train 1, 2, ... ``most`` samples, by their number."""
    options: dict[int, Option] = {}
    for size, seconds in enumerate(times, 1):
        for count in range(1, most // size + 1):
            options[size * count] = min((seconds * count, count), options.get(size * count, (float("inf"), 0)))
    return options


def _fill(options: Sequence[Mapping[int, Option]], total: int) -> tuple[list[int], list[Option]] | None:
    """One number per replica that sum to ``total``, with the least of the largest time; None if there are none."""
    if not all(options):
        return None
    all_times = (seconds for of_replica in options for seconds, _ in of_replica.values())
    limits = sorted(set(all_times))

    def reaches_total(limit: float) -> bool:
        return bool(_reachable(options, total, limit)[-1] >> total & 1)

    first = bisect_left(limits, True, key=reaches_total)
    if first == len(limits):
        return None
    # Numbers from the last replica back: of those whose rest the replicas before it can reach, the fastest.
    limit, samples, rest = limits[first], [], total
    reachable = _reachable(options, total, limit)
    for i in range(len(options) - 1, -1, -1):
        candidates = []
        for number, option in options[i].items():
            if option[0] <= limit and number <= rest and reachable[i] >> (rest - number) & 1:
                candidates.append((option, number))
        _, number = min(candidates)
        samples.append(number)
        rest -= number
    samples.reverse()
    return samples, [options[i][number] for i, number in enumerate(samples)]


def _reachable(options: Sequence[Mapping[int, Option]], total: int, limit: float) -> list[int]:
    """After 0, 1, ... replicas: a bit for every sum that they reach within ``limit`` seconds each."""
    mask, reached = (1 << (total + 1)) - 1, [1]
    for of_replica in options:
        sums = 0
        for number, (time, _) in of_replica.items():
            if time <= limit and number <= total:
                sums |= reached[-1] << number
        reached.append(sums & mask)
    return reached


def _times(
    cluster: Cluster, model: ModelSpec, workload: Workload, schedule: Schedule, most: int, cost_model: str
) -> list[float]:
    """Predicted seconds of a micro-batch of 1, 2, ... samples under ``schedule``, as long as they fit into memory."""
    times: list[float] = []
    for size in range(1, most + 1):
        work = replace(workload, micro_batch=size)
        prediction = make_cost_model(cost_model, cluster, model, work).predict(schedule)
        if not prediction.feasible:
            break
        times.append(prediction.iteration_s)
    return times


def _busy_s(times: Sequence[Sequence[float]], split: BatchSplit) -> tuple[float, ...]:
    shares = zip(times, split.micro_batch_sizes, split.micro_batches, strict=True)
    return tuple(of_replica[size - 1] * count for of_replica, size, count in shares)


def _step_s(times: Sequence[Sequence[float]], split: BatchSplit, lockstep: bool) -> float:
    if not lockstep:
        return max(_busy_s(times, split))
    # In lockstep a micro-batch lasts as long as that of the slowest replica that still has one.
    replicas = list(zip(times, split.micro_batch_sizes, split.micro_batches, strict=True))
    slowest_s = []
    for step in range(split.micro_steps):
        slowest_s.append(max(of_replica[size - 1] for of_replica, size, count in replicas if count > step))
    return sum(slowest_s)


def _even_s(times: Sequence[Sequence[float]], global_batch: int, lockstep: bool) -> float | None:
    """The fastest step in which every replica takes the same micro-batches."""
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
