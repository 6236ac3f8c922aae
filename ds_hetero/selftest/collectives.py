"""The collectives of the runtime with parts of unequal size, zero included, over all ranks."""

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
    """Yield one line per collective."""
    for name, collective in _COLLECTIVES.items():
        with session.watch.call(name):
            got, wanted = collective(session)
            same = len(got) == len(wanted) and all(torch.equal(a, b) for a, b in zip(got, wanted, strict=True))
            dist.barrier()  # gloo tells a message of the wrong size in the call after it: let that be this one
        yield Line(name, "pass" if same else "fail", "" if same else "other values than were sent")


def _part_sizes(size: int) -> list[int]:
    """Return elements of every rank's part: unequal, and none for the second rank."""
    return [0 if rank == 1 else 3 + 5 * rank for rank in range(size)]


def _part(rank: int, session: Session) -> Tensor:
    """Return the part of rank ``rank``."""
    return torch.arange(_part_sizes(session.size)[rank], device=session.device, dtype=torch.float32) + 100 * rank


def _all_reduce(session: Session) -> tuple[list[Tensor], list[Tensor]]:
    x = torch.full((5,), float(session.rank + 1), device=session.device)
    dist.all_reduce(x)
    return [x], [torch.full_like(x, session.size * (session.size + 1) / 2)]


def _all_to_all(session: Session) -> tuple[list[Tensor], list[Tensor]]:
    """Send the whole part of every rank to all ranks, and compare."""
    sizes = _part_sizes(session.size)
    own = _part(session.rank, session)
    received = own.new_empty(sum(sizes))
    dist.all_to_all_single(received, own.repeat(session.size), sizes, [own.numel()] * session.size)
    return list(torch.split(received, sizes)), [_part(rank, session) for rank in range(session.size)]


def _reduce_scatter(session: Session) -> tuple[list[Tensor], list[Tensor]]:
    """Return the reduction of ZeRO with unequal partitions."""
    parts = [_part(rank, session) for rank in range(session.size)]
    received = torch.empty_like(parts[session.rank])
    dist.reduce_scatter(received, [part * (session.rank + 1) for part in parts])
    return [received], [parts[session.rank] * (session.size * (session.size + 1) / 2)]


def _broadcasts(session: Session) -> tuple[list[Tensor], list[Tensor]]:
    """Gather as ZeRO with unequal partitions does: one broadcast per owner, all under way at once."""
    wanted = [_part(rank, session) for rank in range(session.size)]
    got = [part.clone() if rank == session.rank else torch.empty_like(part) for rank, part in enumerate(wanted)]
    works = [dist.broadcast(part, rank, async_op=True) for rank, part in enumerate(got) if part.numel()]
    for work in works:
        work.wait()
    return got, wanted


def _messages(session: Session) -> tuple[list[Tensor], list[Tensor]]:
    """Return a round of a ring: to the next rank, from the one before, posted together."""
    to, source = (session.rank + 1) % session.size, (session.rank - 1) % session.size
    sent = torch.full((7 + session.rank,), float(session.rank), device=session.device)
    received = torch.empty(7 + source, device=session.device)
    if session.size > 1:
        operations = [dist.P2POp(dist.irecv, received, source), dist.P2POp(dist.isend, sent, to)]
        for work in dist.batch_isend_irecv(operations):
            work.wait()
    else:
        received.copy_(sent)
    return [received], [torch.full_like(received, float(source))]


def _bytes(session: Session) -> tuple[list[Tensor], list[Tensor]]:
    """Return the small messages by which ranks agree."""
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
