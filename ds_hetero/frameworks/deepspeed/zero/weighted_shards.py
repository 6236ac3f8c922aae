"""Exchange the equal shards of ZeRO-3 parameters for shards in proportion to weights.

DeepSpeed cuts every parameter into equal shards: in ``deepspeed.zero.Init``, in transformers' ``from_pretrained``, or
when the engine gets a plain model. `recut` exchanges these shards for weighted ones, and stores the cut in attributes
of the parameter, which `parameter_cut` reads. DeepSpeed itself handles parameters without a weighted cut, also if one
call has parameters of both kinds.

Dimension key: n elements of a parameter, s elements of this rank's shard; cut.total >= n, see `cut_parameter`.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from deepspeed import comm as dist
from deepspeed.accelerator import get_accelerator
from torch import Tensor
from torch.distributed import ProcessGroup

from ds_hetero.errors import ConfigError
from ds_hetero.frameworks.deepspeed.protocols import ZeroParameter
from ds_hetero.frameworks.deepspeed.zero.nodes import Nodes
from ds_hetero.frameworks.deepspeed.zero.parameter_cut import CUT_ATTRIBUTE, OWNERS_ATTRIBUTE, cut_of, owning_group
from ds_hetero.frameworks.deepspeed.zero.weighted_gathering import gather_weighted
from ds_hetero.sharding.zero_partition import FlatGroup, Move, cut_parameter, repartition_moves
from ds_hetero.values.splits import Split


def recut(
    params: Iterable[ZeroParameter], weights: Sequence[float], nodes: Nodes | None = None, *, one_by_one: bool = False
) -> None:
    """Exchange DeepSpeed's shards of ``params`` for shards in proportion to ``weights``.

    Caller: every rank, with the same parameters in the same order, none of them gathered.
    Collectives: one all-gather per parameter; no more than one parameter is gathered at a time.

    Args:
        weights: positive numbers, one per rank.
        nodes: nodes that each own all parameters; None if all ranks own them together.
        one_by_one: whether later gathers take one parameter at a time (``stage3_allgather_sequential``).

    Raises:
        ConfigError: a parameter is partitioned over some ranks only, as those of experts are.
    """
    for param in params:
        num_ranks = dist.get_world_size(group=param.ds_process_group)
        if num_ranks != len(weights):
            raise ConfigError(
                f'"zero_partition" has {len(weights)} weights, but a parameter of shape {tuple(param.ds_shape)} is '
                f'partitioned over {num_ranks} ranks, as experts are. Set "zero_partition": "uniform".'
            )
        param.all_gather()
        equal_shard = param.ds_tensor
        setattr(param, CUT_ATTRIBUTE, cut_parameter(param.ds_numel, weights if nodes is None else nodes.own_weights))
        setattr(param, OWNERS_ATTRIBUTE, param.ds_process_group if nodes is None else nodes.group)
        shard: Any = shard_of(param, param.data.detach()).to(equal_shard.device, copy=True)
        if get_accelerator().is_pinned(equal_shard):
            shard = get_accelerator().pin_memory(shard)
        shard.ds_numel = shard.numel()
        shard.status, shard.final_location = equal_shard.status, equal_shard.final_location
        param.ds_tensor = shard
        param.ds_numel_aligned = cut_of(param).total
        param.partition_numel = functools.partial(_shard_size, param)
        param.all_gather_coalesced = functools.partial(gather_weighted, one_by_one=one_by_one)
        param.partition()


class _ShardSize(int):
    """Number of elements of a shard, which is 0 when DeepSpeed multiplies it by the rank to find the shard's start.

    DeepSpeed multiplies in one place only: it skips the gradient of a shard that starts beyond the parameter's end, and
    so is only padding. With weighted shards the product is no start. With 0, DeepSpeed skips no shard, and copies the
    zeros of one that is only padding.
    """

    def __mul__(self, rank: int) -> int:
        return 0


def _shard_size(param: ZeroParameter) -> int:
    """Replace ``partition_numel`` of a parameter: return the number of elements of this rank's shard."""
    return _ShardSize(param.ds_tensor.ds_numel)


def shard_of(param: ZeroParameter, full: Tensor) -> Tensor:
    """Return this rank's shard of a tensor with a value for every element of a parameter: [n] -> [s]."""
    return own_shard(full, cut_of(param), owning_group(param))


def own_shard(full: Tensor, cut: Split, group: ProcessGroup) -> Tensor:
    """Return this rank's part, [s], of a tensor of n elements under a cut, with zeros where the cut goes beyond n."""
    start, stop = cut.ranges[dist.get_rank(group=group)]
    flat = full.reshape(-1)[start:stop]
    num_padding = stop - start - flat.numel()
    return torch.cat([flat, flat.new_zeros(num_padding)]) if num_padding else flat


def parameter_moves(numel: int, source: Split, target: Split, part: int) -> tuple[Move, ...]:
    """Return the copies that fill one part of a new cut of a parameter from the parts of its old cut.

    Example: 10 elements, ``source`` of 5 and 5, ``target`` of 8 and 2. Part 0 is filled by 5 elements of source part 0
    and 3 elements of source part 1.

    Args:
        numel: elements of the parameter.
        source: the old cut.
        target: the new cut.
        part: number of the part of ``target``.
    """
    before = FlatGroup(starts=(0,), sizes=(numel,), cut=source)
    after = FlatGroup(starts=(0,), sizes=(numel,), cut=target)
    return repartition_moves(before, after, part)
