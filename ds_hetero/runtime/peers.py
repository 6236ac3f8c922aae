"""Turns a backend's broken connection or time-out into one message that names the place and the remedy."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist

from ds_hetero.errors import PeerError

__all__ = ["reporting_lost_peers"]


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
