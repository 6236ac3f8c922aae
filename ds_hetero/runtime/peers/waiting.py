"""The one way in which this engine waits for other ranks: in a named phase, with an error that says who is gone."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch.distributed as dist

from ds_hetero.errors import PeerError

__all__ = ["current_phase", "is_lost_peer", "waiting_for_peers"]

# What gloo and NCCL say when another rank is gone; no class of exception tells it from other failures.
_LOST_PEER = re.compile(
    r"closed by peer|reset by peer|broken pipe|timed out|timeout|NCCL error|connection refused", re.I
)
_phase: ContextVar[str] = ContextVar("_phase", default="agreeing with the other ranks")


def current_phase() -> str:
    """What this rank is doing with the others: of the innermost `waiting_for_peers`."""
    return _phase.get()


def is_lost_peer(error: BaseException) -> bool:
    """Whether ``error`` is a backend's way to say that another rank is gone."""
    if not isinstance(error, RuntimeError) or isinstance(error, PeerError):
        return False
    return isinstance(error, dist.DistError) or bool(_LOST_PEER.search(str(error)))


@contextmanager
def waiting_for_peers(phase: str) -> Iterator[None]:
    """Raise `PeerError` when a collective or a message inside fails because another rank is gone.

    Args:
        phase: what the ranks do together, to complete "while ..."; the same on all ranks that meet inside.
    """
    token = _phase.set(phase)
    try:
        yield
    except RuntimeError as error:
        if not is_lost_peer(error):
            raise
        raise PeerError(
            f"rank {dist.get_rank()} failed while {phase}: another rank has failed or stopped answering. The log of "
            f"the rank that stopped first has the cause; this one saw: {str(error).splitlines()[0]}"
        ) from error
    finally:
        _phase.reset(token)
