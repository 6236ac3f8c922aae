"""Routes of KV blocks between the members of a lane, and of their gradients back, round by round.

A member is a position in the lane's ring. The members of one node form an inner ring, and the nodes form an outer ring:
a block of KV visits the members of a node one step after the other, while it also travels to the next node. A node with
fewer members than the largest one has empty slots; in these steps its members are idle.

Two nodes of two members, positions 0, 1 and 2, 3. The table shows the source whose KV a position works on, by forward
step:

    step         0  1  2  3
    position 0   0  1  2  3        block 0: 0 -> 1 within the node, in round 0 (there before step 1)
    position 1   1  0  3  2                 0 -> 2 between nodes, in round 0 (there before step 2: two steps hide it)
    position 2   2  3  0  1                 2 -> 3 within the node, in round 2 (there before step 3)
    position 3   3  2  1  0

The backward takes the steps in the opposite order. Every position keeps the block that it received last in the forward,
which is not sent again. The other blocks are sent by the positions at which the forward ended, or, inside the source's
node, by the source. Gradients travel the forward's way back to the source, and each position adds its part.

Dimension key: N nodes, P slots of a node (members of the largest one).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence, Set
from functools import cached_property
from typing import NamedTuple

from ds_hetero.values.splits import Split, refine, share

# Steps of a way over proxies: to a proxy, between the nodes, from a proxy.
_STEPS_OF_THREE_HOPS = 3


class _Crossing(NamedTuple):
    """The transfer of a block, KV or its gradient, between two nodes, directly or over proxies."""

    source: int  # position whose block it is
    sender: int
    receiver: int
    start: int  # round in which it may be posted
    due: int  # step before which the receiver needs it


class Routes:
    """Computes the rounds of messages of one lane.

    Args:
        nodes: node of every position; KV visits the nodes in the order of their first positions.
        readers: positions that need some keys of a source, by source, without the source itself.
        widths: number of tokens that travel, by source.
        proxies: whether the members of a node forward parts of each other's blocks, which uses more of the node's NICs.
    """

    def __init__(
        self, nodes: Sequence[int], readers: Sequence[Set[int]], widths: Sequence[int], *, proxies: bool = False
    ) -> None:
        order = {node: index for index, node in enumerate(dict.fromkeys(nodes))}
        self._node = [order[node] for node in nodes]
        self._members: list[list[int]] = [[] for _ in order]
        self._slot = []
        for position, node in enumerate(self._node):
            self._slot.append(len(self._members[node]))
            self._members[node].append(position)
        self._readers, self._widths = readers, widths
        self._proxies = proxies and len(order) > 1
        # A way over proxies has three hops, so it needs at least three slots.
        least_slots = _STEPS_OF_THREE_HOPS if self._proxies else 1
        self._slots = max(least_slots, *map(len, self._members))
        self._kept_sources: dict[int, int | None] = {}

    @property
    def steps(self) -> int:
        """Number of steps of the forward, and of the backward: N * P."""
        return len(self._members) * self._slots

    def source_at(self, position: int, step: int) -> int | None:
        """Return the source whose KV ``position`` works on in a forward step, first its own; None for an empty slot."""
        nodes_back, slots_back = divmod(step, self._slots)
        members = self._members[(self._node[position] - nodes_back) % len(self._members)]
        slot = (self._slot[position] - slots_back) % self._slots
        return members[slot] if slot < len(members) else None

    def ring_step_of(self, source: int, position: int) -> int:
        """Return the ring step of a forward in which ``position`` works on KV of ``source``; inverse of `source_at`."""
        nodes_on = (self._node[position] - self._node[source]) % len(self._members)
        slots_on = (self._slot[position] - self._slot[source]) % self._slots
        return nodes_on * self._slots + slots_on

    def kept_source(self, position: int) -> int | None:
        """Return the source whose KV ``position`` received last and keeps for the backward; None if there is none."""
        if position not in self._kept_sources:
            self._kept_sources[position] = self._last_received(position)
        return self._kept_sources[position]

    def _last_received(self, position: int) -> int | None:
        """Find the source whose KV ``position`` reads in the latest forward step, itself excluded."""
        for step in range(self.steps - 1, 0, -1):
            source = self.source_at(position, step)
            if source is not None and position in self._readers[source]:
                return source
        return None

    def forward(self, position: int) -> tuple[Round, ...]:
        """Return the KV that ``position`` receives and sends in every round of the forward."""
        rounds = RoundBuilder(self.steps, position)
        # Inside a node: a reader receives a block from the reader before it, and sends it to the one after it.
        for source in self._sources_read_at(position):
            before = self._neighbour(source, position, -1)
            after = self._neighbour(source, position, 1)
            if before is not None:
                due = self.ring_step_of(source, position)
                rounds.add(due - 1, Transfer(source, before, position, due))
            if after is not None:
                due = self.ring_step_of(source, after)
                rounds.add(due - 1, Transfer(source, position, after, due))
        # Between nodes: the first reader of a node sends a block to the first reader of the next node with readers. The
        # transfer has as many steps as a node has slots.
        for source in self._sources_that_cross(position, first=True):
            sender = source
            for offset in range(1, len(self._members)):
                receiver = self._end(source, offset, first=True)
                if receiver is not None:
                    due = offset * self._slots
                    rounds.cross(self._hops(_Crossing(source, sender, receiver, due - self._slots, due)))
                    sender = receiver
        return rounds.build()

    def backward_kv(self, position: int) -> tuple[Round, ...]:
        """Return the KV that ``position`` receives and sends in every round of the backward.

        A block travels from the position at which the forward ended back to the first one. A position that has kept it
        since the forward does not receive it again. In the source's node, the last reader receives it from the source.
        """
        rounds = RoundBuilder(self.steps, position)
        for source in self._sources_read_at(position):
            if position != source and self.kept_source(position) != source:
                after = self._neighbour(source, position, 1)
                if after is None and self._node[source] == self._node[position]:
                    after = source
                if after is not None:
                    due = self._backward_step(source, position)
                    rounds.add(due - 1, Transfer(source, after, position, due))
            if position == source:
                before = self._end(source, 0, first=False)
            else:
                before = self._neighbour(source, position, -1)
            if before is not None and before != source and self.kept_source(before) != source:
                due = self._backward_step(source, before)
                rounds.add(due - 1, Transfer(source, position, before, due))
        for source in self._sources_that_cross(position, first=False):
            for crossing in self._backward_kv_crossings(source):
                rounds.cross(self._hops(crossing))
        return rounds.build()

    def _backward_kv_crossings(self, source: int) -> Iterator[_Crossing]:
        """Yield the transfers between nodes that carry keys and values of ``source`` in the backward.

        There is one to the last reader on each node, for the farthest node first. Nodes that have kept the keys and
        values since the forward get none.
        """
        nodes, slots = len(self._members), self._slots
        sender, since = source, 0  # a position that has the block, and the first step in which it does
        for offset in range(nodes - 1, 0, -1):
            receiver = self._end(source, offset, first=False)
            if receiver is None:
                continue
            if self.kept_source(receiver) == source:
                sender, since = receiver, 0
                continue
            if sender == source:  # no farther node has the block, so the source sends it
                due = self._backward_step(source, receiver)
                start = max(0, due - slots)
            else:
                due = (nodes - 1 - offset) * slots
                start = max(since, due - slots)
            yield _Crossing(source, sender, receiver, start, due)
            sender, since = receiver, due

    def backward_grads(self, position: int) -> tuple[Round, ...]:
        """Return the dK/dV that ``position`` receives and sends in every round of the backward.

        A received gradient is added by the end of step ``due - 1``.
        """
        rounds = RoundBuilder(self.steps, position)
        for source in self._sources_read_at(position):
            before = self._neighbour(source, position, -1)
            after = self._neighbour(source, position, 1)
            if before is not None:
                step = self._backward_step(source, before)
                rounds.add(step, Transfer(source, position, before, step + 1))
            if after is not None:
                step = self._backward_step(source, position)
                rounds.add(step, Transfer(source, after, position, step + 1))
        # Between nodes, the forward's way back: a node's first reader sends to the first reader of the node before.
        for source in self._sources_that_cross(position, first=True):
            receiver, receiver_offset = source, 0
            for offset in range(1, len(self._members)):
                sender = self._end(source, offset, first=True)
                if sender is not None:
                    due = (len(self._members) - receiver_offset) * self._slots
                    rounds.cross(self._hops(_Crossing(source, sender, receiver, due - self._slots, due)))
                    receiver, receiver_offset = sender, offset
        return rounds.build()

    def _backward_step(self, source: int, position: int) -> int:
        """Return the backward step in which ``position`` works on the KV of ``source``."""
        return self.steps - 1 - self.ring_step_of(source, position)

    def _reads(self, position: int, source: int) -> bool:
        """Whether ``position`` works on the KV of ``source``, which may be its own."""
        return position == source or position in self._readers[source]

    def _sources_read_at(self, position: int) -> Iterator[int]:
        """Yield the sources whose KV ``position`` works on, itself included."""
        return (source for source in range(len(self._node)) if self._reads(position, source))

    def _neighbour(self, source: int, position: int, direction: int) -> int | None:
        """Return the reader of the same node that gets the block of ``source`` just before or after ``position``.

        None if ``position`` is the first, or the last, reader of its node.

        Args:
            direction: -1 for the reader before, 1 for the one after.
        """
        members, slots = self._members[self._node[position]], self._slots
        slots_on = (self._slot[position] - self._slot[source]) % slots + direction
        while 0 <= slots_on < slots:
            slot = (self._slot[source] + slots_on) % slots
            if slot < len(members) and self._reads(members[slot], source):
                return members[slot]
            slots_on += direction
        return None

    def _end(self, source: int, offset: int, *, first: bool) -> int | None:
        """Return the first or the last reader of the block of ``source`` in one node; None if the node has no reader.

        Args:
            offset: number of nodes between the source's node and that node.
        """
        members, slots = self._members[(self._node[source] + offset) % len(self._members)], self._slots
        for slots_on in range(slots) if first else range(slots - 1, -1, -1):
            slot = (self._slot[source] + slots_on) % slots
            if slot < len(members) and self._reads(members[slot], source):
                return members[slot]
        return None

    def _sources_that_cross(self, position: int, *, first: bool) -> Iterator[int]:
        """Yield the sources whose block may cross nodes with ``position`` as sender, receiver or proxy."""
        num_nodes = len(self._members)
        if num_nodes == 1:
            return
        for source in range(len(self._node)):
            offset = (self._node[position] - self._node[source]) % num_nodes
            if self._proxies or position == source or self._end(source, offset, first=first) == position:
                yield source

    def _hops(self, crossing: _Crossing) -> Iterator[tuple[int, Transfer]]:
        """Yield the transfers of a crossing, each after the number of the round in which it is posted.

        Over proxies, a part travels sender -> proxy in its node -> proxy in the other node -> receiver. The first or
        the last hop is left out if the sender or the receiver is itself the proxy of the part.
        """
        source, sender, receiver, start, due = crossing
        if not self._proxies or due - start < _STEPS_OF_THREE_HOPS:
            yield start, Transfer(source, sender, receiver, due)
            return
        sending_node = self._members[self._node[sender]]
        receiving_node = self._members[self._node[receiver]]
        num_proxies = min(len(sending_node), len(receiving_node))
        for first, last, number in self._parts[num_proxies][source]:
            out_proxy, in_proxy = sending_node[number], receiving_node[number]
            starts_here, ends_there = out_proxy == sender, in_proxy == receiver
            if not starts_here:
                yield start, Transfer(source, sender, out_proxy, start + 1, ProxyPart(first, last, True, False))
            crossing_round = start if starts_here else start + 1
            crossing_due = due if ends_there else due - 1
            part = ProxyPart(first, last, starts_here, ends_there)
            yield crossing_round, Transfer(source, out_proxy, in_proxy, crossing_due, part)
            if not ends_there:
                yield due - 1, Transfer(source, in_proxy, receiver, due, ProxyPart(first, last, False, True))

    @cached_property
    def _parts(self) -> dict[int, list[list[tuple[int, int, int]]]]:
        """Parts of each source's tokens and their proxy, ``(start, stop, proxy)``: ``[number of proxies][source]``.

        The tokens of all sources of a node are divided together, so that all proxies carry equally many. Example:
        sources with 6 and 2 tokens, two proxies with 4 tokens each. Proxy 0 gets tokens 0-3 of the first source, and
        proxy 1 its tokens 4-5 and both tokens of the second source.
        """
        parts: dict[int, list[list[tuple[int, int, int]]]] = {}
        for num_proxies in range(1, self._slots + 1):
            parts[num_proxies] = [[] for _ in self._node]
            for members in self._members:
                blocks = Split(tuple(self._widths[source] for source in members))
                loads = Split(share(blocks.total, [1] * num_proxies))
                for piece in refine([blocks, loads]):
                    block, proxy = piece.owners
                    begin = blocks.cuts[block]
                    parts[num_proxies][members[block]].append((piece.start - begin, piece.stop - begin, proxy))
        return parts


class ProxyPart(NamedTuple):
    """A part of one source's travelling tokens, in one of the up to three messages that carry it over proxies."""

    start: int  # index of the first token
    stop: int  # index after the last token
    is_first_hop: bool  # the sender takes the tokens from its block, not from its proxy buffer
    is_last_hop: bool  # the receiver writes the tokens to its block, not to its proxy buffer


class Transfer(NamedTuple):
    """A message between two members: the KV of one source or its gradient, or a part of these."""

    source: int  # position whose tokens it carries
    sender: int
    receiver: int
    due: int  # the receiver needs it before this step
    part: ProxyPart | None = None  # None for all of the travelling tokens


class Round(NamedTuple):
    """Messages that one member posts while it computes one step; each must arrive before its step ``due``."""

    receives: tuple[Transfer, ...]
    sends: tuple[Transfer, ...]


class RoundBuilder:
    """Collects the messages of the member at ``position``, in one round for each of ``steps``."""

    def __init__(self, steps: int, position: int) -> None:
        self._position = position
        self._receives: list[list[Transfer]] = [[] for _ in range(steps)]
        self._sends: list[list[Transfer]] = [[] for _ in range(steps)]

    def add(self, number: int, transfer: Transfer) -> None:
        """Add ``transfer``, which the member receives or sends, to round ``number``."""
        if transfer.receiver == self._position:
            self._receives[number].append(transfer)
        else:
            self._sends[number].append(transfer)

    def cross(self, hops: Iterator[tuple[int, Transfer]]) -> None:
        """Add those transfers of a crossing that the member sends or receives.

        Args:
            hops: all transfers of the crossing, each after the number of its round.
        """
        for number, transfer in hops:
            if self._position in (transfer.sender, transfer.receiver):
                self.add(number, transfer)

    def build(self) -> tuple[Round, ...]:
        """Return the rounds, with the messages of each in the order in which they are posted."""
        return tuple(map(Round, map(_ordered, self._receives), map(_ordered, self._sends)))


def _ordered(transfers: list[Transfer]) -> tuple[Transfer, ...]:
    """Sort transfers in the same order on sender and receiver, since some backends pair messages by their order."""
    return tuple(sorted(transfers, key=lambda message: (message.source, message.part.start if message.part else 0)))
