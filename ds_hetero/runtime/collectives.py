"""How ranks speak of trouble: where small messages live, and a broken connection as one message with the remedy."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from ds_hetero.errors import PeerError

__all__ = ["message_device", "reporting_lost_peers"]


def message_device(group: ProcessGroup | None = None) -> torch.device:
    """Where ``group``, or the whole job, wants small tensors that belong to no parameter."""
    if "gloo" in dist.get_backend(group):
        return torch.device("cpu")
    return torch.device("cuda", torch.cuda.current_device())


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
