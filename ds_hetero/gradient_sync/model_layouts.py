"""Layouts of models that are cut over ranks, read off their parameters: DTensors, copies, and stages of pipelines."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

import torch.distributed as dist
from torch import nn
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor, Replicate, Shard

from ds_hetero.errors import SyncError
from ds_hetero.runtime.collectives import on_all_ranks
from ds_hetero.runtime.peers.board import default_group
from ds_hetero.sharding.parameter_layouts import Cut, ParameterLayout
from ds_hetero.values.plans import Plan


def tensor_parallel_layouts(
    parameters: Mapping[str, nn.Parameter], replica: Sequence[int], group: ProcessGroup | None = None
) -> dict[str, ParameterLayout]:
    """Return the shard of every parameter with a gradient on every rank, where each replica has a mesh of its own.

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
    held_by_rank = _held_by_rank(parameters, replica, group)
    replicas = sorted({held.replica for held in held_by_rank.values()})
    is_misplaced = any(rank not in held.replica for rank, held in held_by_rank.items())
    ranks_of_replicas = sorted(rank for ranks in replicas for rank in ranks)
    if is_misplaced or ranks_of_replicas != sorted(held_by_rank):
        raise SyncError(f"every rank belongs to one replica and names all its ranks, got replicas {replicas}.")
    names = dict.fromkeys(name for held in held_by_rank.values() for name in held.parts)
    return {name: _layout(name, replicas, _parts_by_rank(name, held_by_rank)) for name in names}


def pipeline_layouts(
    parameters: Mapping[str, nn.Parameter],
    plan: Plan,
    group: ProcessGroup | None = None,
    *,
    partial: Collection[str] = (),
) -> dict[str, ParameterLayout]:
    """Return the shard of every parameter with a gradient on every rank, where ranks are stages of pipelines.

    Every stage that holds a parameter is a summand of its gradient: one stage of each pipeline, and for an embedding
    that is tied to the head, two. Copies in a ``"tensor"`` stage have equal gradients; in a ``"sequence"`` stage they
    are parts of a sum, by tokens.

    Args:
        parameters: of this rank, by the names of the whole model; a tied parameter under one name in every stage.
        group: all ranks of the job; None for the default group.
        partial: of this rank's parameters, those whose copies in a ``"tensor"`` stage have parts of a sum too.

    Returns:
        By name, in the order of the first pipeline's stages and of their parameters; the same on every rank.

    Caller: every rank of ``group``.
    Collectives: one `on_all_ranks`.

    Raises:
        SyncError: on every rank, as `tensor_parallel_layouts`, or when a pipeline lacks a parameter that another has.
    """
    held_by_rank = _held_by_rank(parameters, (), group, partial)
    stages = [stage for pipeline in plan.pipelines for stage in pipeline.stages]
    names: dict[str, None] = {}  # in the order of stages
    for stage in stages:
        for rank in stage.ranks:
            names.update(dict.fromkeys(held_by_rank[rank].parts))
    layouts = {}
    for name in names:
        parts = _parts_by_rank(name, held_by_rank)
        _expect_in_all_pipelines(name, plan, parts)
        summands = []  # ranks of a stage that holds it, and whether their copies have parts of a sum
        for stage in stages:
            if any(rank in parts for rank in stage.ranks):
                has_partial_copies = stage.inner == "sequence" or parts[stage.ranks[0]].is_partial
                summands.append((stage.ranks, has_partial_copies))
        layouts[name] = _layout_of_cuts(name, summands, parts)
    return layouts


def _expect_in_all_pipelines(name: str, plan: Plan, parts: Mapping[int, _HeldPart]) -> None:
    """Refuse a parameter that a pipeline lacks. Raises `SyncError`."""
    holding = []
    for number, pipeline in enumerate(plan.pipelines):
        if any(rank in parts for stage in pipeline.stages for rank in stage.ranks):
            holding.append(number)
    if len(holding) != len(plan.pipelines):
        raise SyncError(f"{name} takes a gradient in pipelines {holding} only.")


def _held_by_rank(
    parameters: Mapping[str, nn.Parameter],
    replica: Sequence[int],
    group: ProcessGroup | None,
    partial: Collection[str] = (),
) -> dict[int, _Held]:
    """Return what every rank of ``group`` holds, by global rank.

    Caller: every rank of ``group``.
    Collectives: one `on_all_ranks`.
    """
    group = default_group() if group is None else group

    def describe() -> _Held:
        parts = {}
        for name, parameter in parameters.items():
            if parameter.requires_grad:
                parts[name] = _held_part(name, parameter)._replace(is_partial=name in partial)
        return _Held(tuple(sorted(replica)), parts)

    return dict(zip(dist.get_process_group_ranks(group), on_all_ranks(describe, group), strict=True))


class _HeldPart(NamedTuple):
    """Part of a parameter on one rank."""

    shape: tuple[int, ...]  # of the whole parameter
    dim: int | None = None  # the dimension that is cut; None where the rank holds all of it
    place: int = 0  # of the rank's shard among the shards
    size: int = 0  # of the rank's shard along ``dim``
    is_partial: bool = False  # gradients of copies are parts of a sum


class _Held(NamedTuple):
    """Parameters with a gradient on one rank."""

    replica: tuple[int, ...]  # ranks of its replica, ascending; empty in a job of pipelines
    parts: dict[str, _HeldPart]  # by name


def _parts_by_rank(name: str, held_by_rank: Mapping[int, _Held]) -> dict[int, _HeldPart]:
    """Return the parts of one parameter by rank; ranks that hold nothing of it are left out."""
    return {rank: held.parts[name] for rank, held in held_by_rank.items() if name in held.parts}


def _held_part(name: str, parameter: nn.Parameter) -> _HeldPart:
    """Describe this rank's part of a parameter. Raises `SyncError`: it is on a mesh of several dimensions."""
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
    """Make the layout of one parameter. Raises `SyncError`: ranks disagree on its shape or cut, or a replica lacks it.

    Args:
        parts: by rank; ranks that hold nothing are left out.
    """
    missing = [members for members in replicas if not any(rank in parts for rank in members)]
    if missing:
        raise SyncError(f"{name} is missing on ranks {missing[0]}, which are one replica.")
    return _layout_of_cuts(name, [(members, False) for members in replicas], parts)


def _layout_of_cuts(
    name: str, members_of_cuts: Sequence[tuple[Sequence[int], bool]], parts: Mapping[int, _HeldPart]
) -> ParameterLayout:
    """Make a layout with one cut for each set of ranks.

    Args:
        members_of_cuts: ranks that hold the parameter once together, and whether the gradients of copies among them are
            parts of a sum.
        parts: by rank; ranks that hold nothing are left out.

    Raises:
        SyncError: the ranks disagree on the shape or the cut.
    """
    shapes = {part.shape for part in parts.values()}
    if len(shapes) > 1:
        raise SyncError(f"{name} has different shapes on different ranks: {sorted(shapes)}.")
    (shape,) = shapes
    cuts = []
    for members, partial in members_of_cuts:
        holders = [rank for rank in members if rank in parts]
        dims = {parts[rank].dim for rank in holders}
        if len(dims) != 1:
            raise SyncError(f"{name} is cut in different ways, {dims}, on ranks {members}.")
        (dim,) = dims
        if dim is None:
            cuts.append(Cut.whole(shape, *holders, partial=partial))
        else:
            holders.sort(key=lambda rank: parts[rank].place)
            cuts.append(Cut.along(dim, holders, [parts[rank].size for rank in holders]))
    return ParameterLayout(shape, tuple(cuts))
