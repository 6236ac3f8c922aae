"""Probes of the links: times of transfers in single pairs of ranks, in several pairs at once, and in all-to-alls."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from statistics import mean
from typing import Any

import torch
import torch.distributed as dist

from ds_hetero.profiler.fit import TransferSample
from ds_hetero.profiler.pair_rounds import Pairs

SIZES = (2**12, 2**18, 2**22, 2**24)  # bytes, from those of latency to those of bandwidth; chosen, never measured
REPEATS = (30, 20, 8, 4)  # of each size; chosen, never measured


def pair_round(pairs: Pairs, rank: int, device: torch.device, *, pairs_share_nic: bool = False) -> list[TransferSample]:
    """Time exchanges of ``rank`` with its partner, at several sizes; return nothing for a rank without a partner.

    Args:
        pairs: pairs of ranks that exchange at the same time.
        pairs_share_nic: whether the pairs of the round share a NIC. Then a time is the mean over the round, in which
            all pairs send equally much; otherwise it is the lower quartile.

    Caller: every rank.
    Collectives: a barrier for each size, and one after the last.
    """
    statistic = mean if pairs_share_nic else _lower_quartile
    peer_by_rank = dict(pairs)
    peer_by_rank.update((second, first) for first, second in pairs)
    peer = peer_by_rank.get(rank)
    samples = []
    for num_bytes, repeats in zip(SIZES, REPEATS, strict=True):
        dist.barrier()
        if peer is None:
            continue
        sent = torch.ones(num_bytes, dtype=torch.uint8, device=device)
        received = torch.empty_like(sent)

        def exchange(sent: torch.Tensor = sent, received: torch.Tensor = received, peer: int = peer) -> None:
            # Receives first: gloo would queue its message that a receive is ready behind a large send.
            operations = [dist.P2POp(dist.irecv, received, peer), dist.P2POp(dist.isend, sent, peer)]
            for work in dist.batch_isend_irecv(operations):
                work.wait()

        samples.append(TransferSample(num_bytes, statistic(_times_s(exchange, repeats, device))))
    dist.barrier()
    return samples


def all_to_all_round(
    members: Sequence[int], group: Any, rank: int, device: torch.device
) -> Iterator[tuple[list[int], TransferSample]]:
    """Time all-to-alls of unequal size among ``members``; yield a sample of this rank for every size of `SIZES`.

    Member i sends (i % 3 + 1) * u bytes to each member: u, 2 u or 3 u, for a u that grows with the size.

    Yields:
        The bytes that each member sends to any one member; and this rank's time. Other ranks yield nothing.
    """
    for num_bytes, repeats in zip(SIZES, REPEATS, strict=True):
        dist.barrier()
        if rank not in members or len(members) < 2:
            continue
        unit = max(num_bytes // len(members), 64)
        member_bytes = [unit * (i % 3 + 1) for i in range(len(members))]  # that a member sends to any one member
        rank_bytes = member_bytes[list(members).index(rank)]
        sent = torch.ones(rank_bytes * len(members), dtype=torch.uint8, device=device)
        received = torch.empty(sum(member_bytes), dtype=torch.uint8, device=device)

        def exchange(
            sent: torch.Tensor = sent,
            received: torch.Tensor = received,
            member_bytes: list[int] = member_bytes,
            rank_bytes: int = rank_bytes,
        ) -> None:
            dist.all_to_all_single(received, sent, member_bytes, [rank_bytes] * len(member_bytes), group=group)

        yield member_bytes, TransferSample(unit, _lower_quartile(_times_s(exchange, repeats, device)))
    dist.barrier()


def _lower_quartile(seconds: Sequence[float]) -> float:
    """Return the lower quartile, so that a disturbed host does not look like a slow link."""
    return sorted(seconds)[len(seconds) // 4]


def _times_s(exchange: Callable[[], None], repeats: int, device: torch.device) -> list[float]:
    """Return the seconds of each of ``repeats`` calls, after one call to warm up.

    Both ends of a transfer must call this with the same ``repeats``.
    """
    times_s = []
    for _ in range(repeats + 1):
        begin_s = time.perf_counter()
        exchange()
        if device.type != "cpu":
            torch.accelerator.synchronize(device)
        times_s.append(time.perf_counter() - begin_s)
    return times_s[1:]
