"""Point-to-point traffic of the ring: one batch of receives and sends per round, and no barrier between rounds."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from ds_hetero.runtime.collectives import pairs_by_order
from ds_hetero.runtime.peers.waiting import waiting_for_peers

__all__ = ["NOTHING", "Channel", "Message", "PendingReceives"]


class Message(NamedTuple):
    """A contiguous tensor to receive from, or to send to, global rank ``peer``; tags pair messages of one round."""

    tensor: Tensor
    peer: int
    tag: int


class PendingReceives:
    """What a round receives, in flight. `Channel.finish` waits for the sends, so that no step waits for a slow peer."""

    def __init__(self, pending: Sequence[_Pending]) -> None:
        self._pending = pending

    def wait(self) -> None:
        """Wait until everything this round receives is here (on CUDA: make the current stream wait)."""
        for pending in self._pending:
            pending.wait()


NOTHING = PendingReceives(())  # of a round in which a group receives nothing


class Channel:
    """Rounds of messages over ``group`` within one pass of its rings; `finish` must be called once at its end.

    Attributes:
        keeps_order: messages are paired by the order in which rounds are posted, which must be one for all ranks.
    """

    def __init__(self, group: ProcessGroup) -> None:
        self._group = group
        self.keeps_order = pairs_by_order(group)
        self._unfinished: list[_Pending] = []

    def post(self, receives: Sequence[Message], sends: Sequence[Message]) -> PendingReceives:
        """Start all messages of a round: receives first, since gloo queues its readiness note behind a large send."""
        if self.keeps_order:
            return self._post_together(receives, sends)
        group = self._group
        pending = []
        for message in receives:
            work = dist.irecv(message.tensor, message.peer, group=group, tag=message.tag)
            pending.append(_Pending(work, (message.tensor,)))
        for message in sends:
            work = dist.isend(message.tensor, message.peer, group=group, tag=message.tag)
            self._unfinished.append(_Pending(work, (message.tensor,)))
        return PendingReceives(pending)

    def finish(self) -> None:
        """Wait for the sends of all rounds; their buffers may be reused afterwards."""
        for pending in self._unfinished:
            pending.wait()
        self._unfinished = []

    def _post_together(self, receives: Sequence[Message], sends: Sequence[Message]) -> PendingReceives:
        """Post a round as one group of messages, which is over when all of them are."""
        operations = [dist.P2POp(dist.irecv, m.tensor, m.peer, self._group) for m in receives]
        operations += [dist.P2POp(dist.isend, m.tensor, m.peer, self._group) for m in sends]
        if not operations:
            return PendingReceives([])
        tensors = tuple(message.tensor for message in (*receives, *sends))
        works = dist.batch_isend_irecv(operations)
        pending = [_Pending(work, tensors) for work in works]
        self._unfinished += pending
        return PendingReceives(pending)


class _Pending:
    """Messages that have been posted and not yet waited for; holds their tensors until then."""

    def __init__(self, work: dist.Work | None, tensors: tuple[Tensor, ...]) -> None:
        assert work is not None
        self._work: dist.Work | None = work
        self._tensors = tensors

    def wait(self) -> None:
        """Wait for the messages; later calls return at once, since gloo would wait for another message."""
        if self._work is None:
            return
        with waiting_for_peers("exchanging keys and values in ring attention"):
            self._work.wait()
        self._work, self._tensors = None, ()
