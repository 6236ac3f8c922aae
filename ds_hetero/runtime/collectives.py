"""Small messages between ranks: where they live, bytes for every rank, and a clear error where a rank is lost."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from ds_hetero.errors import PeerError

__all__ = ["all_gather_bytes", "message_device", "reporting_lost_peers"]


def message_device(group: ProcessGroup | None = None) -> torch.device:
    """Where small tensors must live to be exchanged by ``group``, or by the whole job."""
    if "gloo" in dist.get_backend(group):
        return torch.device("cpu")
    return torch.device("cuda", torch.cuda.current_device())


def all_gather_bytes(
    numbers: Sequence[int], payload: bytes, group: ProcessGroup | None = None
) -> tuple[list[list[int]], list[bytes]]:
    """Give every rank the integers and the bytes of every rank.

    Args:
        numbers: as many on every rank.
        payload: of any length.
        group: the ranks that take part; None for the whole job.

    Returns:
        The integers and the bytes, by rank of ``group``.

    Caller: every rank of ``group``.
    Collectives: one all_gather of ``len(numbers) + 1`` integers; one more of the longest payload, if there is any.
    """
    own = torch.tensor([*numbers, len(payload)], dtype=torch.int64, device=message_device(group))
    table = own.new_empty(dist.get_world_size(group), own.numel())
    dist.all_gather(list(table.unbind()), own, group=group)
    rows = table.tolist()
    sizes = [row.pop() for row in rows]
    if not any(sizes):
        return rows, [b""] * len(rows)
    padded = torch.frombuffer(bytearray(payload.ljust(max(sizes), b"\0")), dtype=torch.uint8).to(own.device)
    gathered = padded.new_empty(len(rows), max(sizes))
    dist.all_gather(list(gathered.unbind()), padded, group=group)
    texts = gathered.cpu().numpy()
    return rows, [text[:size].tobytes() for text, size in zip(texts, sizes, strict=True)]


@contextmanager
def reporting_lost_peers(doing: str) -> Iterator[None]:
    """Raise `PeerError` when a collective or a message inside fails.

    Args:
        doing: what this rank waits for, to complete "rank 3 failed while ...".
    """
    try:
        yield
    except RuntimeError as error:
        if isinstance(error, PeerError):
            raise
        raise PeerError(
            f"rank {dist.get_rank()} failed while {doing}: another rank has failed or stopped answering. The log of "
            f"the rank that stopped first has the cause; this one saw: {str(error).splitlines()[0]}"
        ) from error
