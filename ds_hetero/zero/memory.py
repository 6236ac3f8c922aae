"""``"zero_partition": "memory"``: every rank owns as much of the model states as its memory has room for.

Imports no torch.
"""

from __future__ import annotations

from collections.abc import Sequence

from ds_hetero.common.units import GIB
from ds_hetero.cost.model import CostModel
from ds_hetero.cost.prediction import Prediction
from ds_hetero.cost.terms.memory import partitioned_bytes
from ds_hetero.errors import PlanError

__all__ = ["weights_by_memory", "weights_by_room"]


def weights_by_memory(predicted: Sequence[tuple[CostModel, Prediction]]) -> tuple[float, ...]:
    """Shares of all ranks by what their devices have left after everything that ZeRO does not partition.

    Args:
        predicted: of every replica its cost model, with equal ZeRO partitions, and what that says of its schedule.

    Raises:
        PlanError: see `weights_by_room`.
    """
    room: list[float] = []
    for cost, prediction in predicted:
        share = partitioned_bytes(cost.model, cost.workload) / cost.workload.data_parallel / cost.cluster.num_ranks
        room += [
            float(capacity) - (needed - share)
            for capacity, needed in zip(cost.capacity_bytes_D, prediction.memory_bytes, strict=True)
        ]
    cost, _ = predicted[0]
    return weights_by_room(room, partitioned_bytes(cost.model, cost.workload))


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
