"""How keys and values get from member to member of a lane, round by round, and their gradients home: plain integers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence, Set
from functools import cached_property
from typing import NamedTuple

from ds_hetero.values.splits import Split, refine, share

_STEPS_OF_THREE_HOPS = 3


class _Crossing(NamedTuple):
    """A block has to get to another node: posted in round ``start``, there before step ``due``."""

    source: int
    sender: int
    receiver: int
    start: int
    due: int


class Routes:
    """The rounds of one lane.

    Args:
        nodes: node of every position; KV goes round the nodes in order of their first position.
        readers: by source, the positions that need some of its keys, its own left out.
        widths: by source, its tokens that travel.
        proxies: members of nodes that do not pair up send for one another.
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
        least = _STEPS_OF_THREE_HOPS if self._proxies else 1
        self._slots = max(least, *map(len, self._members))
        self._kept: dict[int, int | None] = {}

    @property
    def steps(self) -> int:
        """Steps of the forward, and of the backward: N * P."""
        return len(self._members) * self._slots

    def source_at(self, position: int, step: int) -> int | None:
        """Whose KV ``position`` works on in a forward step, its own first; None where nobody's."""
        round_of_nodes, within = divmod(step, self._slots)
        members = self._members[(self._node[position] - round_of_nodes) % len(self._members)]
        slot = (self._slot[position] - within) % self._slots
        return members[slot] if slot < len(members) else None

    def step_at(self, source: int, position: int) -> int:
        """The forward step in which ``position`` works on the KV of ``source``."""
        round_of_nodes = (self._node[position] - self._node[source]) % len(self._members)
        return round_of_nodes * self._slots + (self._slot[position] - self._slot[source]) % self._slots

    def kept(self, position: int) -> int | None:
        """The source whose KV ``position`` keeps from forward to backward: the last one that came."""
        if position not in self._kept:
            steps = (self.source_at(position, step) for step in range(self.steps - 1, 0, -1))
            self._kept[position] = next((s for s in steps if s is not None and position in self._readers[s]), None)
        return self._kept[position]

    def forward(self, position: int) -> tuple[Round, ...]:
        """KV that ``position`` receives and sends in every round."""
        rounds = RoundsOf(self.steps, position)
        for source in self._held(position):
            before, after = (self._neighbour(source, position, direction) for direction in (-1, 1))
            if before is not None:
                due = self.step_at(source, position)
                rounds.add(due - 1, Transfer(source, before, position, due))
            if after is not None:
                due = self.step_at(source, after)
                rounds.add(due - 1, Transfer(source, position, after, due))
        for source in self._sources_that_cross(position, first=True):
            parent = source
            for offset in range(1, len(self._members)):
                receiver = self._end(source, offset, first=True)
                if receiver is not None:
                    due = offset * self._slots
                    rounds.cross(self._hops(_Crossing(source, parent, receiver, due - self._slots, due)))
                    parent = receiver
        return rounds.made()

    def backward_kv(self, position: int) -> tuple[Round, ...]:
        """KV that ``position`` receives and sends in every backward round.

        A block walks its way from the end; who has kept it since the forward is not sent it again. Of its own node the
        last one gets it from the source.
        """
        rounds = RoundsOf(self.steps, position)
        for source in self._held(position):
            if position != source and self.kept(position) != source:
                after = self._neighbour(source, position, 1)
                if after is None and self._node[source] == self._node[position]:
                    after = source
                if after is not None:
                    due = self._backward_step(source, position)
                    rounds.add(due - 1, Transfer(source, after, position, due))
            before = self._end(source, 0, first=False) if position == source else self._neighbour(source, position, -1)
            if before is not None and before != source and self.kept(before) != source:
                due = self._backward_step(source, before)
                rounds.add(due - 1, Transfer(source, position, before, due))
        for source in self._sources_that_cross(position, first=False):
            for crossing in self._backward_kv_crossings(source):
                rounds.cross(self._hops(crossing))
        return rounds.made()

    def _backward_kv_crossings(self, source: int) -> Iterator[_Crossing]:
        nodes, slots = len(self._members), self._slots
        holder, since = source, 0
        for offset in range(nodes - 1, 0, -1):
            receiver = self._end(source, offset, first=False)
            if receiver is None:
                continue
            if self.kept(receiver) == source:
                holder, since = receiver, 0
                continue
            if holder == source:
                due = self._backward_step(source, receiver)
                start = max(0, due - slots)
            else:
                due = (nodes - 1 - offset) * slots
                start = max(since, due - slots)
            yield _Crossing(source, holder, receiver, start, due)
            holder, since = receiver, due

    def backward_grads(self, position: int) -> tuple[Round, ...]:
        """Gradients dK/dV that ``position`` receives, added by the end of step ``due - 1``, and sends, by round."""
        rounds = RoundsOf(self.steps, position)
        for source in self._held(position):
            before, after = (self._neighbour(source, position, direction) for direction in (-1, 1))
            if before is not None:
                step = self._backward_step(source, before)
                rounds.add(step, Transfer(source, position, before, step + 1))
            if after is not None:
                step = self._backward_step(source, position)
                rounds.add(step, Transfer(source, after, position, step + 1))
        for source in self._sources_that_cross(position, first=True):
            parent, parent_offset = source, 0
            for offset in range(1, len(self._members)):
                sender = self._end(source, offset, first=True)
                if sender is not None:
                    due = (len(self._members) - parent_offset) * self._slots
                    rounds.cross(self._hops(_Crossing(source, sender, parent, due - self._slots, due)))
                    parent, parent_offset = sender, offset
        return rounds.made()

    def _backward_step(self, source: int, position: int) -> int:
        return self.steps - 1 - self.step_at(source, position)

    def _holds(self, position: int, source: int) -> bool:
        return position == source or position in self._readers[source]

    def _held(self, position: int) -> Iterator[int]:
        """Sources whose block comes to ``position``, or is its own."""
        return (source for source in range(len(self._node)) if self._holds(position, source))

    def _neighbour(self, source: int, position: int, direction: int) -> int | None:
        """Where in its node the block of ``source`` is before (-1) or after (1) ``position``; None at the ends."""
        members, slots = self._members[self._node[position]], self._slots
        at = (self._slot[position] - self._slot[source]) % slots + direction
        while 0 <= at < slots:
            slot = (self._slot[source] + at) % slots
            if slot < len(members) and self._holds(members[slot], source):
                return members[slot]
            at += direction
        return None

    def _end(self, source: int, offset: int, *, first: bool) -> int | None:
        """Where the block of ``source`` is first, or last, in the node ``offset`` nodes on; None if nobody needs it."""
        members, slots = self._members[(self._node[source] + offset) % len(self._members)], self._slots
        for at in range(slots) if first else range(slots - 1, -1, -1):
            slot = (self._slot[source] + at) % slots
            if slot < len(members) and self._holds(members[slot], source):
                return members[slot]
        return None

    def _sources_that_cross(self, position: int, *, first: bool) -> Iterator[int]:
        """Sources in whose way between nodes ``position`` may have part."""
        num_nodes = len(self._members)
        if num_nodes == 1:
            return
        for source in range(len(self._node)):
            offset = (self._node[position] - self._node[source]) % num_nodes
            if self._proxies or position == source or self._end(source, offset, first=first) == position:
                yield source

    def _hops(self, crossing: _Crossing) -> Iterator[tuple[int, Transfer]]:
        """The transfers of a crossing, with the rounds in which they are posted."""
        source, sender, receiver, start, due = crossing
        if not self._proxies or due - start < _STEPS_OF_THREE_HOPS:
            yield start, Transfer(source, sender, receiver, due)
            return
        senders, receivers = (self._members[self._node[end]] for end in (sender, receiver))
        for first, last, proxy in self._parts[min(len(senders), len(receivers))][source]:
            out, into = senders[proxy], receivers[proxy]
            is_first, is_last = out == sender, into == receiver
            if not is_first:
                yield start, Transfer(source, sender, out, start + 1, ProxyPart(first, last, True, False))
            between = ProxyPart(first, last, is_first, is_last)
            yield (start if is_first else start + 1), Transfer(source, out, into, due if is_last else due - 1, between)
            if not is_last:
                yield due - 1, Transfer(source, into, receiver, due, ProxyPart(first, last, False, True))

    @cached_property
    def _parts(self) -> dict[int, list[list[tuple[int, int, int]]]]:
        """By number of proxies and source: what of its tokens goes over which proxy, ``(start, stop, proxy)``.

        The tokens of all sources of a node are cut together, so that proxies carry as much as one another.
        """
        parts: dict[int, list[list[tuple[int, int, int]]]] = {}
        for proxies in range(1, self._slots + 1):
            parts[proxies] = [[] for _ in self._node]
            for members in self._members:
                blocks = Split(tuple(self._widths[source] for source in members))
                for piece in refine([blocks, Split(share(blocks.total, [1] * proxies))]):
                    block, proxy = piece.owners
                    begin = blocks.cuts[block]
                    parts[proxies][members[block]].append((piece.start - begin, piece.stop - begin, proxy))
        return parts


class ProxyPart(NamedTuple):
    """Some of the tokens that travel of one source, on their way over proxies."""

    start: int  # index of the first one
    stop: int  # index after the last one
    is_first_hop: bool  # the sender takes it from its block, and not from what it holds as a proxy
    is_last_hop: bool  # the receiver puts it into its block, and does not hold it as a proxy


class Transfer(NamedTuple):
    """One member's KV (or its gradient), or a part of it, moves from one member to another."""

    source: int  # position whose tokens these are
    sender: int
    receiver: int
    due: int  # the receiver needs it before this step
    part: ProxyPart | None = None  # None for the whole


class Round(NamedTuple):
    """Messages of one member while it computes one step; what it receives is there at the end of step ``due - 1``."""

    receives: tuple[Transfer, ...]
    sends: tuple[Transfer, ...]


class RoundsOf:
    """The rounds of the member at ``position``, one for each of ``steps``, while they are put together."""

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
        """Add those transfers, with the numbers of their rounds, in which the member has part."""
        for number, transfer in hops:
            if self._position in (transfer.sender, transfer.receiver):
                self.add(number, transfer)

    def made(self) -> tuple[Round, ...]:
        """Sender and receiver have the transfers of a round in the same order, by which some backends pair them."""
        return tuple(map(Round, map(_ordered, self._receives), map(_ordered, self._sends)))


def _ordered(transfers: list[Transfer]) -> tuple[Transfer, ...]:
    return tuple(sorted(transfers, key=lambda one: (one.source, one.part.start if one.part else 0)))
