"""Layouts of models that torch's tensor parallelism has cut, read off their DTensors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch.distributed as dist
from torch import nn
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor, Replicate, Shard

from ds_hetero.errors import SyncError
from ds_hetero.gradient_sync.parameter_cuts import Cut, ParameterLayout
from ds_hetero.runtime.collectives import on_all_ranks

__all__ = ["tensor_parallel_layouts"]


def tensor_parallel_layouts(
    parameters: Mapping[str, nn.Parameter], replica: Sequence[int], group: ProcessGroup | None = None
) -> dict[str, ParameterLayout]:
    """What every rank holds of every parameter that takes a gradient, where each replica has a mesh of its own.

        parallelize_module(model, DeviceMesh("cuda", replica), plan)
        layouts = tensor_parallel_layouts(dict(model.named_parameters()), replica)

    A DTensor on a mesh of one dimension is cut along its sharded dimension, evenly or not, or copied; any other
    parameter is whole on every rank of the replica that has it. Copies are taken to have equal gradients, as they have
    under torch's tensor parallelism.

    Args:
        parameters: of this rank, by the names that other replicas use too.
        replica: global ranks of this rank's replica; several replicas may have different numbers of ranks.
        group: all ranks of the job; None for the default group.

    Returns:
        By name, in the order of the parameters; the same on every rank.

    Caller: every rank of ``group``.
    Collectives: one `on_all_ranks`.

    Raises:
        SyncError: on every rank, for a mesh of several dimensions, a partial sum as a parameter, a parameter that is
            missing in a replica, or shapes that differ between replicas.
    """
    group = group or dist.group.WORLD
    assert group is not None, "torch.distributed is not initialized"

    def describe() -> tuple[tuple[int, ...], dict[str, _HeldPart]]:
        trained = {name: parameter for name, parameter in parameters.items() if parameter.requires_grad}
        return tuple(sorted(replica)), {name: _held_part(name, parameter) for name, parameter in trained.items()}

    by_rank = dict(zip(dist.get_process_group_ranks(group), on_all_ranks(describe, group), strict=True))
    replicas = sorted({members for members, _ in by_rank.values()})
    misplaced = [rank for rank, (members, _) in by_rank.items() if rank not in members]
    if misplaced or sorted(rank for members in replicas for rank in members) != sorted(by_rank):
        raise SyncError(f"every rank belongs to one replica and names all its ranks, got replicas {replicas}.")
    names = dict.fromkeys(name for _, parts in by_rank.values() for name in parts)
    return {
        name: _layout(name, replicas, {rank: parts[name] for rank, (_, parts) in by_rank.items() if name in parts})
        for name in names
    }


class _HeldPart(NamedTuple):
    """What a rank holds of a parameter.

    Args:
        shape: of the whole parameter.
        dim: the dimension that is cut; None where the rank holds all of it.
        place: of the rank's shard among the shards.
        size: of the rank's shard, in units of ``dim``.
    """

    shape: tuple[int, ...]
    dim: int | None = None
    place: int = 0
    size: int = 0


def _held_part(name: str, parameter: nn.Parameter) -> _HeldPart:
    shape = tuple(parameter.shape)
    if not isinstance(parameter, DTensor):
        return _HeldPart(shape)
    match parameter.placements, parameter.device_mesh.get_coordinate():
        case (Replicate(),), _:
            return _HeldPart(shape)
        case (Shard(dim=dim),), [place] if type(parameter.placements[0]) is Shard:
            return _HeldPart(shape, dim, place, parameter.to_local().shape[dim])
    raise SyncError(
        f"{name} has placements {parameter.placements} on {parameter.device_mesh}. Parameters sharded or replicated on "
        "a mesh of one dimension can be read; write a ParameterLayout for others."
    )


def _layout(name: str, replicas: Sequence[tuple[int, ...]], parts: Mapping[int, _HeldPart]) -> ParameterLayout:
    """Make the layout of one parameter of what each rank holds of it.

    Args:
        name: of the parameter.
        replicas: ranks of every replica.
        parts: by rank; ranks that hold nothing are left out.

    Raises:
        SyncError: replicas disagree on the shape, or ranks of one replica on the cut.
    """
    shapes = {part.shape for part in parts.values()}
    if len(shapes) > 1:
        raise SyncError(f"{name} has different shapes on different ranks: {sorted(shapes)}.")
    (shape,) = shapes
    cuts = []
    for members in replicas:
        holders = [rank for rank in members if rank in parts]
        dims = {parts[rank].dim for rank in holders}
        if len(dims) != 1:
            how = f"is cut in different ways, {dims}" if dims else "is missing"
            raise SyncError(f"{name} {how} on ranks {members}, which are one replica.")
        (dim,) = dims
        if dim is None:
            cuts.append(Cut.whole(shape, *holders))
        else:
            holders.sort(key=lambda rank: parts[rank].place)
            cuts.append(Cut.along(dim, holders, [parts[rank].size for rank in holders]))
    return ParameterLayout(shape, tuple(cuts))
