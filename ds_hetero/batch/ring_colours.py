"""Colours of the messages between neighbouring groups of a ring: what a group sends and receives has unlike colours.

NCCL runs what a rank posts together on one communicator as one kernel, which ends when all of it has ended. So a group
that receives from the group before it and sends to the group after it waits for both in every step of the ring, though
it needs only what it receives; the cost is in `ds_hetero.cost.terms.ring`, coupled rings. Messages of unlike colours go
over communicators of their own, and wait for nothing but their two ends. A communicator takes memory, so colour 0 goes
over the one that a replica has anyway.

An edge joins two neighbouring groups, and both directions over it have its colour: in one pass of the ring a group only
sends over one of its two edges, and only receives over the other. Edges take two colours in turn. In a ring with an odd
number of groups the edge that closes it gets a third.

    ring of 4    0 -a- 1 -b- 2 -a- 3 -b- 0
    ring of 5    0 -a- 1 -b- 2 -a- 3 -b- 4 -c- 0

Groups that are not neighbours in the ring may also exchange messages, in lanes of documents. These have colour 0, too.

Why no rank waits for ever, though several communicators are under way: both ends of a message name the same
communicator, since a colour depends on the two positions alone, in either order. And all ranks post their batches in
one order: by pass, lane and step, then colour by colour (`ds_hetero.runtime.attention.channel`). So the earliest batch
that is under way, which waits for no later one, always finds all of its ends; `benchmarks.proof.order` checks this.
"""

from __future__ import annotations

from ds_hetero.values.schedule import Schedule

# Largest over smallest number of tokens of a group up to which a ring counts as even. With equal blocks the coupling
# costs nothing: all groups begin their steps together. Between equal and this, it costs less than 2 % of the ring.
EVEN_RING = 1.02


def num_ring_colours(schedule: Schedule) -> int:
    """Return the number of colours of a schedule's ring; 1 if all of its messages can go together.

    They can in a ring of two groups, each of which receives from the group that it sends to, and in an even ring.
    """
    tokens = [sum(group.tokens) for group in schedule.groups]
    if len(tokens) < 3 or max(tokens) <= EVEN_RING * min(tokens):
        return 1
    return colours_of_ring(len(tokens))


def colours_of_ring(num_groups: int) -> int:
    """Return the number of colours that the edges of a ring of three or more groups need."""
    return 2 + num_groups % 2


def ring_colour(position: int, peer: int, num_groups: int) -> int:
    """Return the colour of the messages between two positions of a ring.

    Example: in a ring of 5, positions 1 and 2 have colour 1, positions 4 and 0 colour 2.
    """
    if num_groups < 3:
        return 0  # each is before and after the other, so the ends would name unlike colours
    if (position + 1) % num_groups == peer:
        first = position
    elif (peer + 1) % num_groups == position:
        first = peer
    else:
        return 0  # they are not neighbours
    closes_odd_ring = first == num_groups - 1 and num_groups % 2 == 1
    return 2 if closes_odd_ring else first % 2
