"""Agreement of the ranks of an asymmetric gradient synchronization, before anything depends on it.

Layouts and settings have to be the same on every rank, the parameters of a rank those that its layouts say, and the
dtype of a parameter the same wherever it is held. One exchange compares all of it, and all ranks refuse alike.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import ProcessGroup

from ds_hetero.errors import SyncError
from ds_hetero.gradient_sync.shards import Shard, local_tensor
from ds_hetero.runtime.collectives import on_all_ranks
from ds_hetero.sharding.parameter_layouts import ParameterLayout


def replicas_of(layouts: Mapping[str, ParameterLayout]) -> tuple[tuple[int, ...], ...]:
    """Return ranks of every replica, ascending. Raises `SyncError`: layouts do not tell, or a rank is in two."""
    counts = {len(layout.cuts) for layout in layouts.values()}
    if len(counts) != 1:
        raise SyncError(f"layouts have one cut for every replica, the same number in each; got {sorted(counts)}.")
    replica_of: dict[int, int] = {}
    for name, layout in layouts.items():
        for replica, cut in enumerate(layout.cuts):
            for rank in cut.ranks:
                if replica_of.setdefault(rank, replica) != replica:
                    raise SyncError(
                        f"rank {rank} is in replica {replica_of[rank]}, but the layout of {name} has it in {replica}."
                    )
    return tuple(tuple(sorted(r for r in replica_of if replica_of[r] == replica)) for replica in range(counts.pop()))


def agree(
    parameters: Mapping[str, nn.Parameter],
    shards: Mapping[str, Shard],
    layouts: Mapping[str, ParameterLayout],
    settings: object,
    group: ProcessGroup,
    *,
    has_replicas: bool = False,
) -> dict[str, torch.dtype]:
    """Return the dtype of every parameter, by name, once ranks have compared what must be the same. Raises `SyncError`.

    Args:
        settings: whatever else must be the same, compared by its ``repr``.
        has_replicas: the replicas are given, so that layouts need not have one cut for each.

    Caller: every rank of ``group``.
    Collectives: one `on_all_ranks`.
    """
    arguments = repr((list(layouts.items()), settings))
    fingerprint = hashlib.sha256(arguments.encode()).hexdigest()[:8]

    def examine() -> tuple[str, dict[str, torch.dtype]]:
        if not has_replicas:
            replicas_of(layouts)
        _expect_valid(parameters, shards, layouts, dist.get_rank(), dist.get_world_size(group))
        return fingerprint, {name: parameters[name].dtype for name in shards}

    by_rank = on_all_ranks(examine, group)
    fingerprints = [fingerprint for fingerprint, _ in by_rank]
    if len(set(fingerprints)) > 1:
        raise SyncError(
            "layouts, their order or other arguments of AsymmetricGradientSync differ between ranks: fingerprints by "
            f"rank are {fingerprints}. Make them from the same data on every rank."
        )
    dtypes: dict[str, torch.dtype] = {}
    for rank, (_, dtypes_of_rank) in enumerate(by_rank):
        for name, dtype in dtypes_of_rank.items():
            if dtypes.setdefault(name, dtype) != dtype:
                raise SyncError(f"{name} is {dtype} on rank {rank}, but {dtypes[name]} on a rank before it.")
    return dtypes


def _expect_valid(
    parameters: Mapping[str, nn.Parameter],
    shards: Mapping[str, Shard],
    layouts: Mapping[str, ParameterLayout],
    rank: int,
    world_size: int,
) -> None:
    """Refuse layouts that contradict each other or this rank's parameters. Raises `SyncError`."""
    for name, layout in layouts.items():
        owners = [] if layout.owners is None else [layout.owners]
        outside = [r for cut in (*layout.cuts, *owners) for r in cut.ranks if not 0 <= r < world_size]
        if outside:
            raise SyncError(f"the layout of {name} has ranks {outside}, but the job has ranks 0 to {world_size - 1}.")
    for name, shard in shards.items():
        by_layout = f"by its layout rank {rank} holds {list(shard.shape)} of {name}, but "
        if name not in parameters:
            raise SyncError(f"{by_layout}it was given no such parameter.")
        held = local_tensor(parameters[name])
        if tuple(held.shape) != shard.shape:
            raise SyncError(f"{by_layout}its parameter is {list(held.shape)}.")
        if not parameters[name].requires_grad:
            raise SyncError(f"{name} takes no gradient on rank {rank}. Leave frozen parameters out of the layouts.")
        if shard.is_flat and not held.is_contiguous():
            raise SyncError(f"{by_layout}these elements do not lie end to end: the tensor must be contiguous.")
