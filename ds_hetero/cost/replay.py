"""Trace replay: when every operation and message of a recorded step would begin and end on a given cluster.

A record (`python -m benchmarks.fake_gpu.played record`) lists what every rank launches, posts and waits for. The replay
adds times by these rules:

    host       launches one operation after the other and runs ahead of its device; a CPU is both in one
    device     runs operations in order; the roofline gives the time of a matmul, of attention, or of memory traffic
    messages   run beside the device, one after the other on each communicator. A collective begins when all its ranks
               have posted it, a message when sender and receiver have posted it; neither begins before the device of
               each of these ranks has ended the operations that were launched before the call
    ports      carry one transfer after the other, in the order in which they are ready. A rank has a port to its node
               and one to other nodes; the ranks of a node may share a NIC
    wait       stops the device until a call has ended
    sync       stops the host until its device has ended

Rates are those of the calibrated cost model, with two exceptions, which that model has for layers and not for single
operations: a memory-bound kernel moves all its bytes at the rate of a copy, and a launch takes a fraction of a layer's
host time.

Example: two ranks launch a matmul of 5 ms and of 8 ms, post an all-reduce of 4 ms, launch 3 ms of other work and then
wait for the call. The all-reduce runs from 8 to 12 ms. The first rank computes until 8 ms and waits 4 ms; the second
one computes until 11 ms and waits 1 ms. The step takes 12 ms.
"""

from __future__ import annotations

import heapq
from collections import Counter, defaultdict, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, count
from typing import NamedTuple

import numpy as np

from ds_hetero.cluster.topology import Cluster
from ds_hetero.cost.terms.rates import COPY_SHARE, AchievedRates
from ds_hetero.cost.terms.zero import RingCollective
from ds_hetero.errors import PlanError

PRODUCT, ATTENTION, CAUSAL, MEMORY = "product", "attention", "causal", "memory"  # kinds of operations
WAIT, HOST = "wait", "host"  # why a device is idle: it waits for a message, or for its host to launch
CPU = "CPU"  # prefix of the device names that a profile gives to CPUs, which are their own host
# Launches of one layer's forward in transformers' Llama in eager mode: python -m benchmarks.fake_gpu.played record
LAUNCHES_OF_A_LAYER = 36


class Operation(NamedTuple):
    """One kernel that the host launches."""

    name: str  # name of the operator
    cause: str  # phase or module that launches it
    backward: bool  # whether it runs in the backward, recomputation included
    kind: str  # `PRODUCT`, `ATTENTION`, `CAUSAL` (attention under a causal mask) or `MEMORY`
    flops: int  # FLOPs of a matmul or of attention; else 0
    num_bytes: int  # bytes read and written
    rows: int = 0  # tokens of a matmul, or query rows (tokens x heads) of attention
    keys: int = 0  # keys of attention; else 0
    head_dim: int = 0  # head size of attention; else 0


class PostedMessage(NamedTuple):
    """A send to a rank of the job, or a receive from it."""

    sends: bool  # True for a send, False for a receive
    peer: int  # the other rank
    num_bytes: int  # bytes of the message


class PostedCall(NamedTuple):
    """A collective, or messages that are posted together."""

    number: int  # number of the call, which `Wait` refers to
    name: str  # name of the collective; empty for messages
    communicator: str  # name of the communicator, whose calls run one after the other
    ranks: tuple[int, ...]  # ranks of the job, in the order of the group
    num_bytes: int = 0  # bytes of the whole tensor of a collective
    sent_bytes: tuple[int, ...] = ()  # bytes to every rank of the group, in an all-to-all
    messages: tuple[PostedMessage, ...] = ()  # messages that are posted together


class Wait(NamedTuple):
    """The device waits until a call has ended."""

    number: int  # number of the call


class Sync(NamedTuple):
    """The host waits until its device has ended all that was launched."""


Event = Operation | PostedCall | Wait | Sync


class ReplayedSpan(NamedTuple):
    """Interval in which a rank's device runs one operation, or its links carry one call."""

    stream: str  # ``"compute"`` or ``"network"``
    name: str  # name of the operation or of the collective, ``"message"``, or `WAIT`
    cause: str  # phase or module of an operation, communicator of a call
    start_s: float
    stop_s: float


@dataclass(frozen=True, slots=True)
class ReplayedStep:
    """Times of a replayed step."""

    spans: tuple[tuple[ReplayedSpan, ...], ...]  # intervals by rank, in the order of their ends
    by_kind_s: tuple[Mapping[str, float], ...]  # seconds of the device by rank and kind of operation, `WAIT` or `HOST`

    @property
    def step_s(self) -> float:
        """Time of the step: until the last rank has ended."""
        return max(self._ends_s)

    @property
    def last_rank(self) -> int:
        """The rank that ends last."""
        return self._ends_s.index(self.step_s)

    @property
    def _ends_s(self) -> list[float]:
        """Time at which every rank ends: the sum of its device's times, since idle times count, too."""
        return [sum(kind_s.values()) for kind_s in self.by_kind_s]


def replay(events: Sequence[Sequence[Event]], cluster: Cluster, host_share: float = 1.0) -> ReplayedStep:
    """Replay a recorded step on a cluster.

    Args:
        events: events of every rank, in the order in which the rank's host runs them.
        host_share: time of the host to launch a layer, as a multiple of a plain layer's: see `launch_time_factor`.

    Raises:
        PlanError: the record and the cluster have different numbers of ranks, or a rank waits for a call forever.
    """
    if len(events) != cluster.num_ranks:
        raise PlanError(
            f"the record has {len(events)} ranks, the cluster {cluster.num_ranks}. Give a cluster of as many ranks, "
            "or record the step for this one."
        )
    return _Replay(events, cluster, host_share).run()


class _Rates(NamedTuple):
    """Rates of one device; `AchievedRates` explains those without a comment."""

    s_per_flop: float
    half_tokens: float
    attention_s_per_flop: tuple[float, float]  # forward, backward; for the widest heads of the record
    half_rows: float
    half_kv: float
    edge_keys: float
    s_per_byte: float
    launch_s: float  # time of the host to launch one operation
    attention_s: float  # fixed time of one block of attention
    message_s: float  # time of the host to post a call
    is_host: bool  # whether the device is a CPU

    def seconds(self, operation: Operation) -> float:
        """Return the time of one operation on the device."""
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
    """Compute the rates of every rank's device."""
    achieved = AchievedRates.of(cluster, causal=True, head_dim=head_dim)
    rates = []
    for rank, device in enumerate(cluster.devices):
        efficiency = device.efficiency
        share = 1.0 if efficiency.is_profiled else COPY_SHARE
        forward, backward = (achieved.attention_flops_per_s[name][rank] for name in ("forward", "backward"))
        layer_launch_s = host_share * (efficiency.layer_host_s or efficiency.kernel_overhead_s)
        rates.append(
            _Rates(
                s_per_flop=float(achieved.s_per_flop[rank]),
                half_tokens=efficiency.matmul_half_tokens,
                attention_s_per_flop=(float(1 / forward), float(1 / backward)),
                half_rows=efficiency.attention_half_rows,
                half_kv=efficiency.attention_half_kv,
                edge_keys=efficiency.attention_edge_keys,
                s_per_byte=1 / (share * device.memory_bytes_per_s),
                launch_s=layer_launch_s / LAUNCHES_OF_A_LAYER,
                attention_s=efficiency.attention_overhead_s,
                message_s=efficiency.message_overhead_s,
                is_host=device.name.startswith(CPU),
            )
        )
    return rates


@dataclass(slots=True)
class _RankState:
    """State of one rank during the replay.

    Attributes:
        host_s, device_s: times until which host and device have work.
        posted: calls that have not ended, and the times at which the rank was ready for them, by communicator.
        num_calls: number of transfers opened so far, by communicator, and for messages by sender and receiver.
        unfinished: by number of an open call, how many of its messages have not ended, and the latest end of the
            others.
    """

    next: int = 0  # index of the next event
    host_s: float = 0.0
    device_s: float = 0.0
    ends: dict[int, float] = field(default_factory=dict)  # end of every call that has ended, by its number
    posted: defaultdict[str, deque[tuple[PostedCall, float]]] = field(default_factory=lambda: defaultdict(deque))
    num_calls: Counter[tuple[str, tuple[int, int] | None]] = field(default_factory=Counter)
    unfinished: dict[int, tuple[int, float]] = field(default_factory=dict)
    spans: list[ReplayedSpan] = field(default_factory=list)
    by_kind_s: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))


class _Transfer(NamedTuple):
    """Key of a collective, or of a message between two ranks, by which the calls of its ranks are brought together."""

    communicator: str
    ends: tuple[int, int] | None  # sender and receiver of a message; None for a collective
    number: int  # counts the collectives of the communicator, or the messages between these two ranks


class _Replay:
    """A running replay: the state of every rank, and the transfers that wait for ranks or are ready to begin."""

    def __init__(self, events: Sequence[Sequence[Event]], cluster: Cluster, host_share: float) -> None:
        self._events, self._cluster = events, cluster
        head_dims = [event.head_dim for event in chain.from_iterable(events) if isinstance(event, Operation)]
        self._rates = _rates(cluster, max(head_dims, default=0) or 128, host_share)
        self._links = _Links(cluster)
        self._ranks = [_RankState() for _ in events]
        # Ranks that have posted their part of a transfer, each with its call and the time at which it was ready.
        self._posted: defaultdict[_Transfer, dict[int, tuple[PostedCall, float]]] = defaultdict(dict)
        # Transfers that all their ranks have posted: (time from which it may begin, tie-breaker, key, bytes).
        self._heap: list[tuple[float, int, _Transfer, int]] = []
        self._tie_breakers = count()

    def run(self) -> ReplayedStep:
        """Replay all events, and return the times of the step.

        All ranks advance as far as they can. Then the transfer that is ready first runs, which lets its ranks advance
        and may make further transfers ready, until no transfer remains.

        Raises:
            PlanError: a rank still waits for a call at the end.
        """
        for rank in range(len(self._ranks)):
            self._advance(rank)
        while self._heap:
            ready_s, _, transfer, num_bytes = heapq.heappop(self._heap)
            self._run_transfer(transfer, ready_s, num_bytes)
        for rank, state in enumerate(self._ranks):
            if state.next < len(self._events[rank]):
                raise PlanError(
                    f"rank {rank} waits for ever at its event {state.next} of {len(self._events[rank])}: another rank "
                    "never posts its part of the call. Record all ranks of one step with the same code."
                )
            self._idle_until(state, max(state.device_s, state.host_s), HOST)
        return ReplayedStep(
            tuple(tuple(sorted(state.spans, key=lambda span: span.stop_s)) for state in self._ranks),
            tuple(dict(state.by_kind_s) for state in self._ranks),
        )

    def _advance(self, rank: int) -> None:
        """Replay a rank's events until it waits for a call that has not ended."""
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
                self._idle_until(state, end_s, WAIT)
                if rates.is_host:
                    state.host_s = max(state.host_s, state.device_s)
            else:
                state.host_s = max(state.host_s, state.device_s)
            state.next += 1

    def _run(self, state: _RankState, rates: _Rates, operation: Operation) -> None:
        """Launch one operation and run it on the device."""
        if not rates.is_host:
            state.host_s += rates.launch_s
            self._idle_until(state, state.host_s, HOST)
        seconds, start_s = rates.seconds(operation), state.device_s
        state.device_s += seconds
        state.by_kind_s[ATTENTION if operation.kind == CAUSAL else operation.kind] += seconds
        state.spans.append(ReplayedSpan("compute", operation.name, operation.cause, start_s, state.device_s))
        if rates.is_host:
            state.host_s = state.device_s

    def _follow_host(self, state: _RankState, rates: _Rates) -> None:
        """On a CPU, let the device wait for its host, since a CPU that posts a call cannot compute meanwhile."""
        if rates.is_host:
            self._idle_until(state, state.host_s, HOST)

    def _idle_until(self, state: _RankState, until_s: float, why: str) -> None:
        """Leave the device idle until a time, if that is later than its last work; ``why`` is `WAIT` or `HOST`."""
        if until_s > state.device_s:
            state.by_kind_s[why] += until_s - state.device_s
            if why == WAIT:
                state.spans.append(ReplayedSpan("compute", WAIT, WAIT, state.device_s, until_s))
            state.device_s = until_s

    # --- messages

    def _open(self, rank: int, call: PostedCall, ready_s: float) -> None:
        """Open a call on one rank; it is the first unfinished call of its communicator there."""
        state = self._ranks[rank]
        if call.name:
            self._join(rank, call, None, ready_s, len(call.ranks))
            return
        state.unfinished[call.number] = len(call.messages), ready_s
        for message in call.messages:
            ends = (rank, message.peer) if message.sends else (message.peer, rank)
            self._join(rank, call, ends, ready_s, 2, message.num_bytes)
        if not call.messages:
            self._end(rank, call, ready_s)

    def _join(
        self, rank: int, call: PostedCall, ends: tuple[int, int] | None, ready_s: float, size: int, num_bytes: int = 0
    ) -> None:
        """Record that a rank has posted its part of a transfer; after all ``size`` ranks, the transfer is ready to run.

        Args:
            ends: sender and receiver of a message; None for a collective.
            ready_s: time at which the rank is ready for the transfer.
        """
        counts, key = self._ranks[rank].num_calls, (call.communicator, ends)
        transfer = _Transfer(*key, counts[key])
        counts[key] += 1
        posted_by_rank = self._posted[transfer]
        posted_by_rank[rank] = call, ready_s
        if len(posted_by_rank) == size:
            latest_s = max(ready for _, ready in posted_by_rank.values())
            heapq.heappush(self._heap, (latest_s, next(self._tie_breakers), transfer, num_bytes))

    def _run_transfer(self, transfer: _Transfer, ready_s: float, num_bytes: int) -> None:
        """Run a collective or a message that all its ranks are ready for, and end the calls that it completes."""
        calls = {rank: call for rank, (call, _) in self._posted.pop(transfer).items()}
        if transfer.ends is None:
            start_s, end_s = self._links.collective(calls, ready_s)
        else:
            start_s, end_s = self._links.message(*transfer.ends, num_bytes, ready_s)
        ended_calls = []
        for rank, call in calls.items():
            state = self._ranks[rank]
            name = call.name or "message"
            state.spans.append(ReplayedSpan("network", name, call.communicator, start_s, end_s))
            num_unfinished, until_s = state.unfinished.get(call.number, (1, 0.0))
            state.unfinished[call.number] = num_unfinished - 1, max(until_s, end_s)
            if num_unfinished == 1:
                ended_calls.append((rank, call, max(until_s, end_s)))
        for rank, call, until_s in ended_calls:
            self._end(rank, call, until_s)

    def _end(self, rank: int, call: PostedCall, end_s: float) -> None:
        """End a call on one rank: open its communicator's next call, and advance the rank if it waits for this call."""
        state = self._ranks[rank]
        state.ends[call.number] = end_s
        queue = state.posted[call.communicator]
        queue.popleft()
        if queue:
            next_call, ready_s = queue[0]
            self._open(rank, next_call, max(ready_s, end_s))
        events = self._events[rank]
        if state.next < len(events) and events[state.next] == Wait(call.number):
            self._advance(rank)


_Port = tuple[str, int, bool]
"""A port: ``"out"`` or ``"in"`` with a rank, or ``"nic out"`` or ``"nic in"`` with a node; True if to other nodes."""


class _Links:
    """Ports of a cluster, and the time from which each is free."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster, self._node = cluster, cluster.node_of_rank.tolist()
        self._free_s: defaultdict[_Port, float] = defaultdict(float)
        self._rings: dict[tuple[int, ...], RingCollective] = {}

    def message(self, sender: int, receiver: int, num_bytes: int, ready_s: float) -> tuple[float, float]:
        """Send a message as soon as its ports are free; return when it begins and when it ends."""
        source, target = self._node[sender], self._node[receiver]
        leaves_node = source != target
        seconds = num_bytes * float(self._cluster.node_p2p_s_per_byte[source, target])
        port_s: dict[_Port, float] = {("out", sender, leaves_node): seconds, ("in", receiver, leaves_node): seconds}
        if leaves_node:
            port_s["nic out", source, True] = num_bytes / float(self._cluster.nic_bytes_per_s[source])
            port_s["nic in", target, True] = num_bytes / float(self._cluster.nic_bytes_per_s[target])
        return self._occupy(port_s, ready_s, float(self._cluster.node_latency_s[source, target]))

    def collective(self, calls: Mapping[int, PostedCall], ready_s: float) -> tuple[float, float]:
        """Run a collective as soon as its ports are free; return when it begins and when it ends."""
        call = next(iter(calls.values()))
        if len(call.ranks) == 1:
            return ready_s, ready_s
        if call.sent_bytes:
            nodes = sorted({self._node[rank] for rank in call.ranks})
            latency_s = float(self._cluster.node_all_to_all_latency_s[np.ix_(nodes, nodes)].max())
            return self._occupy(self._all_to_all_port_s(calls), ready_s, latency_s)
        ring = self._ring(call.ranks)
        num_rounds = 2 if "allreduce" in call.name else 1  # a reduce-scatter and an all-gather
        seconds = num_rounds * call.num_bytes * ring.s_per_byte
        spans_nodes = len({self._node[rank] for rank in call.ranks}) > 1
        port_s: dict[_Port, float] = {}
        for rank in call.ranks:
            port_s["out", rank, spans_nodes] = seconds
            port_s["in", rank, spans_nodes] = seconds
        return self._occupy(port_s, ready_s, num_rounds * ring.latency_s)

    def _ring(self, ranks: tuple[int, ...]) -> RingCollective:
        """Return the rates of ring collectives over these ranks, which are cached."""
        if ranks not in self._rings:
            self._rings[ranks] = RingCollective.over(self._cluster.subset(ranks))
        return self._rings[ranks]

    def _all_to_all_port_s(self, calls: Mapping[int, PostedCall]) -> dict[_Port, float]:
        """Return the seconds for which an all-to-all occupies every port."""
        port_s: defaultdict[_Port, float] = defaultdict(float)
        for sender, call in calls.items():
            for receiver, num_bytes in zip(call.ranks, call.sent_bytes, strict=True):
                if receiver == sender or not num_bytes:
                    continue
                source, target = self._node[sender], self._node[receiver]
                leaves_node = source != target
                seconds = num_bytes * float(self._cluster.node_all_to_all_s_per_byte[source, target])
                port_s["out", sender, leaves_node] += seconds
                port_s["in", receiver, leaves_node] += seconds
                if leaves_node:
                    port_s["nic out", source, True] += num_bytes / float(self._cluster.nic_bytes_per_s[source])
                    port_s["nic in", target, True] += num_bytes / float(self._cluster.nic_bytes_per_s[target])
        return port_s

    def _occupy(self, port_s: Mapping[_Port, float], ready_s: float, latency_s: float) -> tuple[float, float]:
        """Occupy ports, each for its number of seconds, once all are free; return begin and end of the transfer."""
        start_s = max([ready_s, *(self._free_s[port] for port in port_s)])
        for port, seconds in port_s.items():
            self._free_s[port] = start_s + seconds
        return start_s, start_s + latency_s + max(port_s.values(), default=0.0)
