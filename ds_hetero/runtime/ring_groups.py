"""Process groups of a ring's messages: which group a message goes over."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple

from torch.distributed import ProcessGroup


class RingGroups(NamedTuple):
    """Process groups of the same ranks, over which the messages of a replica's rings go.

    A backend that pairs messages by order transfers the messages of a group one after the other, and those that are
    posted together as one. Messages that must not wait for each other have groups of their own.
    """

    near: ProcessGroup  # for colour 0 of `ds_hetero.batch.ring_colours`
    far: ProcessGroup | None = None  # for far messages; None: they go over ``near``
    other_colours: tuple[ProcessGroup, ...] = ()  # for colours 1, 2, ...; those without a group go over ``near``
    colour_of_peer: Mapping[int, int] = MappingProxyType({})  # by global rank; 0 for all others

    def of(self, peer: int, *, is_far: bool) -> tuple[int, ProcessGroup]:
        """Return the group of a message, and its place among all groups, the same at both ends of the message.

        Args:
            peer: global rank of the other end.
            is_far: whether the message goes to another node.
        """
        num_colours = 1 + len(self.other_colours)
        if is_far:
            return num_colours, self.far or self.near
        colour = self.colour_of_peer.get(peer, 0)
        if colour in range(1, num_colours):
            return colour, self.other_colours[colour - 1]
        return 0, self.near
