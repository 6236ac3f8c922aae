"""Point-to-point traffic of the ring: one batch of receives and sends per round, and no barrier between rounds."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import NamedTuple

import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from ds_hetero.runtime.backends import pairs_by_order
from ds_hetero.runtime.peers.watch import waiting_for_peers


class Message(NamedTuple):
    """A contiguous tensor to receive or to send."""

    tensor: Tensor
    peer: int  # global rank of the other end
    tag: int  # pairs messages of one round
    due: int = 0  # the receiver needs it before this step
    is_far: bool = False  # it may take several steps, and nothing is to wait behind it


class PendingReceives:
    """Receives in flight that end before a step. `Channel.finish` waits for sends, so no step waits for a slow peer."""

    def __init__(self, pending: Sequence[_Pending]) -> None:
        self._pending = pending

    def __add__(self, other: PendingReceives) -> PendingReceives:
        """Both together."""
        return PendingReceives((*self._pending, *other._pending))

    def wait(self) -> None:
        """Wait until everything is here (on CUDA: make the current stream wait)."""
        for pending in self._pending:
            pending.wait()


NOTHING = PendingReceives(())  # before a step for which nothing is received


class Channel:
    """Rounds of messages over ``group`` within one pass of its rings; `finish` must be called once at its end.

    Args:
        far_group: the same ranks, for far messages; where messages are paired by order, a group works on one after
            the other.

    Attributes:
        keeps_order: messages are paired by the order in which rounds are posted, which must be one for all ranks.
    """

    def __init__(self, group: ProcessGroup, far_group: ProcessGroup | None = None) -> None:
        self._group, self._far_group = group, far_group or group
        self.keeps_order = pairs_by_order(group)
        self._unfinished: list[_Pending] = []

    def post(self, receives: Sequence[Message], sends: Sequence[Message]) -> dict[int, PendingReceives]:
        """Start a round's messages, receives first (gloo queues notes behind sends); return receipts by due step."""
        if self.keeps_order:
            return self._post_together(receives, sends)
        pending: dict[int, list[_Pending]] = defaultdict(list)
        for message in receives:
            work = dist.irecv(message.tensor, message.peer, group=self._group, tag=message.tag)
            pending[message.due].append(_Pending(work, (message.tensor,)))
        for message in sends:
            work = dist.isend(message.tensor, message.peer, group=self._group, tag=message.tag)
            self._unfinished.append(_Pending(work, (message.tensor,)))
        return {due: PendingReceives(of_step) for due, of_step in pending.items()}

    def finish(self) -> None:
        """Wait for the sends of all rounds; their buffers may be reused afterwards."""
        for pending in self._unfinished:
            pending.wait()
        self._unfinished = []

    def _post_together(self, receives: Sequence[Message], sends: Sequence[Message]) -> dict[int, PendingReceives]:
        """Post what is due at the same step as one group of messages, which is over when all of them are."""
        pending_by_due: dict[int, PendingReceives] = {}
        for is_far, due in sorted({(message.is_far, message.due) for message in (*receives, *sends)}):
            group = self._far_group if is_far else self._group
            received, sent = (
                [message for message in messages if (message.is_far, message.due) == (is_far, due)]
                for messages in (receives, sends)
            )
            operations = [dist.P2POp(dist.irecv, m.tensor, m.peer, group) for m in received]
            operations += [dist.P2POp(dist.isend, m.tensor, m.peer, group) for m in sent]
            tensors = tuple(message.tensor for message in (*received, *sent))
            works = dist.batch_isend_irecv(operations)
            pending = [_Pending(work, tensors) for work in works]
            self._unfinished += pending
            if received:
                pending_by_due[due] = pending_by_due.get(due, NOTHING) + PendingReceives(pending)
        return pending_by_due


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
