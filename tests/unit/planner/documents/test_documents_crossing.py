"""What other ways between nodes than a ring would cost, worked by hand."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ds_hetero.batch.ring_table import RingTable
from ds_hetero.cluster.files import load_cluster
from ds_hetero.cost import Workload, make_cost_model
from ds_hetero.models import load_model
from ds_hetero.planner import strategy
from ds_hetero.planner.document_search import crossing as module
from ds_hetero.planner.document_search.candidates import PlacedLengths
from ds_hetero.planner.document_search.crossing import crossing_of, routed_s_per_byte
from ds_hetero.planner.document_search.lanes import make_placement
from ds_hetero.planner.document_search.loads import loads_of
from ds_hetero.planner.document_search.placement_loads import placement_loads
from ds_hetero.planner.documents import UnitCosts, unit_costs
from ds_hetero.values.baselines import ring
from ds_hetero.values.placement import Lane, Placement, Rows


def test_three_hops_over_the_proxies_of_the_smaller_node():
    # Eq. 1 with x1 = x2 = 3: 1 x 2/3 + 10 / 3 + 1 x 2/3; directly one of three links would carry two blocks of four.
    assert routed_s_per_byte(1.0, 10.0, 4, 3) == pytest.approx(14 / 3)
    assert routed_s_per_byte(3.0, 10.0, 4, 3) == 5.0


def test_nodes_whose_ranks_pair_up_are_passed_directly():
    assert routed_s_per_byte(1.0, 10.0, 8, 8) == 10.0 / 8
    assert routed_s_per_byte(1.0, 10.0, 8, 4) == 10.0 / 4
    assert routed_s_per_byte(1.0, 10.0, 4, 8) == 10.0 / 4
    assert routed_s_per_byte(1.0, 10.0, 1, 8) == 10.0


def test_one_link_carries_less_than_all_of_a_node():
    # Cluster A: eight ranks with links of 25 GB/s to four interfaces, 100 GB/s together.
    cost = make_cost_model("calibrated", load_cluster("zeppelin-a"), load_model("llama-2-7b"), Workload(seq_len=65536))
    costs = unit_costs(cost, strategy("proportional", cost))
    assert costs.link_s[0] / costs.cross_s[0] == pytest.approx(4.0, rel=0.3)
    assert UnitCosts.from_floats(costs.to_floats()) == costs


NODES_OF_UNITS = st.lists(st.integers(0, 2), min_size=2, max_size=7).filter(lambda nodes: len(set(nodes)) > 1)


@given(NODES_OF_UNITS, st.booleans(), st.data())
def test_what_enters_over_every_link_is_what_the_engines_table_sends(nodes, proxies, data):
    """In a lane without causality all tokens travel; proxies deal with whole tokens, one more or less."""
    number = {node: index for index, node in enumerate(sorted(set(nodes)))}
    node = tuple(sorted(number[each] for each in nodes))
    tokens = tuple(data.draw(st.lists(st.integers(1, 40), min_size=len(node), max_size=len(node))))
    units, length = range(len(node)), sum(tokens)
    lane = Lane(
        members=tuple(units), spans=((0, length),), tokens=(tokens,), layout="zigzag", nodes=node, proxies=proxies
    )
    rows = (Rows(0, 1, ((0, length),)),)
    placement = Placement(schedule=ring(len(node), 4, 4), length=length, rank_tokens=tokens, lanes=(lane,), rows=rows)
    table = RingTable(placement, lane, False, None)
    entered = dict.fromkeys(units, 0)
    for unit in units:
        for transfer in (t for round_ in table.forward_rounds(unit) for t in round_.receives):
            if node[transfer.sender] != node[unit]:
                entered[unit] += table.num_keys_of(transfer)
    by_node = [[(unit, tokens[unit]) for unit in units if node[unit] == k] for k in sorted(set(node))]
    planned = (module._entering_over_proxies if proxies else module._entering_directly)(by_node)
    assert planned == pytest.approx(entered, abs=len(set(node)) if proxies else 0)


def test_proxies_are_used_where_links_are_slow_and_nodes_do_not_pair_up():
    # Four and three equal units. Directly the first of three links takes 2 x 100 tokens, by proxies each 400 / 3.
    costs = UnitCosts(
        token_s=(1.0,) * 7,
        square_s=(0.01,) * 7,
        most_tokens=(10**6,) * 7,
        node=(0,) * 4 + (1,) * 3,
        receive_s=(0.1, 0.1),
        cross_s=(1.0, 1.0),
        link_s=(3.0, 3.0),
    )
    over_all = [(unit, 100) for unit in range(7)]
    entering, proxies, _ = crossing_of(over_all, costs)
    assert proxies
    assert entering == pytest.approx({0: 100, 1: 100, 2: 100, 3: 0, 4: 400 / 3, 5: 400 / 3, 6: 400 / 3})
    entering, proxies, _ = crossing_of(over_all, replace(costs, receive_s=(1.0, 1.0)))
    assert not proxies
    assert entering == {0: 100, 1: 100, 2: 100, 3: 0, 4: 200, 5: 100, 6: 100}


FOUR_UNITS = UnitCosts(
    token_s=(1.0,) * 4,
    square_s=(0.01,) * 4,
    most_tokens=(10**6,) * 4,
    node=(0, 0, 1, 1),
    receive_s=(0.1, 0.1),
    cross_s=(1.0, 1.0),
    link_s=(2.0, 2.0),
)


@pytest.mark.parametrize(("receive_s", "outside"), [(0.1, (0, 2)), (0.6, ())])
def test_units_without_a_token_of_a_document_are_its_proxies_where_links_are_slow(receive_s, outside):
    """Units 1 and 3 hold 100 tokens each. One link takes 100 x 2 s; two take 50 x 2 s and two hops of 100 tokens."""
    costs = replace(FOUR_UNITS, receive_s=(receive_s,) * 2)
    crossing = crossing_of([(1, 100), (3, 100)], costs)
    assert crossing.outside == outside and crossing.proxies == bool(outside)
    expected = {0: 50, 1: 50, 2: 50, 3: 50} if outside else {1: 100, 3: 100}
    assert crossing.entering == pytest.approx(expected)


def test_proxies_outside_are_members_of_the_lane_without_tokens():
    documents, schedule = ((0, 200), (200, 300), (300, 400)), ring(4, 4, 4)
    pieces = [[(1, 100), (3, 100)], [(0, 100)], [(2, 100)]]
    loads = loads_of([200, 100, 100], pieces, FOUR_UNITS)
    placed = PlacedLengths(pieces, [0] * 4, loads)
    placement = make_placement(schedule, documents, 400, placed, FOUR_UNITS)
    crossing, *local = placement.lanes
    assert (crossing.members, crossing.tokens, crossing.proxies) == ((0, 1, 2, 3), ((0, 100, 0, 100),), True)
    assert [lane.members for lane in local] == [(0,), (2,)]
    assert placement.rank_tokens == (100,) * 4
    assert placement_loads(placement, documents, FOUR_UNITS) == loads
    table = RingTable(placement.with_rows((Rows(0, 1, documents),)), crossing, False, None)
    entered = dict.fromkeys(range(4), 0)
    for unit in range(4):
        for transfer in (t for round_ in table.forward_rounds(unit) for t in round_.receives):
            if FOUR_UNITS.node[transfer.sender] != FOUR_UNITS.node[unit]:
                entered[unit] += table.num_keys_of(transfer)
    assert entered == {0: 50, 1: 50, 2: 50, 3: 50}
