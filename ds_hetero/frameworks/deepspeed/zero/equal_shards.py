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
    """Exchange weighted shards of parameters, side by side in one tensor, for shards of one size on the CPU.

        flat     [sum of s]
        result   [sum of ceil(n / ranks)], the ends padded with zeros

    Caller: every rank, with the same parameters.
    Collectives: one all_to_all_single for each of `chunks`; of copies in every node, inside the node.

    Raises:
        CheckpointError: ``flat`` has another number of elements, as with optimizers that quantize state by blocks.
    """
    rank = dist.get_rank(group=owning_group(params[0]))
    sizes = [cut_of(param).sizes[rank] for param in params]
    if flat.numel() != sum(sizes):
        raise CheckpointError(
            f'the optimizer\'s "{name}" has {flat.numel()} values for {sum(sizes)} elements of parameters, so its '
            'shards cannot be exchanged. Use another optimizer, or set "zero_partition": "uniform".'
        )
    shards = torch.split(flat.reshape(-1), sizes)
    results: list[Tensor] = []
    for chunk in chunks([param.ds_numel for param in params]):
        results += _equal_shards(shards[chunk], params[chunk])
    return torch.cat(results)


def _equal_shards(shards: Sequence[Tensor], params: Sequence[ZeroParameter]) -> list[Tensor]:
    """Exchange the shards of one chunk; see `equal_shards`.

    The elements of an equal shard are sent in the order of parameters, then of elements; sender and receiver derive
    the same moves, so that no message says what it holds.
    """
    group = owning_group(params[0])
    job_size = dist.get_world_size(group=params[0].ds_process_group)
    rank, num_ranks = dist.get_rank(group=group), dist.get_world_size(group=group)
    results = []
    send: list[list[Tensor]] = [[] for _ in range(num_ranks)]  # parts of weighted shards, by receiver
    receive: list[list[Tensor]] = [[] for _ in range(num_ranks)]  # parts of equal shards, by sender
    for shard, param in zip(shards, params, strict=True):
        equal_cut = cut_as_deepspeed(param.ds_numel, job_size)
        result = torch.zeros(equal_cut.sizes[0], dtype=shards[0].dtype)
        results.append(result)
        for owner in range(num_ranks):
            # Equal shards are cut over the job: a rank of a node owns the one of its global rank.
            place = dist.get_global_rank(group, owner)
            for move in parameter_moves(param.ds_numel, cut_of(param), equal_cut, place):
                if move.source == rank:
                    send[owner].append(shard[move.in_source : move.in_source + move.count])
                if owner == rank:
                    receive[move.source].append(result[move.in_target : move.in_target + move.count])
    write(start_exchange(send, receive, shards[0].dtype, group)(), receive)
    return results
