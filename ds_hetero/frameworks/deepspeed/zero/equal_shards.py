"""Shards of unequal size exchanged for shards of one size, as checkpoints have them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from deepspeed import comm as dist
from torch import Tensor

from ds_hetero.errors import CheckpointError
from ds_hetero.frameworks.deepspeed.protocols import ZeroParameter
from ds_hetero.frameworks.deepspeed.zero.nodes import chunks, start_exchange, write
from ds_hetero.frameworks.deepspeed.zero.parameter_cut import cut_of, owning_group
from ds_hetero.frameworks.deepspeed.zero.weighted_shards import parameter_moves
from ds_hetero.sharding.zero_partition import cut_as_deepspeed


def equal_shards(flat: Tensor, params: Sequence[ZeroParameter], name: str = "weights") -> Tensor:
    """Exchange weighted shards of parameters, lying side by side, for shards of one size, on the CPU.

        flat     [sum of s]
        result   [sum of ceil(n / ranks)], the ends padded with zeros

    Caller: every rank, with the same parameters.
    Collectives: one all_to_all_single for each of `chunks`; of copies in every node, inside the node.

    Raises:
        CheckpointError: ``flat`` is no such thing, as with optimizers that quantize their state by blocks.
    """
    rank = dist.get_rank(group=owning_group(params[0]))
    sizes = [cut_of(param).sizes[rank] for param in params]
    if flat.numel() != sum(sizes):
        raise CheckpointError(
            f'the optimizer\'s "{name}" has {flat.numel()} values for {sum(sizes)} elements of parameters, so its '
            'shards cannot be exchanged. Use another optimizer, or set "zero_partition": "uniform".'
        )
    shards = torch.split(flat.reshape(-1), sizes)
    done: list[Tensor] = []
    for chunk in chunks([param.ds_numel for param in params]):
        done += _equal_shards(shards[chunk], params[chunk])
    return torch.cat(done)


def _equal_shards(shards: Sequence[Tensor], params: Sequence[ZeroParameter]) -> list[Tensor]:
    group, job_size = owning_group(params[0]), dist.get_world_size(group=params[0].ds_process_group)
    rank, owners = dist.get_rank(group=group), range(dist.get_world_size(group=group))
    equal = [cut_as_deepspeed(param.ds_numel, job_size) for param in params]
    # By owner of an equal shard, which is that of its place in the job, then by parameter.
    table = [
        [parameter_moves(param.ds_numel, cut_of(param), cut, place) for param, cut in zip(params, equal, strict=True)]
        for place in (dist.get_global_rank(group, owner) for owner in owners)
    ]
    send = [
        [
            shard[move.in_source : move.in_source + move.count]
            for shard, moves in zip(shards, of_owner, strict=True)
            for move in moves
            if move.source == rank
        ]
        for of_owner in table
    ]
    done = [torch.zeros(cut.sizes[0], dtype=shards[0].dtype) for cut in equal]
    receive = [
        [
            part[move.in_target : move.in_target + move.count]
            for part, moves in zip(done, table[rank], strict=True)
            for move in moves
            if move.source == source
        ]
        for source in owners
    ]
    write(start_exchange(send, receive, shards[0].dtype, group)(), receive)
    return done
