"""Parameters of ZeRO-3 in shards of unequal size: exchanged for DeepSpeed's shards of one size.

DeepSpeed cuts every parameter into shards of one size, and this is left so wherever a parameter is made: by
``deepspeed.zero.Init``, by transformers' ``from_pretrained``, or when the engine takes a plain model over. `recut`
then exchanges the shards for weighted ones and gives every parameter its cut, on which everything else depends;
parameters without one stay DeepSpeed's, also in one call with others.

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
from ds_hetero.sharding.zero_partition import FlatGroup, Move, cut_parameter, moves
from ds_hetero.values.splits import Split


def recut(
    params: Iterable[ZeroParameter], weights: Sequence[float], nodes: Nodes | None = None, *, one_by_one: bool = False
) -> None:
    """Exchange DeepSpeed's shards of ``params`` for shards in proportion to ``weights``.

    Caller: every rank, with the same parameters in the same order, none of them gathered.
    Collectives: one all-gather per parameter; no more than one is whole at a time.

    Args:
        weights: positive, one per rank.
        nodes: each of which is to own all parameters.
        one_by_one: have later gathers take one parameter at a time (``stage3_allgather_sequential``).

    Raises:
        ConfigError: a parameter that is partitioned over other ranks than all, as experts are.
    """
    for param in params:
        num_ranks = dist.get_world_size(group=param.ds_process_group)
        if num_ranks != len(weights):
            raise ConfigError(
                f'"zero_partition" has {len(weights)} weights, but a parameter of shape {tuple(param.ds_shape)} is '
                f'partitioned over {num_ranks} ranks, as experts are. Set "zero_partition": "uniform".'
            )
        param.all_gather()
        equal = param.ds_tensor
        setattr(param, CUT_ATTRIBUTE, cut_parameter(param.ds_numel, weights if nodes is None else nodes.own_weights))
        setattr(param, OWNERS_ATTRIBUTE, param.ds_process_group if nodes is None else nodes.group)
        shard: Any = shard_of(param, param.data.detach()).to(equal.device, copy=True)
        if get_accelerator().is_pinned(equal):
            shard = get_accelerator().pin_memory(shard)
        shard.ds_numel = shard.numel()
        shard.status, shard.final_location = equal.status, equal.final_location
        param.ds_tensor = shard
        param.ds_numel_aligned = cut_of(param).total
        param.partition_numel = functools.partial(_shard_size, param)
        param.all_gather_coalesced = functools.partial(gather_weighted, one_by_one=one_by_one)
        param.partition()


class _ShardSize(int):
    """Elements of a shard, also in the one place where DeepSpeed multiplies them by the rank to find the shard's start.

    It skips the gradients of shards that are padding alone; with start 0 those are zeros that are copied.
    """

    def __mul__(self, rank: int) -> int:
        return 0


def _shard_size(param: ZeroParameter) -> int:
    """Return elements of this rank's shard, in the place of ``partition_numel``; see `_ShardSize`."""
    return _ShardSize(param.ds_tensor.ds_numel)


def shard_of(param: ZeroParameter, full: Tensor) -> Tensor:
    """Return this rank's shard of a value for every element of a parameter: [n] -> [s]."""
    return own_shard(full, cut_of(param), owning_group(param))


def own_shard(full: Tensor, cut: Split, group: ProcessGroup) -> Tensor:
    """Return this rank's shard of a full tensor of n elements: [s], with zeros where the cut goes beyond n."""
    start, stop = cut.ranges[dist.get_rank(group=group)]
    flat = full.reshape(-1)[start:stop]
    return flat if flat.numel() == stop - start else torch.cat([flat, flat.new_zeros(stop - start - flat.numel())])


def parameter_moves(numel: int, source: Split, target: Split, part: int) -> tuple[Move, ...]:
    """Return how to put ``part`` of the cut ``target`` of a parameter together from parts of the cut ``source``."""
    before, after = (FlatGroup(starts=(0,), sizes=(numel,), cut=cut) for cut in (source, target))
    return moves(before, after, part)
