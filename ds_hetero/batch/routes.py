"""Routes of keys and values between the members of a lane, round by round, and of their gradients back: plain integers.

A member is a position in the lane's ring. Members of one node form an inner ring, and the nodes form an outer ring:
a block of KV goes round the members of a node, a step each, while it is on its way to the next node. A node with fewer
members than the largest one has empty slots, in which its members wait.

Two nodes of two members, positions 0, 1 and 2, 3. Sources whose KV a position works on, by forward step:

    step         0  1  2  3
    position 0   0  1  2  3        block 0: 0 -> 1 within the node, in round 0 (there before step 1)
    position 1   1  0  3  2                 0 -> 2 between nodes, in round 0 (there before step 2: two steps hide it)
    position 2   2  3  0  1                 2 -> 3 within the node, in round 2 (there before step 3)
    position 3   3  2  1  0

The backward takes the steps in the opposite order. Every position has kept the block that it worked on last, which is
not sent again; the others come from where the forward ended, or, in the source's own node, from the source. Gradients
take the forward's way back to the source, and each position adds its part.

Dimension key: N nodes, P slots of a node (members of the largest one).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence, Set
from functools import cached_property
from typing import NamedTuple

from ds_hetero.values.splits import Split, refine, share

# To a proxy, between the nodes, from a proxy: each takes one step.
_STEPS_OF_THREE_HOPS = 3


class _Crossing(NamedTuple):
    """A block that goes to another node: posted in round ``start``, needed before step ``due``."""

    source: int
    sender: int
    receiver: int
    start: int
    due: int


class Routes:
    """The rounds of one lane.

    Args:
        nodes: node of every position; KV goes round the nodes in order of their first position.
        readers: by source, the positions that need some of its keys, without the source itself.
        widths: by source, the number of its tokens that travel.
        proxies: whether members of a node pass on parts of each other's blocks, so that more of the node's NICs work.
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
        # A way over proxies has three hops. Fewer slots would leave it fewer steps than hops.
        least_slots = _STEPS_OF_THREE_HOPS if self._proxies else 1
        self._slots = max(least_slots, *map(len, self._members))
        self._kept: dict[int, int | None] = {}

    @property
    def steps(self) -> int:
        """Steps of the forward, and of the backward: N * P."""
        return len(self._members) * self._slots

    def source_at(self, position: int, step: int) -> int | None:
        """Return the source whose KV ``position`` works on in a forward step, first its own; None for an empty slot."""
        nodes_back, slots_back = divmod(step, self._slots)
        members = self._members[(self._node[position] - nodes_back) % len(self._members)]
        slot = (self._slot[position] - slots_back) % self._slots
        return members[slot] if slot < len(members) else None

    def step_at(self, source: int, position: int) -> int:
        """Return the forward step in which ``position`` works on the KV of ``source``; inverse of `source_at`."""
        nodes_on = (self._node[position] - self._node[source]) % len(self._members)
        slots_on = (self._slot[position] - self._slot[source]) % self._slots
        return nodes_on * self._slots + slots_on

    def kept(self, position: int) -> int | None:
        """Return the source whose KV ``position`` keeps from forward to backward: the last one that it received."""
        if position not in self._kept:
            self._kept[position] = self._last_received(position)
        return self._kept[position]

    def _last_received(self, position: int) -> int | None:
        for step in range(self.steps - 1, 0, -1):
            source = self.source_at(position, step)
            if source is not None and position in self._readers[source]:
                return source
        return None

    def forward(self, position: int) -> tuple[Round, ...]:
        """Return the KV that ``position`` receives and sends in every round of the forward."""
        rounds = RoundsOf(self.steps, position)
        # Within the node: from the reader before, and on to the next one.
        for source in self._sources_read_at(position):
            before = self._neighbour(source, position, -1)
            after = self._neighbour(source, position, 1)
            if before is not None:
                due = self.step_at(source, position)
                rounds.add(due - 1, Transfer(source, before, position, due))
            if after is not None:
                due = self.step_at(source, after)
                rounds.add(due - 1, Transfer(source, position, after, due))
        # Between nodes: from the first reader of a node to that of the next node with readers, a round of nodes ahead.
        for source in self._sources_that_cross(position, first=True):
            sender = source
            for offset in range(1, len(self._members)):
                receiver = self._end(source, offset, first=True)
                if receiver is not None:
                    due = offset * self._slots
                    rounds.cross(self._hops(_Crossing(source, sender, receiver, due - self._slots, due)))
                    sender = receiver
        return rounds.made()

    def backward_kv(self, position: int) -> tuple[Round, ...]:
        """Return the KV that ``position`` receives and sends in every round of the backward.

        A block goes its way from the end. A position that has kept it since the forward does not receive it again. In
        the source's own node, the last reader receives it from the source.
        """
        rounds = RoundsOf(self.steps, position)
        for source in self._sources_read_at(position):
            if position != source and self.kept(position) != source:
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
            if before is not None and before != source and self.kept(before) != source:
                due = self._backward_step(source, before)
                rounds.add(due - 1, Transfer(source, position, before, due))
        for source in self._sources_that_cross(position, first=False):
            for crossing in self._backward_kv_crossings(source):
                rounds.cross(self._hops(crossing))
        return rounds.made()

    def _backward_kv_crossings(self, source: int) -> Iterator[_Crossing]:
        """Ways of the block of ``source`` to the last reader of each node, from the farthest node on."""
        nodes, slots = len(self._members), self._slots
        sender, since = source, 0  # the position that has the block, and the step from which it has it
        for offset in range(nodes - 1, 0, -1):
            receiver = self._end(source, offset, first=False)
            if receiver is None:
                continue
            if self.kept(receiver) == source:
                sender, since = receiver, 0
                continue
            if sender == source:  # no node behind has the block: the source, which always has it, sends it
                due = self._backward_step(source, receiver)
                start = max(0, due - slots)
            else:
                due = (nodes - 1 - offset) * slots
                start = max(since, due - slots)
            yield _Crossing(source, sender, receiver, start, due)
            sender, since = receiver, due

    def backward_grads(self, position: int) -> tuple[Round, ...]:
        """Return the dK/dV that ``position`` receives and sends in every round of the backward.

        A received one is added by the end of step ``due - 1``.
        """
        rounds = RoundsOf(self.steps, position)
        for source in self._sources_read_at(position):
            before = self._neighbour(source, position, -1)
            after = self._neighbour(source, position, 1)
            if before is not None:
                step = self._backward_step(source, before)
                rounds.add(step, Transfer(source, position, before, step + 1))
            if after is not None:
                step = self._backward_step(source, position)
                rounds.add(step, Transfer(source, after, position, step + 1))
        # The forward's way back: from the first reader of a node to that of the node before.
        for source in self._sources_that_cross(position, first=True):
            receiver, receiver_offset = source, 0
            for offset in range(1, len(self._members)):
                sender = self._end(source, offset, first=True)
                if sender is not None:
                    due = (len(self._members) - receiver_offset) * self._slots
                    rounds.cross(self._hops(_Crossing(source, sender, receiver, due - self._slots, due)))
                    receiver, receiver_offset = sender, offset
        return rounds.made()

    def _backward_step(self, source: int, position: int) -> int:
        """The backward step in which ``position`` works on the KV of ``source``."""
        return self.steps - 1 - self.step_at(source, position)

    def _reads(self, position: int, source: int) -> bool:
        return position == source or position in self._readers[source]

    def _sources_read_at(self, position: int) -> Iterator[int]:
        """Sources whose KV ``position`` works on, itself included."""
        return (source for source in range(len(self._node)) if self._reads(position, source))

    def _neighbour(self, source: int, position: int, direction: int) -> int | None:
        """The reader in the same node that gets the block of ``source`` before (-1) or after (1) ``position``.

        None if ``position`` is the first, or the last, of its node.
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
        """The first, or the last, reader of the block of ``source`` in the node ``offset`` nodes on; None if none."""
        members, slots = self._members[(self._node[source] + offset) % len(self._members)], self._slots
        for slots_on in range(slots) if first else range(slots - 1, -1, -1):
            slot = (self._slot[source] + slots_on) % slots
            if slot < len(members) and self._reads(members[slot], source):
                return members[slot]
        return None

    def _sources_that_cross(self, position: int, *, first: bool) -> Iterator[int]:
        """Sources whose way between nodes may lead over ``position``: as sender, receiver or proxy."""
        num_nodes = len(self._members)
        if num_nodes == 1:
            return
        for source in range(len(self._node)):
            offset = (self._node[position] - self._node[source]) % num_nodes
            if self._proxies or position == source or self._end(source, offset, first=first) == position:
                yield source

    def _hops(self, crossing: _Crossing) -> Iterator[tuple[int, Transfer]]:
        """Yield the transfers of a crossing, with the rounds in which they are posted.

        Over proxies, a part goes sender -> proxy of its node -> proxy of the other node -> receiver. The first or the
        last hop falls away for the part of which the sender, or the receiver, is itself the proxy.
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
        """Parts of a source's tokens that go over each proxy, ``(start, stop, proxy)``: [number of proxies][source].

        The tokens of all sources of a node are divided together, so that all proxies carry equally much. Sources of 6
        and 2 tokens over two proxies of 4: tokens 0-3 of the first over proxy 0, its tokens 4-5 and both of the second
        over proxy 1.
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
    """Some of the travelling tokens of one source, on one hop of their way over proxies."""

    start: int  # index of the first token
    stop: int  # index after the last token
    is_first_hop: bool  # the sender takes the tokens from its block, not from its proxy buffer
    is_last_hop: bool  # the receiver writes the tokens to its block, not to its proxy buffer


class Transfer(NamedTuple):
    """A message: one member's KV, or its gradient, or a part of these, from one member to another."""

    source: int  # position whose tokens these are
    sender: int
    receiver: int
    due: int  # the receiver needs it before this step
    part: ProxyPart | None = None  # None for all of the travelling tokens


class Round(NamedTuple):
    """Messages that one member posts while it computes one step; it has received them by the end of ``due - 1``."""

    receives: tuple[Transfer, ...]
    sends: tuple[Transfer, ...]


class RoundsOf:
    """Builder of the rounds of the member at ``position``, one for each of ``steps``."""

    def __init__(self, steps: int, position: int) -> None:
        self._position = position
        self._receives: list[list[Transfer]] = [[] for _ in range(steps)]
        self._sends: list[list[Transfer]] = [[] for _ in range(steps)]

    def add(self, number: int, transfer: Transfer) -> None:
        """Add a transfer that the member receives or sends."""
        if transfer.receiver == self._position:
            self._receives[number].append(transfer)
        else:
            self._sends[number].append(transfer)

    def cross(self, hops: Iterator[tuple[int, Transfer]]) -> None:
        """Add those of the transfers, each with the number of its round, that the member sends or receives."""
        for number, transfer in hops:
            if self._position in (transfer.sender, transfer.receiver):
                self.add(number, transfer)

    def made(self) -> tuple[Round, ...]:
        """Return the rounds."""
        return tuple(map(Round, map(_ordered, self._receives), map(_ordered, self._sends)))


def _ordered(transfers: list[Transfer]) -> tuple[Transfer, ...]:
    """Sort transfers alike on sender and receiver: some backends pair messages by their order."""
    return tuple(sorted(transfers, key=lambda message: (message.source, message.part.start if message.part else 0)))
