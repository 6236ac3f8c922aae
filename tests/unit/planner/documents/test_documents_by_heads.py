"""Documents over all units that exchange heads between nodes: what that costs, worked by hand, and when it is done."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ds_hetero.planner.document_search.by_heads import loads_by_heads, place_by_heads
from ds_hetero.planner.document_search.candidates import place_lengths
from ds_hetero.planner.document_search.placement_loads import placement_loads
from ds_hetero.planner.documents import UnitCosts, place_documents
from ds_hetero.values.baselines import ring
from ds_hetero.values.placement import Rows


def four_units(**changes):
    costs = UnitCosts(
        token_s=(1.0,) * 4,
        square_s=(0.01,) * 4,
        most_tokens=(10**6,) * 4,
        node=(0, 0, 1, 1),
        receive_s=(0.5, 0.5),
        cross_s=(2.0, 2.0),
        exchange_per_receive=1.5,
    )
    return replace(costs, **changes)


def test_a_document_by_heads_pays_its_exchange_and_half_a_ring():
    # 400 tokens, 100 on each unit: linear 100, half of the heads for 200 tokens 1/2 x 200 x 400 x 0.01 = 400 and
    # 1/2 x 128 x 400 x 0.01 = 256 for tiles; half of the heads for 200 tokens arrive from the other unit of the node,
    # which hides; each node sends half of the heads of 200 tokens, 100 x 1.5 x 2 = 300, and receives as much.
    pieces = [[(0, 100), (1, 100), (2, 100), (3, 100)]]
    loads = loads_by_heads([400], pieces, four_units(), (2, 2))
    assert loads.exchange_s == pytest.approx(300)
    assert loads.predicted_s == pytest.approx(300 + 100 + 400 + 256)


def test_nodes_get_heads_in_proportion_to_their_tokens():
    costs = four_units(token_s=(1.0, 1.0, 3.0, 3.0), square_s=(0.01, 0.01, 0.03, 0.03), cross_s=(1e3, 1e3))
    best = place_lengths([8000], costs)
    by_heads = place_by_heads([8000], best, costs, 8, 0)
    assert by_heads is not None
    assert by_heads.heads == (6, 2)


def test_units_that_do_not_pair_up_exchange_no_heads():
    costs = UnitCosts(
        token_s=(1.0,) * 3,
        square_s=(0.01,) * 3,
        most_tokens=(10**6,) * 3,
        node=(0, 0, 1),
        receive_s=(0.5, 0.5),
        cross_s=(2.0, 2.0),
        exchange_per_receive=1.5,
    )
    assert place_by_heads([300], place_lengths([300], costs), costs, 4, 0) is None


def many_nodes(cross_s):
    """Eight nodes of two units; heads are as many as KV heads."""
    return UnitCosts(
        token_s=(1e-6,) * 16,
        square_s=(1e-9,) * 16,
        most_tokens=(10**7,) * 16,
        node=tuple(unit // 2 for unit in range(16)),
        receive_s=(1e-7,) * 8,
        cross_s=(cross_s,) * 8,
        exchange_per_receive=1.0,
    )


def test_a_long_document_over_many_nodes_exchanges_heads_where_links_are_slow():
    schedule, length = ring(16, 16, 16), 65536
    fast, slow = (place_documents(schedule, [(0, length)], length, many_nodes(s)) for s in (2e-6, 8e-6))
    assert not any(lane.by_heads for lane in fast.lanes)
    (lane,) = slow.lanes
    assert lane.by_heads == (2,) * 8
    assert lane.nodes == many_nodes(0.0).node
    predicted = placement_loads(slow, [(0, length)], many_nodes(8e-6)).predicted_s
    assert predicted < place_lengths([length], many_nodes(8e-6)).predicted_s


@given(st.lists(st.integers(1, 40_000), min_size=1, max_size=12), st.sampled_from([1e-7, 1e-6, 1e-5]))
def test_every_position_is_held_once_and_a_rank_holds_what_its_unit_is_given(lengths, cross_s):
    ends = [0]
    for tokens in lengths:
        ends.append(ends[-1] + tokens)
    documents, schedule = tuple(pairwise(ends)), ring(16, 16, 16)
    placement = place_documents(schedule, documents, ends[-1], many_nodes(cross_s))
    placement = placement.with_rows((Rows(0, 1, documents),))
    held = sorted(interval for rank in schedule.ranks for interval in placement.intervals(rank))
    assert [start for start, _ in held] == [0, *(stop for _, stop in held[:-1])]
    assert held[-1][1] == ends[-1]
    for rank in schedule.ranks:
        assert sum(stop - start for start, stop in placement.intervals(rank)) == placement.tokens(rank)
        assert sum(part.placement.tokens(rank) for part in placement.parts) == placement.tokens(rank)
    of_parts = [stop - start for part in placement.parts for start, stop in part.placement.rows[0].documents]
    assert sorted(of_parts) == sorted(lengths)
