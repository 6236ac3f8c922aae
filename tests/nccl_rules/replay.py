"""Replays what the ranks posted on communicators that behave as NCCL's do, and says what would hang or be wrong.

* A communicator runs its calls in the order of posting, on every rank; a call that has to wait holds up all behind it.
* A collective is the same call on all ranks, with the same sizes; in an uneven all-to-all what a sends to b is what b
  expects from a.
* Messages have no tags: the k-th from a to b meets the k-th receive that b posts for a, and tags that are given for
  other backends must be the same. Messages posted together make progress together; all have to be met before the call
  is over.
* What is posted after a wait runs after what was waited for, on whichever communicator.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from tests.nccl_rules.events import Call, Event, Message, Wait


@dataclass(eq=False)
class _Posted:
    """A call in the queue of its communicator on one rank."""

    call: Call
    global_rank: int
    num_waits: int  # of this rank, before it
    unmet: list[Message] = field(default_factory=list)

    def __str__(self) -> str:
        return f"rank {self.global_rank}: {self.call}"


class _Rank:
    """What one rank has waited for, and which of its calls are over."""

    def __init__(self) -> None:
        self.waited: list[int] = []
        self.done: set[int] = set()
        self._num_over = 0  # of `waited`, from its start

    def may_run(self, posted: _Posted) -> bool:
        """Return whether everything that the rank waited for before it posted this call is over."""
        while self._num_over < len(self.waited) and self.waited[self._num_over] in self.done:
            self._num_over += 1
        return self._num_over >= posted.num_waits


def violations(events_of_ranks: Sequence[Sequence[Event]]) -> list[str]:
    """Return what breaks NCCL's rules, one text each, with the calls that do not match; empty if nothing does.

    Args:
        events_of_ranks: by global rank, everything that it posted and waited for.
    """
    queues: dict[tuple[str, int], deque[_Posted]] = defaultdict(deque)
    ranks = [_Rank() for _ in events_of_ranks]
    for global_rank, (rank, events) in enumerate(zip(ranks, events_of_ranks, strict=True)):
        for event in events:
            if isinstance(event, Wait):
                rank.waited.append(event.work)
            else:
                posted = _Posted(event, global_rank, len(rank.waited), list(event.messages))
                queues[event.communicator, event.rank].append(posted)
    communicators = sorted({name for name, _ in queues})
    progress = True
    while progress:
        progress = False
        for communicator in communicators:
            heads = {
                rank: queue[0]
                for (name, rank), queue in queues.items()
                if name == communicator and queue and ranks[queue[0].global_rank].may_run(queue[0])
            }
            wrong, finished = _advance(heads)
            if wrong:
                return wrong
            for posted in finished:
                queues[communicator, posted.call.rank].popleft()
                ranks[posted.global_rank].done.add(posted.call.work)
                progress = True
    stuck = [queue[0] for queue in queues.values() if queue]
    if not stuck:
        return []
    held_up = {posted.global_rank for posted in stuck}
    listed = [*sorted(map(str, stuck)), *_last_calls(events_of_ranks, held_up)]
    return ["calls that wait for each other, or for a call that no rank makes:\n  " + "\n  ".join(listed)]


def _last_calls(events_of_ranks: Sequence[Sequence[Event]], held_up: set[int]) -> list[str]:
    """The last call of every rank whose calls are all over."""
    calls = {rank: [e for e in events if isinstance(e, Call)] for rank, events in enumerate(events_of_ranks)}
    return [
        f"rank {rank} makes no further call after: {of_rank[-1] if of_rank else 'none'}"
        for rank, of_rank in calls.items()
        if rank not in held_up
    ]


def _advance(heads: dict[int, _Posted]) -> tuple[list[str], list[_Posted]]:
    """Let the calls at the heads of one communicator's queues meet; return what is wrong, and which calls are over."""
    collectives = {rank: posted for rank, posted in heads.items() if posted.call.name}
    if collectives:
        first = next(iter(collectives.values()))
        for other in collectives.values():
            if (other.call.name, other.call.shape) != (first.call.name, first.call.shape):
                return [f"the ranks of a communicator make different calls:\n  {first}\n  {other}"], []
        if len(collectives) == first.call.size:
            return _check_splits(collectives), list(collectives.values())
    for rank, posted in heads.items():
        for message in [message for message in posted.unmet if message.sends]:
            receiver = heads.get(message.peer)
            meeting = _first_receive(receiver, rank)
            if receiver is None or meeting is None or _first_send(posted, message.peer) is not message:
                continue
            if (meeting.num_bytes, meeting.dtype) != (message.num_bytes, message.dtype):
                return [f"a message and its receive differ in size or type:\n  {posted}\n  {receiver}"], []
            if meeting.tag != message.tag:
                return [f"messages that meet by their order have other tags:\n  {posted}\n  {receiver}"], []
            posted.unmet.remove(message)
            receiver.unmet.remove(meeting)
    return [], [posted for posted in heads.values() if posted.call.messages and not posted.unmet]


def _first_receive(posted: _Posted | None, source: int) -> Message | None:
    if posted is None:
        return None
    return next((message for message in posted.unmet if not message.sends and message.peer == source), None)


def _first_send(posted: _Posted, target: int) -> Message | None:
    return next((message for message in posted.unmet if message.sends and message.peer == target), None)


def _check_splits(collectives: dict[int, _Posted]) -> list[str]:
    for rank, sender in collectives.items():
        for peer, receiver in collectives.items():
            if sender.call.splits is None or receiver.call.splits is None:
                continue
            sent, expected = sender.call.splits[0][peer], receiver.call.splits[1][rank]
            if sent != expected:
                return [f"{sent} elements are sent where {expected} are expected:\n  {sender}\n  {receiver}"]
    return []
