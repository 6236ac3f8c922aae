"""``"zero_partition": "memory"``: every rank owns as much of the model states as its memory has room for.

Imports no torch.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ds_hetero.common.arrays import Floats
from ds_hetero.common.text import GIB
from ds_hetero.cost.model import CostModel
from ds_hetero.cost.terms.memory import partitioned_bytes, partitioned_parts
from ds_hetero.errors import PlanError
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
    return weights_by_room(room, partitioned)


def _room_bytes(cost: CostModel, schedule: Schedule, partitioned: float) -> Floats:
    """Room for model states on every rank at its fullest moment, ``[D]``."""
    share, rooms = partitioned / cost.workload.data_parallel / cost.cluster.num_ranks, []
    for parts in cost.memory_moments(*cost.arrays(schedule.shifted(0))).values():
        own_D = partitioned_parts(parts, cost.workload)
        left_D = cost.capacity_bytes_D - (parts.total - own_D)
        rooms.append(left_D * np.where((own_D > share) & (left_D > 0), share / np.maximum(own_D, 1.0), 1.0))
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
