"""The collectives of the runtime with parts of unequal size, zero included, over all ranks.

How fast devices and links are, beside what the catalogue says of them; for information.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ds_hetero.cluster.catalogue import CATALOGUE
from ds_hetero.cluster.names import catalogue_name
from ds_hetero.common.reading import JsonObject
from ds_hetero.common.units import GB, GIB, TERA
from ds_hetero.profiler.device_probes import Timer, matmul_probe, memory_probe
from ds_hetero.profiler.link_probes import pair_round
from ds_hetero.profiler.pair_rounds import rounds_between, rounds_inside
from ds_hetero.runtime.collectives import all_gather_bytes
from ds_hetero.runtime.devices import default_dtype
from ds_hetero.selftest.meeting import Session
from ds_hetero.selftest.summary import Line


def check_collectives(session: Session) -> Iterator[Line]:
    """One line per collective."""
    for name, collective in _COLLECTIVES.items():
        with session.watch.call(name):
            got, wanted = collective(session)
            same = len(got) == len(wanted) and all(torch.equal(a, b) for a, b in zip(got, wanted, strict=True))
            dist.barrier()  # gloo tells a message of the wrong size in the call after it: let that be this one
        yield Line(name, "pass" if same else "fail", "" if same else "other values than were sent")


def _part_sizes(size: int) -> list[int]:
    """Elements of every rank's part: unequal, and none for the second rank."""
    return [0 if rank == 1 else 3 + 5 * rank for rank in range(size)]


def _part(rank: int, session: Session) -> Tensor:
    """The part of rank ``rank``."""
    return torch.arange(_part_sizes(session.size)[rank], device=session.device, dtype=torch.float32) + 100 * rank


def _all_reduce(session: Session) -> tuple[list[Tensor], list[Tensor]]:
    x = torch.full((5,), float(session.rank + 1), device=session.device)
    dist.all_reduce(x)
    return [x], [torch.full_like(x, session.size * (session.size + 1) / 2)]


def _all_to_all(session: Session) -> tuple[list[Tensor], list[Tensor]]:
    """Every rank sends its whole part to everybody."""
    sizes = _part_sizes(session.size)
    own = _part(session.rank, session)
    received = own.new_empty(sum(sizes))
    dist.all_to_all_single(received, own.repeat(session.size), sizes, [own.numel()] * session.size)
    return list(torch.split(received, sizes)), [_part(rank, session) for rank in range(session.size)]


def _reduce_scatter(session: Session) -> tuple[list[Tensor], list[Tensor]]:
    """The reduction of ZeRO with unequal partitions."""
    parts = [_part(rank, session) for rank in range(session.size)]
    received = torch.empty_like(parts[session.rank])
    dist.reduce_scatter(received, [part * (session.rank + 1) for part in parts])
    return [received], [parts[session.rank] * (session.size * (session.size + 1) / 2)]


def _broadcasts(session: Session) -> tuple[list[Tensor], list[Tensor]]:
    """How ZeRO with unequal partitions gathers: one broadcast per owner, all under way at once."""
    wanted = [_part(rank, session) for rank in range(session.size)]
    got = [part.clone() if rank == session.rank else torch.empty_like(part) for rank, part in enumerate(wanted)]
    works = [dist.broadcast(part, rank, async_op=True) for rank, part in enumerate(got) if part.numel()]
    for work in works:
        work.wait()
    return got, wanted


def _messages(session: Session) -> tuple[list[Tensor], list[Tensor]]:
    """A round of a ring: to the next rank, from the one before, posted together."""
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
    """The small messages by which ranks agree."""
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


def check_bandwidth(session: Session, described: JsonObject) -> Iterator[Line]:
    """One line per part, with what this rank measured."""
    name = catalogue_name(described["device"], int(described["memory_gib"] * GIB))
    entry = None if name is None or session.device.type == "cpu" else CATALOGUE[name]
    timer = Timer(session.device, 0.05 if session.quick else 0.2)
    dtype = default_dtype(session.device)
    with session.watch.call("products"):
        flops_per_s = matmul_probe(timer, dtype)
    text = f"{flops_per_s / TERA:.3g} TFLOPS in {str(dtype).removeprefix('torch.')}"
    text += _of(flops_per_s, None if entry is None else entry.device.peak_flops_per_s, TERA)
    yield Line("products", "info", text, flops_per_s)
    with session.watch.call("copies in memory"):
        bytes_per_s = memory_probe(timer)
    peak = None if entry is None else entry.device.memory_bytes_per_s
    yield Line("copies in memory", "info", f"{bytes_per_s / GB:.3g} GB/s" + _of(bytes_per_s, peak, GB), bytes_per_s)
    nodes: Sequence[Sequence[int]] = session.nodes
    for where, pairs in (rounds_inside(nodes) | rounds_between(nodes)).items():
        with session.watch.call(f"links {where}"):
            samples = pair_round(pairs, session.rank, session.device)
        if samples:
            largest = samples[-1]
            rate = largest.num_bytes / largest.seconds
            link = entry.link_bytes_per_s if entry is not None and where.startswith("inside") else None
            yield Line(f"links {where}", "info", f"{rate / GB:.3g} GB/s each way" + _of(rate, link, GB), rate)


def _of(measured: float, catalogued: float | None, unit: float) -> str:
    if not catalogued:
        return ""
    return f", {100 * measured / catalogued:.0f} % of the catalogue's {catalogued / unit:.4g}"
