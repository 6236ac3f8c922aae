"""The schedule whose memory is shown: the fastest that fits, or the one that is nearest to fitting; and the limits.

``"zero_partition": "memory"``: every rank owns as much of the model states as its memory has room for.

Imports no torch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from ds_hetero.cluster.topology import DeviceSpec
from ds_hetero.common.arrays import Floats
from ds_hetero.common.text import GIB
from ds_hetero.cost import make_cost_model
from ds_hetero.cost.model import CostModel, Prediction
from ds_hetero.cost.terms.model_states import owned_share_D, partitioned_bytes, partitioned_parts
from ds_hetero.cost.workload import Workload
from ds_hetero.errors import PlanError
from ds_hetero.planner.planning import searched_candidates
from ds_hetero.planner.results.candidates import Baselines, ScheduleCandidate, fastest
from ds_hetero.planner.search.memory_fit import fits_somehow
from ds_hetero.planner.strategies import strategy
from ds_hetero.values.schedule import Schedule


def weights_by_memory(replicas: Sequence[tuple[CostModel, Schedule]]) -> tuple[float, ...]:
    """Shares of all ranks by what their devices have left after everything that ZeRO does not partition.

    A moment that needs more of partitions than the model states themselves, as the optimizer's step does, leaves room
    for as much less of them.

    Args:
        replicas: of every one its cost model, with equal ZeRO partitions, and its schedule.

    Raises:
        PlanError: see `weights_by_room`.
    """
    cost, _ = replicas[0]
    partitioned = partitioned_bytes(cost.model, cost.workload)
    room = [float(left) for cost, schedule in replicas for left in _room_bytes(cost, schedule, partitioned)]
    if not cost.workload.zero_within:
        return weights_by_room(room, partitioned)
    ends = np.cumsum([len(node.devices) for node in cost.cluster.nodes])
    return tuple(
        weight for of_node in np.split(room, ends[:-1]) for weight in weights_by_room(of_node.tolist(), partitioned)
    )


def _room_bytes(cost: CostModel, schedule: Schedule, partitioned: float) -> Floats:
    """Room for model states on every rank at its fullest moment, ``[D]``."""
    share_D, rooms = partitioned * owned_share_D(cost.workload, cost.cluster), []
    for parts in cost.memory_phases(*cost.arrays(schedule.shifted(0))).values():
        own_D = partitioned_parts(parts, cost.workload)
        left_D = cost.capacity_bytes_D - (parts.total - own_D)
        rooms.append(left_D * np.where((own_D > share_D) & (left_D > 0), share_D / np.maximum(own_D, 1.0), 1.0))
    return np.asarray(np.min(rooms, axis=0))


def weights_by_room(room_bytes: Sequence[float], partitioned: float) -> tuple[float, ...]:
    """Shares of ``partitioned`` bytes in proportion to room, so that all ranks keep the same part of theirs free.

    With nothing to partition, as where all of it is offloaded to the host, shares are equal.

    Raises:
        PlanError: some rank has no room even without any share, or all room together is not enough.
    """
    if not partitioned:
        return (1.0,) * len(room_bytes)
    full = [f"rank {rank} by {-room / GIB:.2f} GiB" for rank, room in enumerate(room_bytes) if room < 0]
    if full:
        raise PlanError(
            f"without any share of the model states, memory is exceeded already on {', '.join(full)}. Give those ranks "
            "fewer tokens or samples, or use shorter sequences or activation checkpointing."
        )
    if sum(room_bytes) < partitioned:
        raise PlanError(
            f"the model states that ZeRO partitions take {partitioned / GIB:.2f} GiB, but all ranks together have room "
            f"for {sum(room_bytes) / GIB:.2f} GiB. Use a higher ZeRO stage, offloading, shorter sequences or more "
            "ranks."
        )
    return tuple(room_bytes)


MAX_GROWTH = 2**20  # of memory, when the nearest schedule is looked for
STEP = 1.1  # between two sizes of memory that are tried
LONGEST = 2**24  # tokens; beyond, nobody asks


@dataclass(frozen=True, slots=True)
class Fitted:
    """A schedule, its cost model and its prediction."""

    cost: CostModel  # bound to cluster, model and workload
    schedule: Schedule  # of the fastest that fits, or of the nearest to fitting
    prediction: Prediction  # of the schedule; says whether it fits

    @property
    def fits(self) -> bool:
        """Every rank has the memory that it needs."""
        return self.prediction.feasible

    @property
    def iteration_s(self) -> float:
        """Predicted time of an optimizer step."""
        return self.prediction.iteration_s


def with_workload(cost: CostModel, workload: Workload) -> CostModel:
    """The same cost model for another workload."""
    return make_cost_model(cost.name, cost.cluster, cost.model, workload)


def best_schedule(cost: CostModel, source: str | Schedule = "plan") -> Fitted:
    """The schedule to be judged.

    Args:
        source: a schedule, or the name of a strategy; ``plan`` is the fastest schedule that fits, and where none fits
            the fastest one on cards that are all larger by the same factor, the least that makes one fit.

    Raises:
        PlanError: the strategy has no schedule for this cluster, or none is near to fitting.
    """
    if source != "plan":
        schedule = source if isinstance(source, Schedule) else strategy(source, cost)
        return Fitted(cost, schedule, cost.predict(schedule))
    best = _fastest(cost) or _nearest(cost)
    return Fitted(cost, best.schedule, cost.predict(best.schedule))


def longest_sequence(cost: CostModel, source: str | Schedule = "plan") -> int:
    """The longest sequence that fits, to about 1 % and a multiple of 256 tokens beyond 8,192; 0 if none does.

    By bisection: each length is planned anew, since longer sequences want other shares.
    """

    def fits(seq_len: int) -> bool:
        at = with_workload(cost, replace(cost.workload, seq_len=seq_len))
        if source == "plan":
            return fits_somehow(at) or _fastest(at) is not None
        return best_schedule(at, source).fits

    least = cost.cluster.num_ranks
    if not fits(least):
        return 0
    low, high = least, max(cost.workload.seq_len, 2 * least)
    while high < LONGEST and fits(high):
        low, high = high, 2 * high
    return _bisect(fits, low, min(high, LONGEST))


def _bisect(fits: Callable[[int], bool], low: int, high: int) -> int:
    unit = 256
    while high - low > max(1, low // 100):
        middle = (low + high) // 2
        if middle > 32 * unit:
            middle = -(-middle // unit) * unit if -(-middle // unit) * unit < high else middle // unit * unit
        if middle <= low:
            break
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def _fastest(cost: CostModel) -> ScheduleCandidate | None:
    return fastest(searched_candidates(cost), Baselines.under(cost).candidates)


def _with_memory(cost: CostModel, factor: float) -> CostModel:
    """The same cost model for cards with ``factor`` times as much memory for tensors, in machines without limit."""

    def larger(device: DeviceSpec) -> DeviceSpec:
        left = factor * (device.memory_bytes - device.reserved_bytes)
        return replace(device, memory_bytes=device.reserved_bytes + int(left))

    cluster = cost.cluster.with_devices(larger)
    cluster = replace(cluster, nodes=tuple(replace(node, host_memory_bytes=None) for node in cluster.nodes))
    return make_cost_model(cost.name, cluster, cost.model, cost.workload)


def _nearest(cost: CostModel) -> ScheduleCandidate:
    """The fastest schedule on cards that are all larger by about the least factor with which there is one.

    Raises:
        PlanError: no factor up to `MAX_GROWTH` is enough.
    """
    factor = 1.0
    while factor < MAX_GROWTH and not fits_somehow(_with_memory(cost, 2 * factor)):
        factor *= 2
    while factor < MAX_GROWTH:
        larger = _with_memory(cost, factor)
        if fits_somehow(larger) and (best := _fastest(larger)) is not None:
            return best
        factor *= STEP
    raise PlanError(
        f"{cost.model.name} needs more than {MAX_GROWTH:,} times the memory of these cards. Give a smaller model, "
        "shorter sequences, or more cards."
    )
