"""A recorded step of real code, played on a cluster: operations and messages of all ranks, in the order of streams.

A record (`python -m benchmarks.fake_gpu.played record`) says what every rank launches, posts and waits for. Here it
gets its times:

    host       launches one operation after the other and runs ahead of its device; a CPU is both in one
    device     runs operations in their order, each for its roofline: a product, attention, or bytes of memory
    messages   of a communicator follow one another beside the device. A collective begins when all its ranks are
               there, a message when both are, and neither before what the rank's device was given until then
    ports      carry one transfer after the other, first ready, first served: of a rank inside its node and outside,
               and the NIC that the ranks of a node share
    wait       holds the device until a call has ended, a sync the host until its device has

Rates are those of the calibrated cost model but for two that it has per layer and not per operation: a memory-bound
kernel moves all its bytes at the rate of a copy, and a launch takes its part of a layer's host time.
"""

from __future__ import annotations

import heapq
from collections import Counter, defaultdict, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import NamedTuple

import numpy as np

from ds_hetero.cluster.topology import Cluster
from ds_hetero.cost.terms.rates import COPY_SHARE, AchievedRates
from ds_hetero.cost.terms.zero import RingCollective
from ds_hetero.errors import PlanError

PRODUCT, ATTENTION, CAUSAL, MEMORY = "product", "attention", "causal", "memory"  # kinds of operations
WAIT, HOST = "wait", "host"  # why a device stands still
CPU = "CPU"  # what a profile calls devices that are their own host
LAUNCHES_OF_A_LAYER = 36  # forward, of transformers' Llama in eager mode: python -m benchmarks.fake_gpu.played record


class Operation(NamedTuple):
    """One launch."""

    name: str  # of the operator
    cause: str  # phase or module that launches it
    backward: bool  # in the backward, recomputation included
    kind: str  # one of this module's
    flops: int  # of products and attention; else 0
    num_bytes: int  # read and written
    rows: int = 0  # tokens of a product, or query rows (tokens x heads) of attention
    keys: int = 0  # of attention; else 0
    head_dim: int = 0  # of attention; else 0


class PostedMessage(NamedTuple):
    """A send to a rank of the job, or a receive from it."""

    sends: bool
    peer: int
    num_bytes: int


class PostedCall(NamedTuple):
    """A collective, or messages that are posted together."""

    number: int  # by which the rank waits for it
    name: str  # of the collective; empty for messages
    communicator: str  # its calls follow one another
    ranks: tuple[int, ...]  # of the job, in the order of the group
    num_bytes: int = 0  # of the whole tensor of a collective
    sent_bytes: tuple[int, ...] = ()  # to every rank of the group, of an all-to-all
    messages: tuple[PostedMessage, ...] = ()  # posted together


class Wait(NamedTuple):
    """The device waits for a call."""

    number: int


class Sync(NamedTuple):
    """The host waits for its device."""


Event = Operation | PostedCall | Wait | Sync


class PlayedSpan(NamedTuple):
    """Interval in which a rank's device (``"compute"``) or its links (``"network"``) do one thing."""

    stream: str
    name: str
    cause: str
    start_s: float
    stop_s: float


@dataclass(frozen=True, slots=True)
class PlayedStep:
    """A step with its times."""

    spans: tuple[tuple[PlayedSpan, ...], ...]  # by rank, in the order of their ends
    by_kind_s: tuple[Mapping[str, float], ...]  # by rank and kind, `WAIT` for messages, `HOST` for launches

    @property
    def step_s(self) -> float:
        """Until the last rank has ended."""
        return max(self._ends_s)

    @property
    def last_rank(self) -> int:
        """The rank that ends last."""
        return self._ends_s.index(self.step_s)

    @property
    def _ends_s(self) -> list[float]:
        return [sum(of_rank.values()) for of_rank in self.by_kind_s]


def play(events: Sequence[Sequence[Event]], cluster: Cluster, host_share: float = 1.0) -> PlayedStep:
    """Play a step. Raises `PlanError`: another number of ranks than the cluster's, or a wait for ever.

    Args:
        host_share: time of the host to launch a layer over that of a plain one, see `launch_time_factor`.
    """
    if len(events) != cluster.num_ranks:
        raise PlanError(
            f"the record has {len(events)} ranks, the cluster {cluster.num_ranks}. Give a cluster of as many ranks, "
            "or record the step for this one."
        )
    return _Player(events, cluster, host_share).run()


class _Rates(NamedTuple):
    """Rates of one device."""

    s_per_flop: float
    half_tokens: float
    attention_s_per_flop: tuple[float, float]  # forward, backward, of wide heads
    half_rows: float
    half_kv: float
    edge_keys: float
    s_per_byte: float
    launch_s: float
    attention_s: float  # of a block of attention, whatever it computes
    message_s: float  # of the host, for its part in a call
    is_host: bool

    def seconds(self, operation: Operation) -> float:
        """Time of one operation on the device."""
        fixed_s = self.launch_s if self.is_host else 0.0
        moved_s = operation.num_bytes * self.s_per_byte
        if operation.kind == MEMORY:
            return moved_s + fixed_s
        if operation.kind == PRODUCT:
            computed_s = operation.flops * self.s_per_flop * (1 + self.half_tokens / max(operation.rows, 1))
            return max(computed_s, moved_s) + fixed_s
        edge = 1 + 2 * self.edge_keys / operation.keys if operation.kind == CAUSAL else 1.0
        sizes = (1 + self.half_rows / operation.rows) * (1 + self.half_kv / operation.keys)
        computed_s = operation.flops * self.attention_s_per_flop[operation.backward] * (sizes + edge - 1)
        return max(computed_s, moved_s) + self.attention_s


def _rates(cluster: Cluster, head_dim: int, host_share: float) -> list[_Rates]:
    """Rates of every rank."""
    achieved = AchievedRates.of(cluster, causal=True, head_dim=head_dim)
    found = []
    for rank, device in enumerate(cluster.devices):
        own = device.efficiency
        share = 1.0 if own.is_profiled else COPY_SHARE
        forward, backward = (achieved.attention_flops_per_s[name][rank] for name in ("forward", "backward"))
        found.append(
            _Rates(
                s_per_flop=float(achieved.s_per_flop[rank]),
                half_tokens=own.matmul_half_tokens,
                attention_s_per_flop=(float(1 / forward), float(1 / backward)),
                half_rows=own.attention_half_rows,
                half_kv=own.attention_half_kv,
                edge_keys=own.attention_edge_keys,
                s_per_byte=1 / (share * device.memory_bytes_per_s),
                launch_s=host_share * (own.layer_host_s or own.kernel_overhead_s) / LAUNCHES_OF_A_LAYER,
                attention_s=own.attention_overhead_s,
                message_s=own.message_overhead_s,
                is_host=device.name.startswith(CPU),
            )
        )
    return found


@dataclass(slots=True)
class _Rank:
    """Where a rank is.

    Attributes:
        host_s, device_s: until when both have work.
        posted: calls that have not ended, with when the rank was ready for them, by communicator.
        num_calls: opened so far, by communicator and, of messages, sender and receiver.
        left: messages of an open call that have not ended, and the end of those that have.
    """

    next: int = 0  # its next event
    host_s: float = 0.0
    device_s: float = 0.0
    ends: dict[int, float] = field(default_factory=dict)  # of calls, by number
    posted: defaultdict[str, deque[tuple[PostedCall, float]]] = field(default_factory=lambda: defaultdict(deque))
    num_calls: Counter[tuple[str, tuple[int, int] | None]] = field(default_factory=Counter)
    left: dict[int, tuple[int, float]] = field(default_factory=dict)
    spans: list[PlayedSpan] = field(default_factory=list)
    by_kind_s: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))


class _Meeting(NamedTuple):
    """A collective, or a message between two ranks, by its number on the communicator."""

    communicator: str
    ends: tuple[int, int] | None  # sender and receiver; None of a collective
    number: int


class _Player:
    def __init__(self, events: Sequence[Sequence[Event]], cluster: Cluster, host_share: float) -> None:
        self._events, self._cluster = events, cluster
        widths = {e.head_dim for of_rank in events for e in of_rank if isinstance(e, Operation) and e.head_dim}
        self._rates = _rates(cluster, max(widths, default=128), host_share)
        self._links = _Links(cluster)
        self._ranks = [_Rank() for _ in events]
        self._meetings: defaultdict[_Meeting, dict[int, tuple[PostedCall, float]]] = defaultdict(dict)
        self._heap: list[tuple[float, int, _Meeting, int]] = []
        self._numbers = count()

    def run(self) -> PlayedStep:
        """Advance all ranks, then carry what is ready first, again and again."""
        for rank in range(len(self._ranks)):
            self._advance(rank)
        while self._heap:
            ready_s, _, meeting, num_bytes = heapq.heappop(self._heap)
            self._carry(meeting, ready_s, num_bytes)
        for rank, state in enumerate(self._ranks):
            if state.next < len(self._events[rank]):
                raise PlanError(
                    f"rank {rank} waits for ever at its event {state.next} of {len(self._events[rank])}: another rank "
                    "never posts its part. Record all ranks of one step with the same code."
                )
            self._stand_still(state, max(state.device_s, state.host_s), HOST)
        return PlayedStep(
            tuple(tuple(sorted(state.spans, key=lambda span: span.stop_s)) for state in self._ranks),
            tuple(dict(state.by_kind_s) for state in self._ranks),
        )

    def _advance(self, rank: int) -> None:
        """Play a rank's events until it waits for a call that has not ended."""
        state, rates, events = self._ranks[rank], self._rates[rank], self._events[rank]
        while state.next < len(events):
            event = events[state.next]
            if isinstance(event, Operation):
                self._run(state, rates, event)
            elif isinstance(event, PostedCall):
                state.host_s += rates.message_s if rates.is_host else rates.launch_s
                self._follow_host(state, rates)
                queue = state.posted[event.communicator]
                queue.append((event, max(state.host_s, state.device_s)))
                if len(queue) == 1:
                    self._open(rank, *queue[0])
            elif isinstance(event, Wait):
                end_s = state.ends.get(event.number)
                if end_s is None:
                    return
                self._stand_still(state, end_s, WAIT)
                if rates.is_host:
                    state.host_s = max(state.host_s, state.device_s)
            else:
                state.host_s = max(state.host_s, state.device_s)
            state.next += 1

    def _run(self, state: _Rank, rates: _Rates, operation: Operation) -> None:
        if not rates.is_host:
            state.host_s += rates.launch_s
            self._stand_still(state, state.host_s, HOST)
        seconds, start_s = rates.seconds(operation), state.device_s
        state.device_s += seconds
        state.by_kind_s[ATTENTION if operation.kind == CAUSAL else operation.kind] += seconds
        state.spans.append(PlayedSpan("compute", operation.name, operation.cause, start_s, state.device_s))
        if rates.is_host:
            state.host_s = state.device_s

    def _follow_host(self, state: _Rank, rates: _Rates) -> None:
        if rates.is_host:
            self._stand_still(state, state.host_s, HOST)

    def _stand_still(self, state: _Rank, until_s: float, why: str) -> None:
        if until_s > state.device_s:
            state.by_kind_s[why] += until_s - state.device_s
            if why == WAIT:
                state.spans.append(PlayedSpan("compute", WAIT, WAIT, state.device_s, until_s))
            state.device_s = until_s

    # --- messages

    def _open(self, rank: int, call: PostedCall, ready_s: float) -> None:
        """Let a call, the first of its communicator on this rank, meet those of the others."""
        state = self._ranks[rank]
        if call.name:
            self._meet(rank, call, None, ready_s, len(call.ranks))
            return
        state.left[call.number] = len(call.messages), ready_s
        for message in call.messages:
            ends = (rank, message.peer) if message.sends else (message.peer, rank)
            self._meet(rank, call, ends, ready_s, 2, message.num_bytes)
        if not call.messages:
            self._end(rank, call, ready_s)

    def _meet(
        self, rank: int, call: PostedCall, ends: tuple[int, int] | None, ready_s: float, size: int, num_bytes: int = 0
    ) -> None:
        counts, key = self._ranks[rank].num_calls, (call.communicator, ends)
        meeting = _Meeting(*key, counts[key])
        counts[key] += 1
        there = self._meetings[meeting]
        there[rank] = call, ready_s
        if len(there) == size:
            latest_s = max(ready for _, ready in there.values())
            heapq.heappush(self._heap, (latest_s, next(self._numbers), meeting, num_bytes))

    def _carry(self, meeting: _Meeting, ready_s: float, num_bytes: int) -> None:
        """Carry a collective or a message that all its ranks are ready for."""
        calls = {rank: call for rank, (call, _) in self._meetings.pop(meeting).items()}
        if meeting.ends is None:
            start_s, end_s = self._links.collective(calls, ready_s)
        else:
            start_s, end_s = self._links.message(*meeting.ends, num_bytes, ready_s)
        ended = []
        for rank, call in calls.items():
            state = self._ranks[rank]
            name = call.name or "message"
            state.spans.append(PlayedSpan("network", name, call.communicator, start_s, end_s))
            left, until_s = state.left.get(call.number, (1, 0.0))
            state.left[call.number] = left - 1, max(until_s, end_s)
            if left == 1:
                ended.append((rank, call, max(until_s, end_s)))
        for rank, call, until_s in ended:
            self._end(rank, call, until_s)

    def _end(self, rank: int, call: PostedCall, end_s: float) -> None:
        state = self._ranks[rank]
        state.ends[call.number] = end_s
        queue = state.posted[call.communicator]
        queue.popleft()
        if queue:
            following, ready_s = queue[0]
            self._open(rank, following, max(ready_s, end_s))
        events = self._events[rank]
        if state.next < len(events) and events[state.next] == Wait(call.number):
            self._advance(rank)


_Port = tuple[str, int, bool]
"""``"out"`` or ``"in"`` and a rank, or ``"nic out"`` or ``"nic in"`` and a node; whether it leads outside the node."""


class _Links:
    """Ports of a cluster, and until when each is taken."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster, self._node = cluster, cluster.node_of_rank.tolist()
        self._free_s: defaultdict[_Port, float] = defaultdict(float)
        self._rings: dict[tuple[int, ...], RingCollective] = {}

    def message(self, sender: int, receiver: int, num_bytes: int, ready_s: float) -> tuple[float, float]:
        """Begin and end of a message."""
        a, b = self._node[sender], self._node[receiver]
        seconds = num_bytes * float(self._cluster.node_p2p_s_per_byte[a, b])
        taken: dict[_Port, float] = {("out", sender, a != b): seconds, ("in", receiver, a != b): seconds}
        if a != b:
            taken["nic out", a, True] = num_bytes / float(self._cluster.nic_bytes_per_s[a])
            taken["nic in", b, True] = num_bytes / float(self._cluster.nic_bytes_per_s[b])
        return self._take(taken, ready_s, float(self._cluster.node_latency_s[a, b]))

    def collective(self, calls: Mapping[int, PostedCall], ready_s: float) -> tuple[float, float]:
        """Begin and end of a collective."""
        call = next(iter(calls.values()))
        if len(call.ranks) == 1:
            return ready_s, ready_s
        if call.sent_bytes:
            nodes = sorted({self._node[rank] for rank in call.ranks})
            latency_s = float(self._cluster.node_all_to_all_latency_s[np.ix_(nodes, nodes)].max())
            return self._take(self._exchanged(calls), ready_s, latency_s)
        ring = self._ring(call.ranks)
        rounds = 2 if "allreduce" in call.name else 1
        seconds = rounds * call.num_bytes * ring.s_per_byte
        outside = len({self._node[rank] for rank in call.ranks}) > 1
        taken: dict[_Port, float] = {(way, rank, outside): seconds for rank in call.ranks for way in ("out", "in")}
        return self._take(taken, ready_s, rounds * ring.latency_s)

    def _ring(self, ranks: tuple[int, ...]) -> RingCollective:
        if ranks not in self._rings:
            self._rings[ranks] = RingCollective.over(self._cluster.subset(ranks))
        return self._rings[ranks]

    def _exchanged(self, calls: Mapping[int, PostedCall]) -> dict[_Port, float]:
        """Seconds of every port of an all-to-all."""
        taken: defaultdict[_Port, float] = defaultdict(float)
        for sender, call in calls.items():
            for receiver, num_bytes in zip(call.ranks, call.sent_bytes, strict=True):
                if receiver == sender or not num_bytes:
                    continue
                a, b = self._node[sender], self._node[receiver]
                seconds = num_bytes * float(self._cluster.node_all_to_all_s_per_byte[a, b])
                taken["out", sender, a != b] += seconds
                taken["in", receiver, a != b] += seconds
                if a != b:
                    taken["nic out", a, True] += num_bytes / float(self._cluster.nic_bytes_per_s[a])
                    taken["nic in", b, True] += num_bytes / float(self._cluster.nic_bytes_per_s[b])
        return taken

    def _take(self, taken: Mapping[_Port, float], ready_s: float, latency_s: float) -> tuple[float, float]:
        """Take ports, each for so many seconds, once all are free."""
        start_s = max([ready_s, *(self._free_s[port] for port in taken)])
        for port, seconds in taken.items():
            self._free_s[port] = start_s + seconds
        return start_s, start_s + latency_s + max(taken.values(), default=0.0)
