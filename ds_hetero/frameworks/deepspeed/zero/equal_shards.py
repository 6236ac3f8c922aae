"""Exchange weighted shards of ZeRO-3 for shards of equal size, because DeepSpeed's checkpoints have equal shards.

Example: a parameter of 10 elements, on ranks of weights 3 and 1, has shards of 8 and 2 elements. Rank 0 sends its last
3 elements to rank 1, so that both have 5.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from deepspeed import comm as dist
from torch import Tensor

from ds_hetero.errors import CheckpointError
from ds_hetero.frameworks.deepspeed.protocols import ZeroParameter
from ds_hetero.frameworks.deepspeed.zero.nodes import chunks, copy_into, start_exchange
from ds_hetero.frameworks.deepspeed.zero.parameter_cut import cut_of, owning_group
from ds_hetero.frameworks.deepspeed.zero.weighted_shards import parameter_moves
from ds_hetero.sharding.zero_partition import cut_as_deepspeed


def equal_shards(flat: Tensor, params: Sequence[ZeroParameter], name: str = "weights") -> Tensor:
    """Exchange this rank's weighted shards of parameters for shards of equal size, on the CPU.

        flat     [sum of s], the weighted shards one after the other; s: elements of this rank's shard of a parameter
        result   [sum of ceil(n / ranks)], the equal shards, padded with zeros; n: elements of a parameter

    Args:
        name: name of the optimizer state that ``flat`` is, for the error.

    Caller: every rank, with the same parameters.
    Collectives: one all_to_all_single for each of `chunks`, over the ranks that own the parameters (`owning_group`).

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
    """Exchange the shards of one chunk of parameters; see `equal_shards`.

    Sender and receiver compute the same list of moves, in the same order. So a message needs no header: it is only the
    elements.
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
            # Equal shards are cut over all ranks of the job, weighted ones over ``group``, which may be one node.
            global_owner = dist.get_global_rank(group, owner)
            for move in parameter_moves(param.ds_numel, cut_of(param), equal_cut, global_owner):
                if move.source == rank:
                    send[owner].append(shard[move.in_source : move.in_source + move.count])
                if owner == rank:
                    receive[move.source].append(result[move.in_target : move.in_target + move.count])
    wait = start_exchange(send, receive, shards[0].dtype, group)
    copy_into(receive, wait())
    return results
