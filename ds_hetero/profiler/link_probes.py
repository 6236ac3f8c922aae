"""Times of transfers between ranks: one pair alone, several pairs at once, and all-to-alls."""

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
    """Times of exchanges between ``rank`` and its partner, at several sizes; empty for a rank without one.

    Args:
        pairs: pairs of ranks that exchange at the same moment.
        at_once: whether pairs share a NIC. Then times are means over the round, in which all pairs send as much;
            otherwise lower quartiles.

    Caller: every rank.
    Collectives: a barrier for each size, and one behind the last.
    """
    statistic = mean if at_once else _lower_quartile
    partners = dict(pairs) | {b: a for a, b in pairs}
    peer = partners.get(rank)
    samples = []
    for num_bytes, repeats in zip(SIZES, REPEATS, strict=True):
        dist.barrier()
        if peer is None:
            continue
        out = torch.ones(num_bytes, dtype=torch.uint8, device=device)
        into = torch.empty_like(out)

        def exchange(out: torch.Tensor = out, into: torch.Tensor = into, peer: int = peer) -> None:
            # gloo queues its note that a receive is ready behind a large send, so receives are posted first.
            operations = [dist.P2POp(dist.irecv, into, peer), dist.P2POp(dist.isend, out, peer)]
            for work in dist.batch_isend_irecv(operations):
                work.wait()

        samples.append(TransferSample(num_bytes, statistic(_times_s(exchange, repeats, device))))
    dist.barrier()
    return samples


def all_to_all_round(
    members: Sequence[int], group: Any, rank: int, device: torch.device
) -> Iterator[tuple[list[int], TransferSample]]:
    """Ragged all-to-alls among ``members``: rank i sends (i % 3 + 1) units to each.

    Yields the bytes that each member sends to any one, and this rank's time. Ranks outside yield nothing.
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
    """Lower quartile: a disturbed host must not look like a slow link."""
    return sorted(seconds)[len(seconds) // 4]


def _times_s(exchange: Callable[[], None], repeats: int, device: torch.device) -> list[float]:
    """Seconds of every call but the first, which warms up; both ends call equally often."""
    times = []
    for _ in range(repeats + 1):
        begin = time.perf_counter()
        exchange()
        if device.type != "cpu":
            torch.accelerator.synchronize(device)
        times.append(time.perf_counter() - begin)
    return times[1:]
