"""Sum tensors of experts over the replicas of a job, each of which divides the experts by itself.

Replicas may have unlike numbers of ranks and other shares, so an expert is on other ranks in each of them. The common
refinement of the replicas' splits has pieces that are on one rank of each replica. A piece is cut into one chunk for
each replica. The rank that holds the piece in replica j adds up chunk j and sends the sum back:

    two replicas, ranks 0, 1 with 1 | 3 experts and rank 2 with 4
    pieces                    expert 0 on ranks 0 and 2, experts 1-3 on ranks 1 and 2
    chunks of expert 0        the first half is added up on rank 0, the second half on rank 2
    chunks of experts 1-3     the first half is added up on rank 1, the second half on rank 2

With R replicas a rank sends 2 (R - 1) / R of its tensor, as in a ring's all-reduce. Every element is added up once, in
the order of the replicas, so all replicas get the same bits.

Dimension key: e experts of this rank, n elements of its tensor.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from math import prod

import torch
import torch.distributed as dist
from torch import Tensor

from ds_hetero.runtime.peers.watch import waiting_for_peers
from ds_hetero.values.splits import Split, refine, share

Ranges = tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class ReplicaExperts:
    """How every replica of a job divides the experts of one layer.

    Args:
        ranks: global ranks of each replica, ascending; together all ranks of the world.
        splits: experts of these ranks, by replica.
    """

    ranks: tuple[tuple[int, ...], ...]
    splits: tuple[Split, ...]

    @property
    def num_replicas(self) -> int:
        """Number of replicas."""
        return len(self.ranks)


@dataclass(frozen=True)
class _Messages:
    """The parts of this rank's flat tensor that travel to each rank and back.

    Args:
        out: for each rank of the world, ranges of this rank's elements of which that rank adds up the chunks.
        sums: for each rank of the world, the range that it holds of the elements that this rank adds up, counted from
            the first of these.
        num_summed: elements that this rank adds up.
    """

    out: tuple[Ranges, ...]
    sums: tuple[tuple[int, int], ...]
    num_summed: int


@lru_cache(maxsize=256)
def _messages(experts: ReplicaExperts, expert_elements: int, rank: int) -> _Messages:
    """Return the messages of a rank for tensors with ``expert_elements`` elements of an expert."""
    num_replicas, world_size = experts.num_replicas, sum(map(len, experts.ranks))
    splits = [Split(tuple(size * expert_elements for size in split.sizes)) for split in experts.splits]
    own_replica = next(i for i, ranks in enumerate(experts.ranks) if rank in ranks)
    own_start = splits[own_replica].ranges[experts.ranks[own_replica].index(rank)][0]
    out: list[list[tuple[int, int]]] = [[] for _ in range(world_size)]
    summed_by_rank = [0] * world_size  # elements that this rank adds up, by rank that holds them
    for piece in refine(splits):
        holders = [experts.ranks[replica][owner] for replica, owner in enumerate(piece.owners)]
        if holders[own_replica] != rank:
            continue
        chunks = Split(share(piece.size, (1.0,) * num_replicas)).ranges
        for summing_rank, (start, stop) in zip(holders, chunks, strict=True):
            first = piece.start - own_start
            out[summing_rank].append((first + start, first + stop))
        for holder in holders:
            start, stop = chunks[own_replica]
            summed_by_rank[holder] += stop - start
    sums: list[tuple[int, int]] = [(0, 0)] * world_size
    for ranks in experts.ranks:
        # Ascending ranks of a replica hold ascending pieces, and so the sums in their order.
        for member, parts in zip(ranks, Split(tuple(summed_by_rank[member] for member in ranks)).ranges, strict=True):
            sums[member] = parts
    return _Messages(tuple(map(tuple, out)), tuple(sums), summed_by_rank[rank])


@torch.no_grad()
def sum_over_replicas(tensor: Tensor, experts: ReplicaExperts) -> Tensor:
    """Return the sum of a tensor over the replicas, for the experts of this rank.

        tensor      [e, ...], with the experts of this rank along the first dimension
        result      [e, ...]

    Caller: every rank of the world, also one without experts.
    Collectives: two all_to_all_single over the world; none with one replica.
    Source: reduce-scatter and all-gather over pieces of several cuts, as the asymmetric gradient chunks of HexiScale
        (arXiv:2409.01143).
    """
    if experts.num_replicas == 1:
        return tensor
    messages = _messages(experts, prod(tensor.shape[1:]), dist.get_rank())
    flat_n = tensor.reshape(-1)
    out_sizes = [sum(stop - start for start, stop in ranges) for ranges in messages.out]
    sum_sizes = [stop - start for start, stop in messages.sums]
    parts = [flat_n[start:stop] for ranges in messages.out for start, stop in ranges]
    received = flat_n.new_empty(sum(sum_sizes))
    with waiting_for_peers("adding up experts over replicas"):
        dist.all_to_all_single(received, torch.cat([flat_n[:0], *parts]), sum_sizes, out_sizes)
    total = flat_n.new_zeros(messages.num_summed)
    by_rank = torch.split(received, sum_sizes)
    for ranks in experts.ranks:  # in this order on every rank
        total += torch.cat([by_rank[member] for member in ranks])
    returned = flat_n.new_empty(sum(out_sizes))
    sums = torch.cat([total[start:stop] for start, stop in messages.sums])
    with waiting_for_peers("returning the sums of experts"):
        dist.all_to_all_single(returned, sums, out_sizes, sum_sizes)
    result_n = torch.empty_like(flat_n)
    start = 0
    for ranges in messages.out:
        for first, stop in ranges:
            result_n[first:stop] = returned[start : start + stop - first]
            start += stop - first
    return result_n.view(tensor.shape)
