"""The one way in which this engine waits for other ranks: in a named phase, with an error that says who is gone."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch.distributed as dist

from ds_hetero.errors import PeerError, StepError
from ds_hetero.runtime.peers.diagnosis import STEP
from ds_hetero.runtime.peers.watch import current_watch

# What gloo and NCCL say when another rank is gone; no class of exception tells it from other failures.
_LOST_PEER = re.compile(
    r"closed by peer|reset by peer|broken pipe|timed out|timeout|NCCL error|connection refused", re.I
)
_phase: ContextVar[str] = ContextVar("_phase", default="agreeing with the other ranks")


def current_phase() -> str:
    """Phase of this rank's work with the others: that of the innermost `waiting_for_peers`."""
    return _phase.get()


def is_lost_peer(error: BaseException) -> bool:
    """Whether ``error`` is a backend's way to say that another rank is gone."""
    if not isinstance(error, RuntimeError) or isinstance(error, PeerError):
        return False
    return isinstance(error, dist.DistError) or bool(_LOST_PEER.search(str(error)))


def lost_peer_error(error: BaseException, phase: str) -> PeerError | StepError:
    """The error to raise where a backend has reported ``error``: which rank is gone, or went another way.

    Args:
        phase: what this rank was doing.
    """
    watch = current_watch()
    diagnosis = None if watch is None else watch.explain()
    rank = dist.get_rank() if dist.is_initialized() else 0
    if diagnosis is None:
        return PeerError(
            f"another rank has closed its connections or stopped answering; which one is not known. Rank {rank} was "
            f"{phase}, and saw: {str(error).splitlines()[0]}"
        )
    kind = StepError if diagnosis.error == STEP else PeerError
    return kind(f"{diagnosis.text.rstrip('.')}. Rank {rank} was {phase}.")


@contextmanager
def waiting_for_peers(phase: str) -> Iterator[None]:
    """Raise an error that names the rank when a collective or a message inside fails because one is gone.

    Args:
        phase: what the ranks do together, to complete "rank 3 was ..."; the same on all ranks that meet inside.

    Raises:
        PeerError: a rank is gone, or has ended with an error of its own.
        StepError: a rank has ended or gone on without the others.
    """
    token = _phase.set(phase)
    try:
        yield
    except RuntimeError as error:
        if not is_lost_peer(error):
            raise
        raise lost_peer_error(error, phase) from error
    finally:
        _phase.reset(token)
