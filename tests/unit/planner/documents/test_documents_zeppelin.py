"""Zeppelin's Algorithms 1 and 2 on cases worked by hand, and what they promise on random ones."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ds_hetero.errors import PlanError
from ds_hetero.planner.document_search.candidates import place_lengths
from ds_hetero.planner.document_search.unit_costs import UnitCosts
from ds_hetero.planner.documents.strategies import placement_strategies
from ds_hetero.planner.published.zeppelin import DocumentRing, zeppelin, zeppelin_rings

NODES = [[0, 1], [2, 3]]


def test_what_fits_goes_whole_to_the_least_loaded_node_and_device():
    # s1 = 2 x 10: all stay on nodes: 9 and 4 on the first, 8 and 5 on the second. Inside s0 = 10: all local.
    assert sorted(zeppelin_rings([9, 8, 5, 4], NODES, 10)) == [
        DocumentRing(0, "local", (0,)),
        DocumentRing(1, "local", (2,)),
        DocumentRing(2, "local", (3,)),
        DocumentRing(3, "local", (1,)),
    ]


def test_a_document_above_the_capacity_of_a_node_goes_over_as_many_nodes_as_its_share_of_the_average():
    # s1 = 20; s_avg = 33 / 2: the first is cut over ceil(30 / 16.5) = 2 nodes and all their devices.
    assert zeppelin_rings([30, 3], NODES, 10)[0] == DocumentRing(0, "cluster", (0, 1, 2, 3))


def test_a_document_above_the_capacity_of_a_device_is_cut_by_its_share_of_the_squares():
    # Node 0 gets 16, node 1 the others. c_avg = 16^2 / 2, so it is cut over 2 devices; 4 and 3 stay local.
    rings = zeppelin_rings([16, 4, 3], NODES, 10)
    assert DocumentRing(0, "node", (0, 1)) in rings
    assert {ring.zone for ring in rings if ring.document} == {"local"}


def test_where_a_short_document_does_not_fit_the_longest_that_was_whole_is_cut():
    # Three of 7 on one node of two devices of 11: two are local, the third overflows; s0 becomes 7 and all are cut.
    rings = zeppelin_rings([7, 7, 7], [[0, 1]], 11)
    assert [ring.zone for ring in rings] == ["local"] * 3  # ceil(49 / (147 / 2)) = 1 fragment each, round robin
    assert [ring.units for ring in rings] == [(0,), (1,), (0,)]


@given(st.lists(st.integers(1, 5000), min_size=1, max_size=30), st.integers(1, 3), st.integers(1, 4))
def test_every_document_is_placed_once_and_whole(lengths, num_nodes, per_node):
    units = num_nodes * per_node
    costs = UnitCosts(
        token_s=(1.0,) * units,
        square_s=(1.0,) * units,
        most_tokens=(2 * sum(lengths) // units + 1,) * units,
        node=tuple(unit // per_node for unit in range(units)),
        receive_s=(0.1,) * num_nodes,
        cross_s=(0.1,) * num_nodes,
    )
    placed = zeppelin(lengths, costs)
    assert [sum(tokens for _, tokens in pieces) for pieces in placed] == lengths
    for pieces in placed:
        assert len({unit for unit, _ in pieces}) == len(pieces)
        assert max(tokens for _, tokens in pieces) - min(tokens for _, tokens in pieces) <= 1 or len(pieces) < units


def test_nodes_of_unequal_size_are_refused_by_name():
    costs = UnitCosts(
        token_s=(1.0,) * 3,
        square_s=(1.0,) * 3,
        most_tokens=(9,) * 3,
        node=(0, 0, 1),
        receive_s=(0.1,) * 2,
        cross_s=(0.1,) * 2,
    )
    with pytest.raises(PlanError, match=r"equally many devices P on every node, here nodes have \[2, 1\] units"):
        zeppelin([5], costs)


def test_every_strategy_places_every_token():
    generator = random.Random(0)
    lengths = [generator.randint(1, 9000) for _ in range(20)]
    costs = UnitCosts(
        token_s=(1.0,) * 4,
        square_s=(1e-4,) * 4,
        most_tokens=(10**6,) * 4,
        node=(0, 0, 1, 1),
        receive_s=(0.1,) * 2,
        cross_s=(0.1,) * 2,
    )
    for place in (lambda *batch: place_lengths(*batch).pieces, *placement_strategies().values()):
        assert [sum(tokens for _, tokens in pieces) for pieces in place(lengths, costs)] == lengths
