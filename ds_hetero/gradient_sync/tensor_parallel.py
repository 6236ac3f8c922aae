"""Layouts of models that torch's tensor parallelism has cut, read off their DTensors."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor, Replicate, Shard

from ds_hetero.errors import SyncError
from ds_hetero.gradient_sync.parameter_cuts import Cut, ParameterLayout
from ds_hetero.runtime.collectives import all_gather_bytes

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
    Collectives: two all_gathers.

    Raises:
        SyncError: on every rank, for a mesh of several dimensions, a partial sum as a parameter, a parameter that is
            missing in a replica, or shapes that differ between replicas.
    """
    group = group or dist.group.WORLD
    assert group is not None, "torch.distributed is not initialized"
    told = {
        "replica": sorted(replica),
        "held": {name: _describe(parameter) for name, parameter in parameters.items() if parameter.requires_grad},
    }
    _, texts = all_gather_bytes([], json.dumps(told).encode(), group)
    ranks = dist.get_process_group_ranks(group)
    everybody = dict(zip(ranks, map(json.loads, texts), strict=True))
    replicas = sorted({tuple(told["replica"]) for told in everybody.values()})
    misplaced = [rank for rank, told in everybody.items() if rank not in told["replica"]]
    if misplaced or sorted(rank for members in replicas for rank in members) != sorted(ranks):
        raise SyncError(f"every rank belongs to one replica and names all its ranks, got replicas {replicas}.")
    names = dict.fromkeys(name for told in everybody.values() for name in told["held"])
    return {
        name: _layout(name, replicas, {r: told["held"].get(name) for r, told in everybody.items()}) for name in names
    }


def _describe(parameter: nn.Parameter) -> dict[str, Any]:
    """Shape of the whole; for a shard its dimension, its place among the shards and its size."""
    described: dict[str, Any] = {"shape": list(parameter.shape)}
    if not isinstance(parameter, DTensor):
        return described
    coordinate = parameter.device_mesh.get_coordinate()
    match parameter.placements, coordinate:
        case (Replicate(),), _:
            return described
        case (Shard(dim=dim),), [place] if type(parameter.placements[0]) is Shard:
            return described | {"dim": dim, "place": place, "size": parameter.to_local().shape[dim]}
    return described | {"problem": f"placements {parameter.placements} on {parameter.device_mesh}"}


def _layout(
    name: str, replicas: Sequence[tuple[int, ...]], held: Mapping[int, dict[str, Any] | None]
) -> ParameterLayout:
    described = {rank: what for rank, what in held.items() if what is not None}
    for rank, what in described.items():
        if "problem" in what:
            raise SyncError(
                f"{name} has {what['problem']} on rank {rank}. Parameters sharded or replicated on a mesh of one "
                "dimension can be read; write a ParameterLayout for others."
            )
    shapes = {tuple(what["shape"]) for what in described.values()}
    if len(shapes) > 1:
        raise SyncError(f"{name} has different shapes on different ranks: {sorted(shapes)}.")
    (shape,) = shapes
    cuts = []
    for members in replicas:
        holders = [rank for rank in members if rank in described]
        dims = {described[rank].get("dim") for rank in holders}
        if len(dims) != 1:
            how = f"is cut in different ways, {dims}" if dims else "is missing"
            raise SyncError(f"{name} {how} on ranks {members}, which are one replica.")
        (dim,) = dims
        if dim is None:
            cuts.append(Cut.whole(shape, *holders))
        else:
            holders.sort(key=lambda rank: described[rank]["place"])
            cuts.append(Cut.along(dim, holders, [described[rank]["size"] for rank in holders]))
    return ParameterLayout(shape, tuple(cuts))
