"""Colours of a ring's messages: no group sends and receives in one colour, and even rings have one colour."""

from __future__ import annotations

from itertools import product

import pytest

from ds_hetero.batch.ring_colours import colours_of_ring, num_ring_colours, ring_colour
from ds_hetero.values.schedule import Group, Schedule


def ring(*tokens: int) -> Schedule:
    groups = tuple(Group(ranks=(rank,), tokens=(count,), heads=(4,)) for rank, count in enumerate(tokens))
    return Schedule(num_heads=4, num_kv_heads=2, groups=groups)


@pytest.mark.parametrize("num_groups", range(3, 12))
def test_no_group_sends_and_receives_in_one_colour(num_groups: int) -> None:
    colours = set()
    for group in range(num_groups):
        before, after = (group - 1) % num_groups, (group + 1) % num_groups
        of_edges = ring_colour(group, before, num_groups), ring_colour(group, after, num_groups)
        assert of_edges[0] != of_edges[1]
        assert of_edges == (ring_colour(before, group, num_groups), ring_colour(after, group, num_groups))
        colours.update(of_edges)
    assert colours == set(range(colours_of_ring(num_groups)))


@pytest.mark.parametrize("num_groups", range(1, 12))
def test_both_ends_of_a_message_name_one_colour(num_groups: int) -> None:
    for position, peer in product(range(num_groups), repeat=2):
        assert ring_colour(position, peer, num_groups) == ring_colour(peer, position, num_groups)


def test_two_groups_have_one_colour() -> None:
    assert ring_colour(0, 1, 2) == ring_colour(1, 0, 2) == 0


def test_colours_of_a_small_and_an_odd_ring() -> None:
    assert [ring_colour(group, (group + 1) % 5, 5) for group in range(5)] == [0, 1, 0, 1, 2]
    assert [ring_colour(group, (group + 1) % 4, 4) for group in range(4)] == [0, 1, 0, 1]
    assert ring_colour(0, 2, 5) == ring_colour(4, 1, 5) == 0  # not neighbours


def test_messages_of_two_groups_and_of_even_rings_go_together() -> None:
    assert num_ring_colours(ring(7, 1)) == num_ring_colours(ring(5, 5, 5)) == num_ring_colours(ring(5)) == 1
    assert num_ring_colours(ring(1000, 1001, 1000, 1000)) == 1  # as many tokens as can be without a remainder
    assert num_ring_colours(ring(4, 4, 1, 1)) == 2
    assert num_ring_colours(ring(4, 3, 0)) == 3
