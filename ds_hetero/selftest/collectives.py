"""Run every collective that training uses over all ranks, with parts of unequal size, and compare the results."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ds_hetero.runtime.collectives import all_gather_bytes
from ds_hetero.selftest.lines import Line
from ds_hetero.selftest.session import Session


def check_collectives(session: Session) -> Iterator[Line]:
    """Yield one line of the report for each collective: whether its result is as expected."""
    for name, collective in _COLLECTIVES.items():
        with session.watch.call(name):
            received, expected = collective(session)
            is_right = len(received) == len(expected) and all(map(torch.equal, received, expected))
            dist.barrier()  # gloo reports a message of the wrong size in the next call: the barrier is that call
        yield Line(name, "pass" if is_right else "fail", "" if is_right else "other values than were sent")


def _part_sizes(size: int) -> list[int]:
    """Return how many elements each rank contributes to a collective: unequal numbers, and zero for rank 1."""
    return [0 if rank == 1 else 3 + 5 * rank for rank in range(size)]


def _part(rank: int, session: Session) -> Tensor:
    """Return the values that rank ``rank`` contributes: 100 * rank, 100 * rank + 1, ..."""
    return torch.arange(_part_sizes(session.size)[rank], device=session.device, dtype=torch.float32) + 100 * rank


# Every function below runs one collective, and returns the tensors received and the tensors expected.


def _all_reduce(session: Session) -> tuple[list[Tensor], list[Tensor]]:
    """Run an all_reduce of rank + 1; return its result and the expected one."""
    x = torch.full((5,), float(session.rank + 1), device=session.device)
    dist.all_reduce(x)
    return [x], [torch.full_like(x, session.size * (session.size + 1) / 2)]


def _all_to_all(session: Session) -> tuple[list[Tensor], list[Tensor]]:
    """Send this rank's whole part to every rank, so that each receives the parts of all."""
    sizes = _part_sizes(session.size)
    local_part = _part(session.rank, session)
    received = local_part.new_empty(sum(sizes))
    sent = local_part.repeat(session.size)
    dist.all_to_all_single(received, sent, sizes, [local_part.numel()] * session.size)
    return list(torch.split(received, sizes)), [_part(rank, session) for rank in range(session.size)]


def _reduce_scatter(session: Session) -> tuple[list[Tensor], list[Tensor]]:
    """Reduce gradients as ZeRO does with unequal partitions: rank r contributes r + 1 times every part."""
    parts = [_part(rank, session) for rank in range(session.size)]
    received = torch.empty_like(parts[session.rank])
    dist.reduce_scatter(received, [part * (session.rank + 1) for part in parts])
    return [received], [parts[session.rank] * (session.size * (session.size + 1) / 2)]


def _broadcasts(session: Session) -> tuple[list[Tensor], list[Tensor]]:
    """Gather as ZeRO does with unequal partitions: one broadcast per owner, all started before the first wait."""
    expected = [_part(rank, session) for rank in range(session.size)]
    received = [torch.empty_like(part) for part in expected]
    received[session.rank] = expected[session.rank].clone()
    works = [dist.broadcast(part, rank, async_op=True) for rank, part in enumerate(received) if part.numel()]
    for work in works:
        work.wait()
    return received, expected


def _messages(session: Session) -> tuple[list[Tensor], list[Tensor]]:
    """Make one step of a ring: send to the next rank and receive from the previous one, posted together."""
    target, source = (session.rank + 1) % session.size, (session.rank - 1) % session.size
    sent = torch.full((7 + session.rank,), float(session.rank), device=session.device)
    received = torch.empty(7 + source, device=session.device)
    if session.size > 1:
        operations = [dist.P2POp(dist.irecv, received, source), dist.P2POp(dist.isend, sent, target)]
        for work in dist.batch_isend_irecv(operations):
            work.wait()
    else:
        received.copy_(sent)
    return [received], [torch.full_like(received, float(source))]


def _bytes(session: Session) -> tuple[list[Tensor], list[Tensor]]:
    """Exchange short byte strings, as ranks do to agree on a decision; rank r sends r bytes."""
    _, texts = all_gather_bytes([session.rank], b"x" * session.rank)
    return [torch.tensor([len(text) for text in texts])], [torch.arange(session.size)]


_COLLECTIVES: dict[str, Callable[[Session], Any]] = {
    "all_reduce": _all_reduce,
    "all_gather of bytes": _bytes,
    "uneven all_to_all": _all_to_all,
    "uneven reduce_scatter": _reduce_scatter,
    "uneven broadcasts": _broadcasts,
    "messages around a ring": _messages,
}
