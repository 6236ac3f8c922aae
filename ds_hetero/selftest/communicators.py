"""Send some megabytes over every communicator that training makes, and report the slowest one.

Small messages may pass where large ones do not: NCCL chooses protocols, channels and buffers by size. The communicators
are those that earlier checks have made the way training does (`Session.groups`), and those between pipeline stages.
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
from ds_hetero.runtime.pipeline.stage_transfers import make_boundary_groups
from ds_hetero.selftest.lines import Line
from ds_hetero.selftest.lone_stages import lone_stages
from ds_hetero.selftest.session import Session

_NAME = "megabytes over communicators"
_BYTES_OF_GPU, _BYTES_OF_CPU = 64 * 2**20, 4 * 2**20
_MAX_DISTINCT_VALUES = 1009  # different values of elements; a prime, so that they do not repeat with blocks of memory
_MAX_EXACT_INTEGER = 2**24  # float32 represents every integer up to here
_MAX_SPELLED_RANKS = 8  # of a communicator; larger ones are written as a range


class _Trial(NamedTuple):
    """Result of the transfers over one communicator, on this rank."""

    is_right: bool  # whether sums and messages have the expected values
    seconds: float  # duration of the all-reduce and the message together


def check_communicators(session: Session) -> Iterator[Line]:
    """Yield one line of the report: whether all communicators pass values unchanged, and which one is slowest."""
    if session.size == 1:
        yield Line(_NAME, "skip", "one process has nobody to send to")
        return
    with session.watch.call("process groups of a pipeline"):
        make_boundary_groups(lone_stages(session.size), session.groups)
    world = dist.group.WORLD
    assert world is not None
    groups = [(tuple(range(session.size)), "all ranks", world), *session.groups.all_groups()]
    num_bytes = _BYTES_OF_GPU if session.is_on_gpu else _BYTES_OF_CPU
    trials: dict[str, _Trial] = {}
    for number, (ranks, purpose, group) in enumerate(groups):
        name = f"communicator {number}, {_describe(ranks, purpose)}"
        if session.rank not in ranks:
            continue
        with session.watch.call(f"{num_bytes // 2**20} MiB over {name}"):
            trials[name] = _try(session, ranks, group, num_bytes)
    with session.watch.call(f"the end of {_NAME}"):
        by_rank = on_all_ranks(lambda: trials)
    yield _line(by_rank, len(groups), num_bytes)


def _line(by_rank: Sequence[dict[str, _Trial]], num_groups: int, num_bytes: int) -> Line:
    """Return the line from the trials of all ranks, the same on every rank."""
    wrong_ranks_by_name: dict[str, list[int]] = {}
    slowest_s_by_name: dict[str, float] = {}
    for rank, trials_of_rank in enumerate(by_rank):
        for name, trial in trials_of_rank.items():
            slowest_s_by_name[name] = max(slowest_s_by_name.get(name, 0.0), trial.seconds)
            if not trial.is_right:
                wrong_ranks_by_name.setdefault(name, []).append(rank)
    if wrong_ranks_by_name:
        listed = "; ".join(f"{name}: on {ranks_text(ranks)}" for name, ranks in wrong_ranks_by_name.items())
        return Line(_NAME, "fail", f"other values than were sent. {listed}")
    slowest_name = max(slowest_s_by_name, key=lambda name: slowest_s_by_name[name])
    bytes_per_s = 2 * num_bytes / slowest_s_by_name[slowest_name]
    detail = f"{num_groups} of them, {num_bytes // 2**20} MiB each; slowest {bytes_per_s / GB:.3g} GB/s: {slowest_name}"
    return Line(_NAME, "pass", detail, bytes_per_s)


def _try(session: Session, ranks: tuple[int, ...], group: ProcessGroup, num_bytes: int) -> _Trial:
    """Time an all-reduce among ``ranks``, then a message from every rank to the next, and check the values.

    The rank at place p of the group contributes (p + 1) * pattern to the sum, and sends pattern + p.
    """
    place, count = ranks.index(session.rank), num_bytes // 4
    pattern = torch.arange(count, device=session.device, dtype=torch.float32) % _num_values(len(ranks))
    summed, sent = pattern * (place + 1), pattern + place
    received = torch.empty_like(sent)
    source, target = ranks[place - 1], ranks[(place + 1) % len(ranks)]
    dist.barrier(group=group, device_ids=[session.device.index] if session.is_on_gpu else None)
    begin_s = time.perf_counter()
    dist.all_reduce(summed, group=group)
    _exchange(sent, received, source, target, group)
    if session.is_on_gpu:
        torch.cuda.synchronize(session.device)
    seconds = time.perf_counter() - begin_s
    num_ranks = len(ranks)
    is_right = torch.equal(summed, pattern * (num_ranks * (num_ranks + 1) // 2))
    is_right &= torch.equal(received, pattern + (place - 1) % num_ranks)
    return _Trial(is_right, seconds)


def _num_values(num_ranks: int) -> int:
    """Return n such that the weighted sums of `_try` over all ranks are exact in float32 for the values 0 to n - 1.

    A sum is at most (n - 1) * num_ranks * (num_ranks + 1) / 2. The result is odd, so that no block of 2^k elements
    equals the next one. It holds for up to 3,343 ranks.
    """
    largest = _MAX_EXACT_INTEGER // (num_ranks * (num_ranks + 1) // 2)
    return min(_MAX_DISTINCT_VALUES, max(3, (largest - 1) | 1))


def _exchange(sent: Tensor, received: Tensor, source: int, target: int, group: ProcessGroup) -> None:
    """Send to rank ``target`` and receive from rank ``source``; a group of one rank copies."""
    if source == dist.get_rank():
        received.copy_(sent)
        return
    operations = [
        dist.P2POp(dist.irecv, received, source, group),
        dist.P2POp(dist.isend, sent, target, group),
    ]
    for work in dist.batch_isend_irecv(operations):
        work.wait()


def _describe(ranks: Sequence[int], purpose: str) -> str:
    """Return for instance "ranks 0, 1 (all ranks)"."""
    if len(ranks) <= _MAX_SPELLED_RANKS:
        listed = ranks_text(ranks)
    else:
        listed = f"{len(ranks)} ranks from {ranks[0]} to {ranks[-1]}"
    return f"{listed} ({purpose})" if purpose else listed
