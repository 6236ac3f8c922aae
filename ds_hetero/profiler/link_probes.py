"""Timings of ranks together: transfers, alone and all at once, all-to-alls, and the host's own time for exchanges.

Who exchanges with whom while links are measured.

A round is a set of disjoint pairs that exchange at the same moment, both ways, as neighbours in a ring do.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from statistics import mean
from typing import Any

import torch
import torch.distributed as dist

from ds_hetero.batch.head_table import Member
from ds_hetero.profiler.fit import TransferSample
from ds_hetero.runtime.attention.head_exchange import (
    Exchange,
    gather_output_heads,
    gather_sequence,
    scatter_output,
    scatter_sequence,
)

SIZES = (2**12, 2**18, 2**22, 2**24)
REPEATS = (30, 20, 8, 4)
EXCHANGES = 24  # of every kind, for the host's time
BUSY_S = 0.2  # of work without waiting, to see how much of a core the rank has


def pair_round(pairs: Pairs, rank: int, device: torch.device, *, at_once: bool = False) -> list[TransferSample]:
    """Times of exchanges between ``rank`` and its partner, at several sizes; empty for a rank without one.

    Args:
        pairs: that exchange at the same moment.
        at_once: pairs share a port. Then times are means over the whole round, in which all of them send as much.
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


def message_overhead_s(device: torch.device) -> float:
    """This rank's host time for one round of messages: the mean of the four exchanges of a block, with few bytes.

    CPU time of this thread, which waiting does not count, times how much longer the same thread takes for work without
    waiting: a rank may have a part of a core only. 0 where a device computes and the host runs ahead of it.

    Caller: every rank.
    """
    if device.type != "cpu":
        return 0.0
    size = dist.get_world_size()
    tokens, head_dim = 8, 16
    members = tuple(Member(tokens, (rank, rank + 1), (rank, rank + 1)) for rank in range(size))
    exchange = Exchange(members, dist.get_rank(), size, size, dist.group.WORLD)
    own_BHsD = torch.ones(1, size, tokens, head_dim)
    all_BhSD = torch.ones(1, 1, size * tokens, head_dim)
    all_SBhD, own_BsHD = all_BhSD.permute(2, 0, 1, 3).contiguous(), own_BHsD.transpose(1, 2).contiguous()
    begin_s = 0.0
    for repeat in range(EXCHANGES + 1):
        if repeat == 1:  # after one to warm up
            begin_s = time.thread_time()
        gather_sequence(own_BHsD, own_BHsD, own_BHsD, exchange)
        scatter_output(all_SBhD, exchange)
        gather_output_heads(own_BsHD, exchange)
        scatter_sequence(all_BhSD, all_BhSD, all_BhSD, exchange)
    host_s = (time.thread_time() - begin_s) / (4 * EXCHANGES)
    busy, wall, cpu = torch.ones(128, 128), time.perf_counter(), time.thread_time()
    while time.perf_counter() < wall + BUSY_S:
        busy @ busy
    return host_s * (time.perf_counter() - wall) / (time.thread_time() - cpu)


def _lower_quartile(seconds: Sequence[float]) -> float:
    """Lower quartile, for disturbances of a host must not look like the latency of its links."""
    return sorted(seconds)[len(seconds) // 4]


def _times_s(exchange: Callable[[], None], repeats: int, device: torch.device) -> list[float]:
    """Seconds of calls that both ends make equally often, after one to warm up."""
    times = []
    for _ in range(repeats + 1):
        begin = time.perf_counter()
        exchange()
        if device.type != "cpu":
            torch.accelerator.synchronize(device)
        times.append(time.perf_counter() - begin)
    return times[1:]


MOST_ROUNDS = 8  # of pairs of nodes; what is not measured is taken to be like the median

Pairs = tuple[tuple[int, int], ...]


def rounds_inside(nodes: Sequence[Sequence[int]]) -> dict[str, Pairs]:
    """One pair per node, and, where some node has two pairs, as many as it has at once."""
    rounds = {"inside": tuple((ranks[0], ranks[1]) for ranks in nodes if len(ranks) > 1)}
    crowded = tuple((ranks[i], ranks[i + 1]) for ranks in nodes if len(ranks) > 3 for i in range(0, len(ranks) - 1, 2))
    return {name: pairs for name, pairs in (*rounds.items(), ("inside, all at once", crowded)) if pairs}


def rounds_between(nodes: Sequence[Sequence[int]]) -> dict[str, Pairs]:
    """Every two nodes once, first rank to first rank, in rounds of disjoint pairs; then all ranks of paired nodes."""
    order: list[int | None] = list(range(len(nodes)))
    if len(order) < 2:
        return {}
    if len(order) % 2:
        order.append(None)
    rounds: dict[str, Pairs] = {}
    for number in range(min(len(order) - 1, MOST_ROUNDS)):
        half = len(order) // 2
        pairs = [
            (a, b) for a, b in zip(order[:half], reversed(order[half:]), strict=True) if a is not None and b is not None
        ]
        rounds[f"between {number}"] = tuple((nodes[a][0], nodes[b][0]) for a, b in pairs)
        if number == 0:
            crowded = tuple(pair for a, b in pairs for pair in zip(nodes[a], nodes[b], strict=False))
            if len(crowded) > len(pairs):
                rounds["between, all at once"] = crowded
        order = [order[0], order[-1], *order[1:-1]]
    return rounds
