"""Read the layouts of a model's parameters from the parameters themselves: DTensors, copies, and pipeline stages.

Every rank sends a description of its parameters to all others, so that all ranks make equal `ParameterLayout`s.
"""

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
    """Return the layout of every parameter with a gradient, for replicas that each have a tensor-parallel mesh.

        parallelize_module(model, DeviceMesh("cuda", replica), plan)
        layouts = tensor_parallel_layouts(dict(model.named_parameters()), replica)

    A DTensor on a mesh of one dimension is cut along its sharded dimension, evenly or not, or replicated. Of any other
    parameter, each rank that has it has a full copy. Copies are assumed to have equal gradients, as under torch's
    tensor parallelism.

    Args:
        parameters: of this rank, by name; all replicas use the same names.
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
    parameters_by_rank = _parameters_by_rank(parameters, replica, group)
    replicas = sorted({held.replica for held in parameters_by_rank.values()})
    is_misplaced = any(rank not in held.replica for rank, held in parameters_by_rank.items())
    ranks_of_replicas = sorted(rank for ranks in replicas for rank in ranks)
    if is_misplaced or ranks_of_replicas != sorted(parameters_by_rank):
        raise SyncError(
            f"the ranks gave the replicas {replicas}. Give each rank the list of all ranks of its own replica; every "
            "rank belongs to one replica."
        )
    names = dict.fromkeys(name for held in parameters_by_rank.values() for name in held.parts)
    return {name: _layout(name, replicas, _parts_by_rank(name, parameters_by_rank)) for name in names}


def pipeline_layouts(
    parameters: Mapping[str, nn.Parameter],
    plan: Plan,
    group: ProcessGroup | None = None,
    *,
    partial: Collection[str] = (),
) -> dict[str, ParameterLayout]:
    """Return the layout of every parameter with a gradient, for ranks that are stages of pipelines.

    A parameter's gradient is the sum over all stages that hold it: one stage of each pipeline, or two for an embedding
    that is tied to the head. In a stage, it is the sum over the ranks that hold different tokens: of a ``"sequence"``
    stage all ranks, or one summand for each tensor group. The gradients of copies on ranks with the same tokens are
    equal.

    Args:
        parameters: of this rank, by the names of the whole model; a tied parameter under one name in every stage.
        group: all ranks of the job; None for the default group.
        partial: names of this rank's parameters whose gradients are added up over ranks with the same tokens, too.

    Returns:
        By name, in the order of the first pipeline's stages and of their parameters; the same on every rank.

    Caller: every rank of ``group``.
    Collectives: one `on_all_ranks`.

    Raises:
        SyncError: on every rank, as `tensor_parallel_layouts`, or when a pipeline lacks a parameter that another has.
    """
    parameters_by_rank = _parameters_by_rank(parameters, (), group, partial)
    stages = [stage for pipeline in plan.pipelines for stage in pipeline.stages]
    names: dict[str, None] = {}  # in the order of stages
    for stage in stages:
        for rank in stage.ranks:
            names.update(dict.fromkeys(parameters_by_rank[rank].parts))
    layouts = {}
    for name in names:
        parts = _parts_by_rank(name, parameters_by_rank)
        _expect_in_all_pipelines(name, plan, parts)
        summands = []
        for stage in stages:
            if not any(rank in parts for rank in stage.ranks):
                continue
            if stage.inner == "sequence" and not stage.is_tensor_parallel:
                summands.append(_Summand(stage.ranks, has_partial_copies=True))
                continue
            for holders in stage.token_holders:
                summands.append(_Summand(holders, has_partial_copies=parts[holders[0]].is_partial))
        layouts[name] = _layout_of_cuts(name, summands, parts)
    return layouts


def _expect_in_all_pipelines(name: str, plan: Plan, parts: Mapping[int, _LocalPart]) -> None:
    """Check that every pipeline holds a parameter. Raises `SyncError`: one lacks it."""
    holding = []
    for number, pipeline in enumerate(plan.pipelines):
        if any(rank in parts for stage in pipeline.stages for rank in stage.ranks):
            holding.append(number)
    if len(holding) != len(plan.pipelines):
        raise SyncError(
            f"{name} takes a gradient in pipelines {holding} only, but the plan has {len(plan.pipelines)} pipelines. "
            "Train or freeze it in all of them."
        )


def _parameters_by_rank(
    parameters: Mapping[str, nn.Parameter],
    replica: Sequence[int],
    group: ProcessGroup | None,
    partial: Collection[str] = (),
) -> dict[int, _RankParameters]:
    """Gather the descriptions of every rank's parameters; return them by global rank.

    Args:
        partial: names of parameters whose gradients are added up over copies.

    Caller: every rank of ``group``.
    Collectives: one `on_all_ranks`.
    """
    group = default_group() if group is None else group

    def describe() -> _RankParameters:
        parts = {}
        for name, parameter in parameters.items():
            if parameter.requires_grad:
                parts[name] = _local_part(name, parameter)._replace(is_partial=name in partial)
        return _RankParameters(tuple(sorted(replica)), parts)

    return dict(zip(dist.get_process_group_ranks(group), on_all_ranks(describe, group), strict=True))


class _LocalPart(NamedTuple):
    """The part of a parameter that one rank holds."""

    shape: tuple[int, ...]  # of the full parameter
    dim: int | None = None  # the dimension that is cut; None if the rank holds the full parameter
    shard_index: int = 0  # number of the rank's shard along ``dim``
    size: int = 0  # length of the rank's shard along ``dim``
    is_partial: bool = False  # whether the gradients of copies are parts of a sum


class _Summand(NamedTuple):
    """Ranks whose gradients are one summand of a parameter's gradient: a replica, or a stage of a pipeline."""

    ranks: Sequence[int]
    has_partial_copies: bool  # whether the gradients of these ranks' copies are parts of a sum


class _RankParameters(NamedTuple):
    """The parameters with a gradient that one rank holds."""

    replica: tuple[int, ...]  # ranks of its replica, ascending; empty in a job of pipelines
    parts: dict[str, _LocalPart]  # by name


def _parts_by_rank(name: str, parameters_by_rank: Mapping[int, _RankParameters]) -> dict[int, _LocalPart]:
    """Return the part that each rank holds of the parameter ``name``, by rank; ranks that hold nothing are left out."""
    return {rank: held.parts[name] for rank, held in parameters_by_rank.items() if name in held.parts}


def _local_part(name: str, parameter: nn.Parameter) -> _LocalPart:
    """Describe this rank's part of a parameter. Raises `SyncError`: it is on a mesh of several dimensions."""
    shape = tuple(parameter.shape)
    if not isinstance(parameter, DTensor):
        return _LocalPart(shape)
    match parameter.placements, parameter.device_mesh.get_coordinate():
        case (Replicate(),), _:
            return _LocalPart(shape)
        case (Shard(dim=dim),), [index] if type(parameter.placements[0]) is Shard:  # not one of its subclasses
            return _LocalPart(shape, dim, index, parameter.to_local().shape[dim])
    raise SyncError(
        f"{name} has placements {parameter.placements} on {parameter.device_mesh}. Layouts can be read only from "
        "parameters that are sharded or replicated on a mesh of one dimension. Write a ParameterLayout for this one."
    )


def _layout(name: str, replicas: Sequence[tuple[int, ...]], parts: Mapping[int, _LocalPart]) -> ParameterLayout:
    """Make the layout of a parameter with one cut for each replica.

    Args:
        parts: the parameter's parts by rank, without ranks that hold nothing.

    Raises:
        SyncError: a replica lacks the parameter, or ranks disagree on its shape or cut.
    """
    missing = [ranks for ranks in replicas if not any(rank in parts for rank in ranks)]
    if missing:
        raise SyncError(
            f"{name} is missing on ranks {missing[0]}, which are one replica. Train or freeze it in every replica."
        )
    return _layout_of_cuts(name, [_Summand(ranks, has_partial_copies=False) for ranks in replicas], parts)


def _layout_of_cuts(name: str, summands: Sequence[_Summand], parts: Mapping[int, _LocalPart]) -> ParameterLayout:
    """Make the layout of a parameter with one cut for each summand of its gradient.

    Args:
        parts: the parameter's parts by rank, without ranks that hold nothing.

    Raises:
        SyncError: the ranks disagree on the shape or the cut.
    """
    shapes = {part.shape for part in parts.values()}
    if len(shapes) > 1:
        raise SyncError(
            f"{name} has different shapes on different ranks: {sorted(shapes)}. Build the same model on every rank."
        )
    (shape,) = shapes
    cuts = []
    for ranks, has_partial_copies in summands:
        holders = [rank for rank in ranks if rank in parts]
        dims = {parts[rank].dim for rank in holders}
        if len(dims) != 1:
            raise SyncError(
                f"ranks {ranks} cut {name} along different dimensions, {dims} (None: not cut). Give them one mesh, and "
                "one placement of this parameter."
            )
        (dim,) = dims
        if dim is None:
            cuts.append(Cut.whole(shape, *holders, partial=has_partial_copies))
        else:
            holders.sort(key=lambda rank: parts[rank].shard_index)
            cuts.append(Cut.along(dim, holders, [parts[rank].size for rank in holders]))
    return ParameterLayout(shape, tuple(cuts))
