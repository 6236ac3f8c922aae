"""Tensors of experts are added up over replicas that divide the experts unlike each other.

Budget: 20 s.
"""

from __future__ import annotations

import random

import pytest
import torch
import torch.distributed as dist

from benchmarks.measure.traffic import Traffic
from ds_hetero.runtime.experts.replicas import ReplicaExperts, sum_over_replicas
from ds_hetero.values.splits import Split, share
from tests.support import run_ranks


def drawn(seed: int, world_size: int) -> tuple[ReplicaExperts, int]:
    """Replicas of a world and how they divide experts, at random; and the number of experts."""
    draw = random.Random(seed)
    num_replicas, num_experts = draw.randint(1, world_size), draw.randint(1, 9)
    members: list[list[int]] = [[] for _ in range(num_replicas)]
    for place, rank in enumerate(draw.sample(range(world_size), world_size)):
        members[place if place < num_replicas else draw.randrange(num_replicas)].append(rank)
    splits = []
    for ranks in members:
        weights = [draw.choice((0, 1, 1, 3)) for _ in ranks]
        weights[draw.randrange(len(ranks))] += 1
        splits.append(Split(share(num_experts, weights)))
    return ReplicaExperts(tuple(tuple(sorted(ranks)) for ranks in members), tuple(splits)), num_experts


def sums_are_those_of_whole_tensors(rank: int, seeds: range) -> None:
    for seed in seeds:
        experts, num_experts = drawn(seed, dist.get_world_size())
        generator = torch.Generator().manual_seed(seed)
        shape = (num_experts, 3, 1 + seed % 3)
        whole = torch.randint(-9, 9, (experts.num_replicas, *shape), generator=generator).double()
        replica = next(i for i, ranks in enumerate(experts.ranks) if rank in ranks)
        start, stop = experts.splits[replica].ranges[experts.ranks[replica].index(rank)]
        with Traffic() as traffic:
            result = sum_over_replicas(whole[replica, start:stop], experts)
        assert torch.equal(result, whole.sum(0)[start:stop]), (seed, experts)
        # As in a ring's all-reduce, but for the elements that a piece cannot share out evenly.
        sent = sum(traffic.sent_bytes.values()) / 8
        share_sent = 2 * (experts.num_replicas - 1) / experts.num_replicas
        assert sent <= share_sent * result.numel() + 2 * num_experts * experts.num_replicas, (seed, sent)


@pytest.mark.parametrize("strict", [False, True], ids=["gloo", "NCCL's rules"])
@pytest.mark.parametrize("world_size", [2, 4, 5])
def test_sums_over_replicas_are_those_of_whole_tensors(world_size: int, strict: bool) -> None:
    run_ranks(
        sums_are_those_of_whole_tensors, world_size, range(100 * world_size, 100 * world_size + 12), strict=strict
    )
