"""Measure the host time of one round of messages, without the time that it waits for other ranks."""

from __future__ import annotations

import time

import torch
import torch.distributed as dist

from ds_hetero.batch.head_table import Member
from ds_hetero.runtime.attention.head_exchange import (
    Exchange,
    gather_output_heads,
    gather_sequence,
    scatter_output,
    scatter_sequence,
)

EXCHANGES = 24  # repeats of each of the four all-to-alls of an attention block; chosen, never measured
BUSY_S = 0.2  # duration of the work by which the rank's share of a core is measured; chosen, never measured


def message_overhead_s(device: torch.device) -> float:
    """Return this rank's host time for one round of messages: the mean of the four all-to-alls of a block.

    The measured time is CPU time of this thread, which does not count waiting. A rank may have only a part of a core,
    so the CPU time is multiplied by the wall time of a second of CPU time: 0.1 ms on half a core are 0.2 ms. The result
    is 0 on GPUs, because the host runs ahead of its device.

    Caller: every rank.
    Collectives: the four all-to-alls of a block of attention, with few bytes, ``EXCHANGES + 1`` times.
    """
    if device.type != "cpu":
        return 0.0
    return _cpu_time_of_exchange_s() * _wall_per_cpu_time()


def _cpu_time_of_exchange_s() -> float:
    """Return the mean CPU seconds of one all-to-all, in which every rank has one head and a few tokens."""
    size = dist.get_world_size()
    tokens, head_dim = 8, 16
    members = tuple(Member(tokens, (rank, rank + 1), (rank, rank + 1)) for rank in range(size))
    exchange = Exchange(members, dist.get_rank(), size, size, dist.group.WORLD)
    local_BHsD = torch.ones(1, size, tokens, head_dim)
    all_BhSD = torch.ones(1, 1, size * tokens, head_dim)
    all_SBhD = all_BhSD.permute(2, 0, 1, 3).contiguous()
    local_BsHD = local_BHsD.transpose(1, 2).contiguous()
    begin_s = 0.0
    for repeat in range(EXCHANGES + 1):
        if repeat == 1:  # the first one warms up
            begin_s = time.thread_time()
        gather_sequence(local_BHsD, local_BHsD, local_BHsD, exchange)
        scatter_output(all_SBhD, exchange)
        gather_output_heads(local_BsHD, exchange)
        scatter_sequence(all_BhSD, all_BhSD, all_BhSD, exchange)
    return (time.thread_time() - begin_s) / (4 * EXCHANGES)


def _wall_per_cpu_time() -> float:
    """Return wall time over CPU time of work that never waits: 1 on a full core, 2 on half a core."""
    matrix = torch.ones(128, 128)
    wall_begin, cpu_begin = time.perf_counter(), time.thread_time()
    while time.perf_counter() < wall_begin + BUSY_S:
        matrix @ matrix
    return (time.perf_counter() - wall_begin) / (time.thread_time() - cpu_begin)
