"""Send and receive the messages of the ring: one batch of them per round, and no barrier between rounds."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import NamedTuple

import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from ds_hetero.runtime.backends import pairs_by_order
from ds_hetero.runtime.peers.watch import waiting_for_peers
from ds_hetero.runtime.ring_groups import RingGroups


class Message(NamedTuple):
    """A contiguous tensor to send or to receive."""

    tensor: Tensor
    peer: int  # global rank of the other end
    tag: int  # distinguishes the messages of one round
    due: int = 0  # the receiver needs it before this step
    is_far: bool = False  # it may take several steps, so no other message should wait behind it


class PendingReceives:
    """Receives that have been posted and must end before a step.

    Sends are not among them: `Channel.finish` waits for these, so no step waits for a peer that is slow to receive. On
    a backend that pairs messages by order this holds where sends and receives have groups of their own, see
    `RingGroups`; those of a round that share a group are one batch, and end together.
    """

    def __init__(self, pending: Sequence[_Pending]) -> None:
        self._pending = pending

    def __add__(self, other: PendingReceives) -> PendingReceives:
        """Return the receives of both."""
        return PendingReceives((*self._pending, *other._pending))

    def wait(self) -> None:
        """Wait until all tensors have arrived (on CUDA: let the current stream wait)."""
        for pending in self._pending:
            pending.wait()


NOTHING = PendingReceives(())  # for a step before which nothing has to arrive


class Channel:
    """Posts the rounds of messages of one forward or backward; `finish` must be called once, at the pass's end.

    Args:
        groups: process groups of all ranks that exchange messages.

    Attributes:
        keeps_order: the backend pairs messages by the order in which rounds are posted, so all ranks must post them in
            the same order.
    """

    def __init__(self, groups: RingGroups) -> None:
        self._groups = groups
        self.keeps_order = pairs_by_order(groups.near)
        self._unfinished: list[_Pending] = []

    def post(self, receives: Sequence[Message], sends: Sequence[Message]) -> dict[int, PendingReceives]:
        """Post the messages of a round, and return its receives by the step before which they must end.

        Posts receives first: gloo queues the notice of a receive behind sends.
        """
        if self.keeps_order:
            return self._post_together(receives, sends)
        pending: dict[int, list[_Pending]] = defaultdict(list)
        for message in receives:
            work = dist.irecv(message.tensor, message.peer, group=self._groups.near, tag=message.tag)
            pending[message.due].append(_Pending(work, (message.tensor,)))
        for message in sends:
            work = dist.isend(message.tensor, message.peer, group=self._groups.near, tag=message.tag)
            self._unfinished.append(_Pending(work, (message.tensor,)))
        return {due_step: PendingReceives(of_step) for due_step, of_step in pending.items()}

    def finish(self) -> None:
        """Wait for the sends of all rounds, so that their buffers can be used again."""
        for pending in self._unfinished:
            pending.wait()
        self._unfinished = []

    def _post_together(self, receives: Sequence[Message], sends: Sequence[Message]) -> dict[int, PendingReceives]:
        """Post the messages of one group that are due at the same step as one batch, which ends as a whole.

        Batches are posted in one order on all ranks. The first message of a pair blocks the host until its peer has
        posted it, too: if one rank began with its receives and another one with its sends, they could wait for ever.
        """
        received_messages: dict[_Batch, list[Message]] = defaultdict(list)
        sent_messages: dict[_Batch, list[Message]] = defaultdict(list)
        process_groups: dict[int, ProcessGroup] = {}
        for messages, batches in ((receives, received_messages), (sends, sent_messages)):
            for message in messages:
                place, process_groups[place] = self._groups.of(message.peer, is_far=message.is_far)
                batches[_Batch(message.is_far, message.due, place)].append(message)
        pending_by_due: dict[int, PendingReceives] = {}
        for batch in sorted({*received_messages, *sent_messages}):
            received, sent = received_messages.get(batch, []), sent_messages.get(batch, [])
            group = process_groups[batch.group]
            operations = [dist.P2POp(dist.irecv, m.tensor, m.peer, group) for m in received]
            operations += [dist.P2POp(dist.isend, m.tensor, m.peer, group) for m in sent]
            tensors = tuple(message.tensor for message in (*received, *sent))
            pending = [_Pending(work, tensors) for work in dist.batch_isend_irecv(operations)]
            self._unfinished += pending
            if received:
                pending_by_due[batch.due] = pending_by_due.get(batch.due, NOTHING) + PendingReceives(pending)
        return pending_by_due


class _Batch(NamedTuple):
    """The messages that are posted together, in the order in which all ranks post their batches of a round."""

    is_far: bool
    due: int
    group: int  # place of the process group, see `RingGroups.of`


class _Pending:
    """Messages that have been posted; keeps their tensors alive until `wait`."""

    def __init__(self, work: dist.Work | None, tensors: tuple[Tensor, ...]) -> None:
        assert work is not None
        self._work: dist.Work | None = work
        self._tensors = tensors

    def wait(self) -> None:
        """Wait for the messages. Later calls return at once, since gloo would wait for another message."""
        if self._work is None:
            return
        with waiting_for_peers("exchanging keys and values in ring attention"):
            self._work.wait()
        self._work, self._tensors = None, ()
