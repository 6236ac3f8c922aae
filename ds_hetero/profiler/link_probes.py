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


def pair_round(pairs: Pairs, rank: int, device: torch.device, *, at_once: bool = False) -> list[TransferSample]:
    """Time exchanges of ``rank`` with its partner, at several sizes; return nothing for a rank without a partner.

    Args:
        pairs: pairs of ranks that exchange at the same time.
        at_once: whether the pairs share a NIC. Then a time is the mean over the round, in which all pairs send
            equally much; otherwise it is the lower quartile.

    Caller: every rank.
    Collectives: a barrier for each size, and one after the last.
    """
    statistic = mean if at_once else _lower_quartile
    partner_of = dict(pairs)
    partner_of.update((second, first) for first, second in pairs)
    peer = partner_of.get(rank)
    samples = []
    for num_bytes, repeats in zip(SIZES, REPEATS, strict=True):
        dist.barrier()
        if peer is None:
            continue
        out = torch.ones(num_bytes, dtype=torch.uint8, device=device)
        into = torch.empty_like(out)

        def exchange(out: torch.Tensor = out, into: torch.Tensor = into, peer: int = peer) -> None:
            # Receives first: gloo would queue its message that a receive is ready behind a large send.
            operations = [dist.P2POp(dist.irecv, into, peer), dist.P2POp(dist.isend, out, peer)]
            for work in dist.batch_isend_irecv(operations):
                work.wait()

        samples.append(TransferSample(num_bytes, statistic(_times_s(exchange, repeats, device))))
    dist.barrier()
    return samples


def all_to_all_round(
    members: Sequence[int], group: Any, rank: int, device: torch.device
) -> Iterator[tuple[list[int], TransferSample]]:
    """Time ragged all-to-alls among ``members``: the i-th sends (i % 3 + 1) units to every member.

    Yields the bytes that each member sends to any one member, and this rank's time. Other ranks yield nothing.
    """
    for num_bytes, repeats in zip(SIZES, REPEATS, strict=True):
        dist.barrier()
        if rank not in members or len(members) < 2:
            continue
        unit = max(num_bytes // len(members), 64)
        sent = [unit * (i % 3 + 1) for i in range(len(members))]
        own_bytes = sent[list(members).index(rank)]
        out = torch.ones(own_bytes * len(members), dtype=torch.uint8, device=device)
        into = torch.empty(sum(sent), dtype=torch.uint8, device=device)

        def exchange(
            out: torch.Tensor = out, into: torch.Tensor = into, sent: list[int] = sent, own_bytes: int = own_bytes
        ) -> None:
            dist.all_to_all_single(into, out, sent, [own_bytes] * len(sent), group=group)

        yield sent, TransferSample(unit, _lower_quartile(_times_s(exchange, repeats, device)))
    dist.barrier()


def _lower_quartile(seconds: Sequence[float]) -> float:
    """Return the lower quartile, so that a disturbed host does not look like a slow link."""
    return sorted(seconds)[len(seconds) // 4]


def _times_s(exchange: Callable[[], None], repeats: int, device: torch.device) -> list[float]:
    """Return the seconds of ``repeats`` calls, after one to warm up; both ends of a transfer call equally often."""
    times_s = []
    for _ in range(repeats + 1):
        begin_s = time.perf_counter()
        exchange()
        if device.type != "cpu":
            torch.accelerator.synchronize(device)
        times_s.append(time.perf_counter() - begin_s)
    return times_s[1:]
