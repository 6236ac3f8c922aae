"""Measure the device memory of an NCCL communicator, and print it beside the bytes that the cost model counts.

The measurement has three steps: a communicator of all ranks is made and first used, sums a large tensor, and connects
every pair of ranks for messages. torch does not count NCCL's allocations, so each step reads the memory in use on the
device, minus the memory that torch has reserved. No device has confirmed the formulas of the cost model yet
(`ds_hetero.cost.terms.communicators`): the line is for information.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import permutations
from typing import NamedTuple

import torch
import torch.distributed as dist

from ds_hetero.cluster import cluster_from_dict
from ds_hetero.cluster.notation import read_notation
from ds_hetero.cost.terms.communicators import Channels, reads_peers
from ds_hetero.errors import HeteroError
from ds_hetero.runtime.collectives import on_all_ranks
from ds_hetero.selftest.lines import Line
from ds_hetero.selftest.session import Session

_NAME = "memory of a communicator"
_MIB = 2**20
_LARGE_BYTES = 64 * _MIB  # NCCL sums as much by its ring; one element goes by its tree, which has other buffers


class _Allocations(NamedTuple):
    """Bytes that NCCL allocated on a GPU in each step of the measurement."""

    gpu_uuid: str  # ranks with the same GPU share it
    making_bytes: float  # when the communicator was made and first used
    sum_bytes: float  # in the first large all-reduce
    message_bytes: float  # for connections between all pairs of ranks

    @property
    def total_bytes(self) -> float:
        """Bytes that NCCL allocated in all three steps together."""
        return self.making_bytes + self.sum_bytes + self.message_bytes

    def per_rank(self, num_ranks: int) -> _Allocations:
        """Divide the bytes by the number of ranks that share the GPU."""
        return _Allocations(
            self.gpu_uuid, self.making_bytes / num_ranks, self.sum_bytes / num_ranks, self.message_bytes / num_ranks
        )


def check_communicator_memory(session: Session) -> Iterator[Line]:
    """Yield one line of the report: the measured and the counted bytes on the rank that needs the most."""
    if session.size == 1 or not session.is_on_gpu:
        reason = "one process has nobody to connect to" if session.size == 1 else "not measured on CPUs"
        yield Line(_NAME, "skip", reason)
        return
    with session.watch.call(_NAME):
        allocations = _measure(session)
        by_rank = on_all_ranks(lambda: allocations)
    yield Line(_NAME, "info", _text(by_rank, session))


def _measure(session: Session) -> _Allocations:
    """Make a communicator of all ranks and use it, and read the memory after each step."""
    ranks = tuple(range(session.size))
    large = torch.zeros(_LARGE_BYTES // 4, device=session.device)
    before = _used_by_others_than_torch(session.device)
    group = session.groups.of(ranks, _NAME)
    after_making = _used_by_others_than_torch(session.device)
    dist.all_reduce(large, group=group)
    after_sums = _used_by_others_than_torch(session.device)
    session.groups.connections_of(group).make(tuple(permutations(ranks, 2)))
    after_messages = _used_by_others_than_torch(session.device)
    return _Allocations(
        _gpu_uuid(session.device), after_making - before, after_sums - after_making, after_messages - after_sums
    )


def _used_by_others_than_torch(device: torch.device) -> float:
    """Return the bytes in use on the device that torch has not reserved.

    Ranks may share the device, so barriers keep them from allocating while one of them reads.
    """
    torch.cuda.synchronize(device)
    dist.barrier(device_ids=[device.index])
    torch.cuda.synchronize(device)
    free, total = torch.cuda.mem_get_info(device)
    used = float(total - free - torch.cuda.memory_reserved(device))
    dist.barrier(device_ids=[device.index])
    return used


def _gpu_uuid(device: torch.device) -> str:
    """Return the UUID of the GPU."""
    return str(torch.cuda.get_device_properties(device).uuid)


def _text(by_rank: Sequence[_Allocations], session: Session) -> str:
    """Return the text of the line, from the measurements of all ranks; the same on every rank."""
    num_ranks_on_gpu = Counter(allocations.gpu_uuid for allocations in by_rank)
    shares = [allocations.per_rank(num_ranks_on_gpu[allocations.gpu_uuid]) for allocations in by_rank]
    rank = max(range(len(shares)), key=lambda r: shares[r].total_bytes)
    largest = shares[rank]
    text = (
        f"{largest.total_bytes / _MIB:,.0f} MiB on rank {rank}: {largest.making_bytes / _MIB:,.0f} when made and first "
        f"used, {largest.sum_bytes / _MIB:,.0f} by large sums, {largest.message_bytes / _MIB:,.0f} by messages of all "
        "pairs"
    )
    num_bytes = counted_bytes(torch.cuda.get_device_name(session.device), session.size)
    if len(session.nodes) > 1 or num_bytes is None:
        return text
    return f"{text}; the cost model counts {num_bytes / _MIB:,.0f}"


def counted_bytes(card: str, num_ranks: int) -> float | None:
    """Return the bytes of the cost model for a communicator on one node, with collectives and messages of all pairs.

    The model counts the channels between different GPUs; ranks that share a GPU may have fewer. None is returned for a
    GPU that the catalogue does not have, and for GPUs that cannot read each other's memory: NCCL then keeps the
    buffers in host memory.

    Args:
        card: name of the GPU, as torch gives it, such as "NVIDIA A10".
    """
    try:
        cluster = cluster_from_dict(read_notation(card.removeprefix("NVIDIA ")).content)
    except HeteroError:
        return None
    if not reads_peers(cluster.devices[0]):
        return None
    channels = Channels.inside(cluster.nodes[0])
    return channels.collective_bytes(num_ranks) + channels.message_bytes(num_ranks - 1)
