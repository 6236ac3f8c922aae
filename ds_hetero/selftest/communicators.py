"""Some megabytes over every communicator that training makes, by a collective and by messages, with the slowest rate.

Small messages pass where large ones do not: NCCL chooses protocols, channels and buffers by size. The groups are those
that the checks before have made as training makes them (`Session.groups`), and those of a pipeline's boundaries.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from ds_hetero.common.text import ranks_text
from ds_hetero.common.units import GB
from ds_hetero.runtime.collectives import on_all_ranks
from ds_hetero.runtime.pipeline.hops import make_boundary_groups
from ds_hetero.selftest.lines import Line
from ds_hetero.selftest.lone_stages import lone_stages
from ds_hetero.selftest.session import Session

_NAME = "megabytes over communicators"
_BYTES_OF_GPU, _BYTES_OF_CPU = 64 * 2**20, 4 * 2**20
_MOST_VALUES = 1009  # of elements; a prime number, so that no block of memory is as long
_EXACT = 2**24  # float32 has all whole numbers up to there
_SHOWN = 8  # ranks of a communicator that are named


class _Tried(NamedTuple):
    is_right: bool
    seconds: float  # of both ways, on this rank


def check_communicators(session: Session) -> Iterator[Line]:
    """Yield one line for all of them."""
    if session.size == 1:
        yield Line(_NAME, "skip", "one process has nobody to send to")
        return
    with session.watch.call("process groups of a pipeline"):
        make_boundary_groups(lone_stages(session.size), session.groups)
    world = dist.group.WORLD
    assert world is not None
    groups = [(tuple(range(session.size)), "all ranks", world), *session.groups.made()]
    num_bytes = _BYTES_OF_GPU if session.is_on_gpu else _BYTES_OF_CPU
    tried: dict[str, _Tried] = {}
    for number, (ranks, purpose, group) in enumerate(groups):
        name = f"communicator {number}, {_described(ranks, purpose)}"
        if session.rank not in ranks:
            continue
        with session.watch.call(f"{num_bytes // 2**20} MiB over {name}"):
            tried[name] = _try(session, ranks, group, num_bytes)
    with session.watch.call(f"the end of {_NAME}"):
        by_rank = on_all_ranks(lambda: tried)
    yield _line(by_rank, len(groups), num_bytes)


def _line(by_rank: Sequence[dict[str, _Tried]], num_groups: int, num_bytes: int) -> Line:
    """Return the verdict of all ranks, the same on each."""
    wrong: dict[str, list[int]] = {}
    slowest: dict[str, float] = {}
    for rank, of_rank in enumerate(by_rank):
        for name, tried in of_rank.items():
            slowest[name] = max(slowest.get(name, 0.0), tried.seconds)
            if not tried.is_right:
                wrong.setdefault(name, []).append(rank)
    if wrong:
        listed = "; ".join(f"{name}: on {ranks_text(ranks)}" for name, ranks in wrong.items())
        return Line(_NAME, "fail", f"other values than were sent. {listed}")
    last = max(slowest, key=lambda name: slowest[name])
    rate = 2 * num_bytes / slowest[last]
    detail = f"{num_groups} of them, {num_bytes // 2**20} MiB each; slowest {rate / GB:.3g} GB/s: {last}"
    return Line(_NAME, "pass", detail, rate)


def _try(session: Session, ranks: tuple[int, ...], group: ProcessGroup, num_bytes: int) -> _Tried:
    """Return an all-reduce among ``ranks``, then a message to the next of them."""
    own, count = ranks.index(session.rank), num_bytes // 4
    values = _num_values(len(ranks))
    pattern = torch.arange(count, device=session.device, dtype=torch.float32) % values
    summed, sent = pattern * (own + 1), pattern + own
    received = torch.empty_like(sent)
    before, after = ranks[own - 1], ranks[(own + 1) % len(ranks)]
    dist.barrier(group=group, device_ids=[session.device.index] if session.is_on_gpu else None)
    began = time.perf_counter()
    dist.all_reduce(summed, group=group)
    _exchange(sent, received, before, after, group)
    if session.is_on_gpu:
        torch.cuda.synchronize(session.device)
    seconds = time.perf_counter() - began
    num_ranks = len(ranks)
    is_right = torch.equal(summed, pattern * (num_ranks * (num_ranks + 1) // 2))
    is_right &= torch.equal(received, pattern + (own - 1) % num_ranks)
    return _Tried(is_right, seconds)


def _num_values(num_ranks: int) -> int:
    """Whole numbers from 0 on of which a sum over ranks is exact in float32, where rank r sends r + 1 times each.

    An odd number of them, so that no block of 2^n elements is like the next; up to 3,343 ranks.
    """
    largest = _EXACT // (num_ranks * (num_ranks + 1) // 2)
    return min(_MOST_VALUES, max(3, (largest - 1) | 1))


def _exchange(sent: Tensor, received: Tensor, before: int, after: int, group: ProcessGroup) -> None:
    """Send to the next rank, and receive from the one before; a group of one sends nothing."""
    if before == dist.get_rank():
        received.copy_(sent)
        return
    operations = [
        dist.P2POp(dist.irecv, received, before, group),
        dist.P2POp(dist.isend, sent, after, group),
    ]
    for work in dist.batch_isend_irecv(operations):
        work.wait()


def _described(ranks: Sequence[int], purpose: str) -> str:
    shown = ranks_text(ranks) if len(ranks) <= _SHOWN else f"{len(ranks)} ranks from {ranks[0]} to {ranks[-1]}"
    return f"{shown} ({purpose})" if purpose else shown
