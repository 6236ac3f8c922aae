"""What other ways between nodes than a ring would cost, worked by hand."""

import pytest

from ds_hetero.cluster.files import load_cluster
from ds_hetero.cost import Workload, make_cost_model
from ds_hetero.models import load_model
from ds_hetero.planner import strategy
from ds_hetero.planner.documents import UnitCosts, unit_costs
from ds_hetero.planner.documents.crossing import by_heads_s, routed_s_per_byte


def test_three_hops_over_the_proxies_of_the_smaller_node():
    # Eq. 1 with x1 = x2 = 4: 1 x 3/4 + 10 / 4 + 1 x 3/4.
    assert routed_s_per_byte(1.0, 10.0, 4, 8) == pytest.approx(4.0)
    assert routed_s_per_byte(1.0, 10.0, 8, 4) == pytest.approx(4.0)


def test_nodes_of_as_many_ranks_pair_them_up_and_a_slow_node_is_passed_directly():
    assert routed_s_per_byte(1.0, 10.0, 8, 8) == 10.0 / 8
    assert routed_s_per_byte(100.0, 10.0, 4, 8) == 10.0
    assert routed_s_per_byte(1.0, 10.0, 1, 8) == 10.0


def test_a_ring_takes_one_interface_and_routing_all_of_a_node():
    # Cluster A: eight ranks with links of 25 GB/s to four interfaces, 100 GB/s together.
    cost = make_cost_model("calibrated", load_cluster("zeppelin-a"), load_model("llama-2-7b"), Workload(seq_len=65536))
    schedule = strategy("proportional", cost)
    ring, routed = unit_costs(cost, schedule), unit_costs(cost, schedule, routed=True)
    assert ring.receive_s == routed.receive_s
    assert ring.cross_s[0] / routed.cross_s[0] == pytest.approx(4.0, rel=0.3)


def four_units():
    return UnitCosts(
        token_s=(1.0,) * 4,
        square_s=(0.01,) * 4,
        most_tokens=(10**6,) * 4,
        node=(0, 0, 1, 1),
        receive_s=(0.5, 0.5),
        cross_s=(2.0, 2.0),
        exchange_per_receive=1.5,
    )


def test_a_document_by_heads_pays_its_exchange_and_half_a_ring():
    # 400 tokens, 100 on each unit: linear 100, attention 100 x 400 x 0.01 = 400, and 128 x 400 x 0.01 = 512 for tiles;
    # half of the heads for 200 tokens arrive from the other unit of the node, which hides; each node exchanges
    # 200 x 1/2 x 1.5 x 2 = 300.
    pieces = [[(0, 100), (1, 100), (2, 100), (3, 100)]]
    assert by_heads_s([400], pieces, four_units()) == pytest.approx(300 + 100 + 400 + 512)


def test_units_that_do_not_pair_up_cannot_exchange_heads():
    assert by_heads_s([300], [[(0, 100), (1, 100), (2, 100)]], four_units()) is None


def test_documents_inside_nodes_exchange_nothing():
    pieces = [[(0, 60), (1, 40)], [(2, 50)]]
    assert by_heads_s([100, 50], pieces, four_units()) == pytest.approx(60 + 60 + 128)
