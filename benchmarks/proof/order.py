"""Represent the waits among the calls of all ranks as a graph: can a step lock up, whatever arrives first?

Nodes are the start and the end of every call, and every wait of a rank. These have to be over before:

* a call starts after the one before it on its communicator, and after all calls that its rank had waited for when it
  posted it (a CUDA stream that waits holds up later calls, as a waiting host does);
* a collective ends once it has started on all ranks of its communicator;
* messages that are posted together end once all of them have met: a send and its receive, which both have started.
  Nothing is buffered, so that the result does not depend on sizes;
* the first message of a pair in one direction on a communicator, alone or as a part of an all-to-all, connects the two:
  the rank posts nothing further until its peer has reached the matching call (NCCL's ncclTransportP2pSetup, which
  blocks the host inside ncclGroupEnd), whatever its streams wait for;
* if the events begin before a communicator is made, all its ranks make its first call, and each waits for the others in
  it: making a communicator late blocks the host, and a first call of only some ranks is undefined.

No call takes what comes first: the k-th message from a to b meets the k-th receive of b from a on that communicator,
and the k-th collective of a rank meets those of the others. So there is one graph whatever the speed of links and
ranks, and a step ends in every order of arrival if and only if the graph has no cycle and every call its counterparts.

These are NCCL's rules if messages have the communicator of their group. For gloo, which matches by tags, every message
has a communicator of its ends and its tag, is posted alone, and connects nothing.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import zip_longest

from benchmarks.proof.events import Call, Event, Message, Wait


@dataclass(eq=False, slots=True)
class _Posted:
    """A call of a rank, and its nodes."""

    call: Call
    rank: int  # global
    reached: int  # the rank's program is there
    start: int
    end: int
    returned: int | None = None  # the rank's program goes on, where the call lets it wait

    def __str__(self) -> str:
        return f"rank {self.rank}: {self.call}"


@dataclass(eq=False)
class _Graph:
    """The graph; nodes are numbers.

    Attributes:
        after: by node, the nodes that wait for it.
        owners: by node, the call whose start, end or wait it is; None for a meeting.
        missing: calls that lack a counterpart.
    """

    after: list[list[int]] = field(default_factory=list)
    owners: list[_Posted | None] = field(default_factory=list)
    missing: list[_Posted] = field(default_factory=list)

    def node(self, owner: _Posted | None, *before: int | None) -> int:
        """Add a node."""
        number = len(self.after)
        self.after.append([])
        self.owners.append(owner)
        for other in before:
            if other is not None:
                self.after[other].append(number)
        return number

    def stuck(self) -> list[int]:
        """Return the nodes of a cycle, each of which waits for the next; empty if there is none."""
        waits = [0] * len(self.after)
        for successors in self.after:
            for node in successors:
                waits[node] += 1
        ready = [node for node, count in enumerate(waits) if not count]
        while ready:
            for node in self.after[ready.pop()]:
                waits[node] -= 1
                if not waits[node]:
                    ready.append(node)
        waiting = {node for node, count in enumerate(waits) if count}
        before: dict[int, int] = {}
        for node in waiting:
            before.update((later, node) for later in self.after[node] if later in waiting)
        path: dict[int, None] = {}
        current = next(iter(waiting), None)
        while current is not None and current not in path:
            path[current] = None
            current = before[current]
        nodes = list(path)
        return nodes[nodes.index(current) :] if current is not None else []


def violations(
    events_of_ranks: Sequence[Sequence[Event]], *, connects: bool = True, from_the_start: bool = False
) -> list[str]:
    """Return what would hang or be wrong, one text each, with the calls that do not match; empty if nothing would.

    Args:
        events_of_ranks: by global rank, all calls and waits, in order.
        connects: whether first messages connect, as on NCCL.
        from_the_start: whether the events begin before any communicator was made.
    """
    graph = _Graph()
    collectives: dict[str, dict[int, list[_Posted]]] = defaultdict(lambda: defaultdict(list))
    messages: dict[tuple[str, int, int], tuple[list[_Met], list[_Met]]] = defaultdict(lambda: ([], []))
    first_calls = _FirstCalls(connects, from_the_start)
    last: list[_Posted | None] = []
    for rank, events in enumerate(events_of_ranks):
        last.append(_add_rank(graph, rank, events, collectives, messages, first_calls))
    wrong = [*_meet_collectives(graph, collectives), *_meet_messages(graph, messages), *first_calls.meet(graph)]
    if wrong:
        return wrong[:1]
    if cycle := graph.stuck():
        calls = dict.fromkeys(owner for node in cycle if (owner := graph.owners[node]) is not None)
        return ["calls that wait for each other:\n  " + "\n  ".join(map(str, calls))]
    if graph.missing:
        alone = {posted.rank for posted in graph.missing}
        others = [
            f"rank {rank} makes no further call after: {'none' if posted is None else posted.call}"
            for rank, posted in enumerate(last)
            if rank not in alone
        ]
        listed = [*sorted(map(str, dict.fromkeys(graph.missing))), *others]
        return ["calls that wait for a call that no rank makes:\n  " + "\n  ".join(listed)]
    return []


_Met = tuple[_Posted, Message]
_PAIR = ", pair"  # in the name of a communicator of two ranks, for messages that are posted alone


class _FirstCalls:
    """Calls in which a rank waits for others, because they connect or make a communicator.

    Args:
        connects: whether first messages connect.
        makes: whether first calls make a communicator.
    """

    def __init__(self, connects: bool, makes: bool) -> None:
        self._connects, self._makes = connects, makes
        self._ends: dict[tuple[str, int, int], dict[int, _Posted]] = defaultdict(dict)  # by pair, by rank in the group
        self._makers: dict[str, dict[int, _Posted]] = defaultdict(dict)  # by communicator, by rank in the group

    def blocks(self, posted: _Posted) -> bool:
        """Record a call, in the order of its rank; return whether the rank waits in it for others."""
        call = posted.call
        is_first = False
        for sender, receiver in _directions(call) if self._connects else ():
            ends = self._ends[call.communicator, sender, receiver]
            if call.rank not in ends:
                ends[call.rank], is_first = posted, True
        if self._makes and _PAIR not in call.communicator and call.rank not in self._makers[call.communicator]:
            self._makers[call.communicator][call.rank], is_first = posted, True
        return is_first

    def meet(self, graph: _Graph) -> list[str]:
        """Add these waits to the graph; return first calls that not all ranks of a communicator make."""
        for ends in self._ends.values():
            _wait_for_each_other(graph, list(ends.values()))
        for makers in self._makers.values():
            _wait_for_each_other(graph, list(makers.values()))
        return [
            "a communicator is used by some of its ranks alone, and so never made:\n  "
            + "\n  ".join(map(str, makers.values()))
            for makers in self._makers.values()
            if len(makers) < next(iter(makers.values())).call.size
        ]


def _directions(call: Call) -> list[tuple[int, int]]:
    """Return senders and receivers, as ranks in the group, of the messages that a call consists of."""
    ends = [(call.rank, m.peer) if m.sends else (m.peer, call.rank) for m in call.messages]
    if call.splits is not None:
        sent, received = call.splits
        ends += [(call.rank, peer) for peer, size in enumerate(sent) if size]
        ends += [(peer, call.rank) for peer, size in enumerate(received) if size]
    return [(sender, receiver) for sender, receiver in ends if sender != receiver]


def _wait_for_each_other(graph: _Graph, calls: Sequence[_Posted]) -> None:
    for call in calls:
        for other in calls:
            if other is not call and call.returned is not None:
                graph.after[other.reached].append(call.returned)


def _add_rank(
    graph: _Graph,
    rank: int,
    events: Sequence[Event],
    collectives: dict[str, dict[int, list[_Posted]]],
    messages: dict[tuple[str, int, int], tuple[list[_Met], list[_Met]]],
    first_calls: _FirstCalls,
) -> _Posted | None:
    """Add the nodes of a rank and their order; return its last call."""
    by_work: dict[int, _Posted] = {}
    before: dict[str, int] = {}  # end of the latest call, by communicator
    gate: int | None = None  # of all that the rank has waited for
    posted = None
    for event in events:
        if isinstance(event, Wait):
            if event.work in by_work:
                waited = by_work.pop(event.work)
                gate = graph.node(waited, gate, waited.end)
            continue
        posted = _Posted(event, rank, 0, 0, 0)
        posted.reached = graph.node(posted, gate)
        posted.start = graph.node(posted, posted.reached, before.get(event.communicator))
        posted.end = graph.node(posted, posted.start)
        before[event.communicator] = posted.end
        by_work[event.work] = posted
        if first_calls.blocks(posted):
            posted.returned = gate = graph.node(posted, posted.reached)
        if event.name:
            collectives[event.communicator][event.rank].append(posted)
        for message in event.messages:
            ends = (event.rank, message.peer) if message.sends else (message.peer, event.rank)
            messages[(event.communicator, *ends)][not message.sends].append((posted, message))
    return posted


def _meet_collectives(graph: _Graph, collectives: dict[str, dict[int, list[_Posted]]]) -> list[str]:
    wrong = []
    for by_rank in collectives.values():
        for made in zip_longest(*by_rank.values()):
            calls = [posted for posted in made if posted is not None]
            first = calls[0]
            wrong += [
                f"the ranks of a communicator make different calls:\n  {first}\n  {other}"
                for other in calls
                if (other.call.name, other.call.shape) != (first.call.name, first.call.shape)
            ]
            if len(calls) < first.call.size:
                graph.missing += calls
                continue
            wrong += _check_splits(calls)
            meeting = graph.node(None, *(posted.start for posted in calls))
            graph.after[meeting] += [posted.end for posted in calls]
    return wrong


def _check_splits(calls: Sequence[_Posted]) -> list[str]:
    if any(posted.call.splits is None for posted in calls):
        return []
    for sender in calls:
        for receiver in calls:
            assert sender.call.splits is not None and receiver.call.splits is not None
            sent, expected = sender.call.splits[0][receiver.call.rank], receiver.call.splits[1][sender.call.rank]
            if sent != expected:
                return [f"{sent} elements are sent where {expected} are expected:\n  {sender}\n  {receiver}"]
    return []


def _meet_messages(graph: _Graph, messages: dict[tuple[str, int, int], tuple[list[_Met], list[_Met]]]) -> list[str]:
    wrong = []
    for sends, receives in messages.values():
        for (sender, sent), (receiver, received) in zip(sends, receives, strict=False):
            if (sent.num_bytes, sent.dtype) != (received.num_bytes, received.dtype):
                wrong.append(f"a message and its receive differ in size or type:\n  {sender}\n  {receiver}")
            elif sent.tag != received.tag:
                wrong.append(f"messages that meet by their order have other tags:\n  {sender}\n  {receiver}")
            graph.after[sender.start].append(receiver.end)
            graph.after[receiver.start].append(sender.end)
        both = min(len(sends), len(receives))
        graph.missing += [posted for posted, _ in (*sends[both:], *receives[both:])]
    return wrong
