"""``"zero_partition": "memory"``: ZeRO's shares of the model states in proportion to the free memory of the ranks.

Dimension key: D ranks.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ds_hetero.common.arrays import Floats
from ds_hetero.common.units import GIB
from ds_hetero.cost.model import CostModel
from ds_hetero.cost.terms.model_states import DividedExperts, owned_share_D, partitioned_bytes, partitioned_parts
from ds_hetero.errors import PlanError
from ds_hetero.values.schedule import Schedule


def weights_by_memory(replicas: Sequence[tuple[CostModel, Schedule]]) -> tuple[float, ...]:
    """Return the weight of every rank in ZeRO's partition: its memory that is free for partitioned model states.

    In some phases a partition takes more memory than its model states, for example by the temporaries of the
    optimizer's step. Then accordingly fewer model states fit.

    Args:
        replicas: cost model and schedule of every replica; the cost models have equal ZeRO partitions.

    Raises:
        PlanError: see `weights_by_room`.
    """
    cost, _ = replicas[0]
    partitioned = partitioned_bytes(cost.model, cost.workload)
    room_bytes = np.concatenate([_room_bytes(cost, schedule, partitioned) for cost, schedule in replicas])
    if not cost.workload.zero_within:
        return weights_by_room(room_bytes.tolist(), partitioned)
    node_ends = np.cumsum([len(node.devices) for node in cost.cluster.nodes])
    weights: list[float] = []
    for node_room_bytes in np.split(room_bytes, node_ends[:-1]):
        weights += weights_by_room(node_room_bytes.tolist(), partitioned)
    return tuple(weights)


def _room_bytes(cost: CostModel, schedule: Schedule, partitioned: float) -> Floats:
    """Return the room for model states on every rank in its fullest phase, ``[D]``.

    Example: in a phase a partition of 4 bytes of model states takes 8 bytes, so every byte takes two. With 10 bytes
    free, the rank has room for 5 bytes of model states.

    Args:
        partitioned: bytes of all partitions together.
    """
    states_D = partitioned * owned_share_D(cost.workload, cost.cluster)  # model states of every rank
    experts = DividedExperts.of(cost.model, cost.workload, cost.cluster)
    rooms_by_phase = []
    for parts in cost.memory_phases(*cost.arrays(schedule.shifted(0))).values():
        partition_D = partitioned_parts(parts, cost.workload, experts)
        free_D = cost.capacity_bytes_D - (parts.total - partition_D)
        takes_more_D = (partition_D > states_D) & (free_D > 0)
        states_per_byte_D = np.where(takes_more_D, states_D / np.maximum(partition_D, 1.0), 1.0)
        rooms_by_phase.append(free_D * states_per_byte_D)
    return np.asarray(np.min(rooms_by_phase, axis=0))


def weights_by_room(room_bytes: Sequence[float], partitioned: float) -> tuple[float, ...]:
    """Return weights of the ranks in proportion to room: every rank keeps the same part of its room free.

    If there is nothing to partition, for example because all is offloaded to the host, shares are equal.

    Raises:
        PlanError: a rank does not fit even without a share, or all ranks together have too little room.
    """
    if not partitioned:
        return (1.0,) * len(room_bytes)
    shortages = [f"rank {rank} by {-room / GIB:.2f} GiB" for rank, room in enumerate(room_bytes) if room < 0]
    if shortages:
        raise PlanError(
            f"without any share of the model states, memory is exceeded already on {', '.join(shortages)}. Give those "
            "ranks fewer tokens or samples, or use shorter sequences or activation checkpointing."
        )
    if sum(room_bytes) < partitioned:
        raise PlanError(
            f"the model states that ZeRO partitions take {partitioned / GIB:.2f} GiB, but all ranks together have room "
            f"for {sum(room_bytes) / GIB:.2f} GiB. Use a higher ZeRO stage, offloading, shorter sequences or more "
            "ranks."
        )
    return tuple(room_bytes)
