"""``"zero_partition": "memory"``: every rank owns as much of the model states as its memory has room for.

Dimension key: D ranks.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ds_hetero.common.arrays import Floats
from ds_hetero.common.units import GIB
from ds_hetero.cost.model import CostModel
from ds_hetero.cost.terms.model_states import owned_share_D, partitioned_bytes, partitioned_parts
from ds_hetero.errors import PlanError
from ds_hetero.values.schedule import Schedule


def weights_by_memory(replicas: Sequence[tuple[CostModel, Schedule]]) -> tuple[float, ...]:
    """Shares of all ranks by what their devices have left after everything that ZeRO does not partition.

    A phase that needs more of partitions than the model states themselves, as the optimizer's step does, leaves room
    for as much less of them.

    Args:
        replicas: of every one its cost model, with equal ZeRO partitions, and its schedule.

    Raises:
        PlanError: see `weights_by_room`.
    """
    cost, _ = replicas[0]
    partitioned = partitioned_bytes(cost.model, cost.workload)
    rooms_D = [_room_bytes(cost, schedule, partitioned) for cost, schedule in replicas]
    room = np.concatenate(rooms_D)
    if not cost.workload.zero_within:
        return weights_by_room(room.tolist(), partitioned)
    node_ends = np.cumsum([len(node.devices) for node in cost.cluster.nodes])
    weights: list[float] = []
    for room_of_node in np.split(room, node_ends[:-1]):
        weights += weights_by_room(room_of_node.tolist(), partitioned)
    return tuple(weights)


def _room_bytes(cost: CostModel, schedule: Schedule, partitioned: float) -> Floats:
    """Room for model states on every rank in its fullest phase, ``[D]``.

    A rank with 10 bytes left in a phase, in which its partitions take twice the 4 bytes of its model states, has room
    for 5: each byte more of them takes two.
    """
    share_D = partitioned * owned_share_D(cost.workload, cost.cluster)
    rooms = []
    for parts in cost.memory_phases(*cost.arrays(schedule.shifted(0))).values():
        partition_D = partitioned_parts(parts, cost.workload)
        left_D = cost.capacity_bytes_D - (parts.total - partition_D)
        needs_more_D = (partition_D > share_D) & (left_D > 0)
        room_per_byte_D = np.where(needs_more_D, share_D / np.maximum(partition_D, 1.0), 1.0)
        rooms.append(left_D * room_per_byte_D)
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
