"""Point-to-point traffic of the ring: one batch of receives and sends per round, and no barrier between rounds."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from ds_hetero.runtime.collectives import reporting_lost_peers

__all__ = ["Channel", "Message", "PendingReceives"]


class Message(NamedTuple):
    """A contiguous tensor to receive from, or to send to, global rank ``peer``; tags pair messages of one round."""

    tensor: Tensor
    peer: int
    tag: int


class PendingReceives:
    """What a round receives, in flight. `Channel.finish` waits for the sends, so that no step waits for a slow peer."""

    def __init__(self, receives: list[tuple[dist.Work, int]]) -> None:
        self._receives = receives

    def wait(self) -> None:
        """Wait until everything this round receives is here (on CUDA: make the current stream wait)."""
        for work, peer in self._receives:
            _wait(work, peer, "receiving from")
        self._receives = []


class Channel:
    """Rounds of messages over ``group`` within one pass of a ring; `finish` must be called once at its end."""

    def __init__(self, group: ProcessGroup) -> None:
        self._group = group
        self._coalesce = dist.get_backend(group) == "nccl"
        self._sends: list[tuple[dist.Work, int, Tensor | None]] = []

    def post(self, receives: Sequence[Message], sends: Sequence[Message]) -> PendingReceives:
        """Start all messages of a round: receives first, since gloo queues its readiness note behind a large send."""
        if self._coalesce:
            return self._post_coalesced(receives, sends)
        group = self._group
        pending = []
        for message in receives:
            work = dist.irecv(message.tensor, message.peer, group=group, tag=message.tag)
            assert work is not None
            pending.append((work, message.peer))
        for message in sends:
            work = dist.isend(message.tensor, message.peer, group=group, tag=message.tag)
            assert work is not None
            self._sends.append((work, message.peer, message.tensor))
        return PendingReceives(pending)

    def finish(self) -> None:
        """Wait for the sends of all rounds; their buffers may be reused afterwards."""
        for work, peer, _ in self._sends:
            _wait(work, peer, "sending to")
        self._sends = []

    def _post_coalesced(self, receives: Sequence[Message], sends: Sequence[Message]) -> PendingReceives:
        ops = [dist.P2POp(dist.irecv, m.tensor, m.peer, self._group) for m in receives]
        ops += [dist.P2POp(dist.isend, m.tensor, m.peer, self._group) for m in sends]
        if not ops:
            return PendingReceives([])
        peer = (receives or sends)[0].peer
        works = dist.batch_isend_irecv(ops)
        self._sends += [(work, peer, m.tensor) for work in works for m in sends]
        return PendingReceives([(work, peer) for work in works])


def _wait(work: dist.Work, peer: int, doing: str) -> None:
    with reporting_lost_peers(f"{doing} rank {peer} in ring attention"):
        work.wait()
