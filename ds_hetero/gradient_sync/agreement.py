"""Compare the arguments of `AsymmetricGradientSync` between ranks, before the first collective depends on them.

Layouts and settings have to be the same on every rank. A rank's parameters have to have the names and shapes that the
layouts give the rank, and a parameter has to have the same dtype on every rank. One exchange compares all of this, and
on a difference every rank raises the same error.
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
    """Return the ranks of every replica, ascending: replica i has the ranks of the i-th cut of every layout.

    Raises:
        SyncError: layouts have different numbers of cuts, or a rank is in two replicas.
    """
    counts = {len(layout.cuts) for layout in layouts.values()}
    if len(counts) != 1:
        raise SyncError(
            f"every layout needs one cut for every replica, but layouts have {sorted(counts)} cuts. Where a parameter "
            "has another number of cuts than there are replicas, give the ranks of every replica as replicas=."
        )
    replica_of: dict[int, int] = {}
    for name, layout in layouts.items():
        for replica, cut in enumerate(layout.cuts):
            for rank in cut.ranks:
                if replica_of.setdefault(rank, replica) != replica:
                    raise SyncError(
                        f"rank {rank} is in replica {replica_of[rank]}, but the layout of {name} has it in {replica}. "
                        "List the cuts of every layout in the same order of replicas."
                    )
    ranks_of_replicas: list[list[int]] = [[] for _ in range(counts.pop())]
    for rank in sorted(replica_of):
        ranks_of_replicas[replica_of[rank]].append(rank)
    return tuple(map(tuple, ranks_of_replicas))


def compare_arguments(
    parameters: Mapping[str, nn.Parameter],
    shards: Mapping[str, Shard],
    layouts: Mapping[str, ParameterLayout],
    settings: object,
    group: ProcessGroup,
    *,
    has_replicas: bool = False,
) -> dict[str, torch.dtype]:
    """Compare layouts, settings and dtypes between ranks; return the dtype of every parameter, by name.

    Args:
        parameters: parameters of this rank, by name.
        shards: shards that this rank holds by the layouts.
        layouts: layouts of all parameters.
        settings: other values that must be the same on every rank; they are compared by their ``repr``.
        has_replicas: whether the caller gave the replicas, so that layouts need not have one cut for each replica.

    Caller: every rank of ``group``.
    Collectives: one `on_all_ranks`.

    Raises:
        SyncError: on every rank, if an argument differs between ranks, or a rank's parameters contradict the layouts.
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
                raise SyncError(
                    f"{name} is {dtype} on rank {rank}, but {dtypes[name]} on a lower rank. Give it the same dtype on "
                    "every rank."
                )
    return dtypes


def _expect_valid(
    parameters: Mapping[str, nn.Parameter],
    shards: Mapping[str, Shard],
    layouts: Mapping[str, ParameterLayout],
    rank: int,
    world_size: int,
) -> None:
    """Raise `SyncError` if layouts name ranks that do not exist, or contradict this rank's parameters."""
    for name, layout in layouts.items():
        owners = [] if layout.owners is None else [layout.owners]
        outside = [r for cut in (*layout.cuts, *owners) for r in cut.ranks if not 0 <= r < world_size]
        if outside:
            raise SyncError(f"the layout of {name} has ranks {outside}, but the job has ranks 0 to {world_size - 1}.")
    for name, shard in shards.items():
        by_layout = f"by its layout rank {rank} holds a shard of shape {list(shard.shape)} of {name}, but "
        if name not in parameters:
            raise SyncError(f"{by_layout}`parameters` has no such parameter. Pass it there.")
        local_shard = local_tensor(parameters[name])
        if tuple(local_shard.shape) != shard.shape:
            raise SyncError(f"{by_layout}its parameter has shape {list(local_shard.shape)}.")
        if not parameters[name].requires_grad:
            raise SyncError(f"{name} takes no gradient on rank {rank}. Leave frozen parameters out of the layouts.")
        if shard.is_flat and not local_shard.is_contiguous():
            raise SyncError(f"{by_layout}its tensor is not contiguous. Give a contiguous one.")
