"""The planner of documents: every position once, memory held, the same result everywhere, and how good it is."""

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from ds_hetero.baselines import proportional, ring
from ds_hetero.cluster.files import load_cluster
from ds_hetero.cost import Workload, make_cost_model
from ds_hetero.errors import BatchError, PlanError
from ds_hetero.models import load_model
from ds_hetero.placement import Rows, stream_placement
from ds_hetero.planner.documents import DocumentPlacer, UnitCosts, place_documents, unit_costs
from ds_hetero.schedule import Group, Schedule

# --- random batches on random units -------------------------------------------------------------------

speeds = st.floats(0.1, 1.0)


@st.composite
def random_costs(draw):
    """Units of random speed on up to three nodes, links from free to slower than computing."""
    count = draw(st.integers(1, 9))
    speed = draw(st.lists(speeds, min_size=count, max_size=count))
    skew = draw(st.lists(st.sampled_from((1.0, 1.0, 0.7)), min_size=count, max_size=count))
    number: dict[int, int] = {}
    node = [number.setdefault(draw(st.integers(0, 2)), len(number)) for _ in range(count)]
    links = st.lists(st.sampled_from((0.0, 0.01, 0.1, 1.0, 10.0)), min_size=len(number), max_size=len(number))
    return UnitCosts(
        token_s=tuple(1 / s for s in speed),
        square_s=tuple(1e-3 * k / s for s, k in zip(speed, skew, strict=True)),
        most_tokens=tuple(draw(st.sampled_from((700, 4000, 10**6))) for _ in range(count)),
        node=tuple(node),
        receive_s=tuple(draw(links)),
        cross_s=tuple(draw(links)),
        exchange_per_receive=draw(st.sampled_from((1.0, 2.5))),
    )


@st.composite
def batches(draw):
    """Documents of one row and its length; between some of them is padding."""
    documents, end = [], 0
    for _ in range(draw(st.integers(0, 12))):
        end += draw(st.sampled_from((0, 0, 0, 1, 37)))
        length = draw(st.one_of(st.integers(1, 30), st.integers(30, 600), st.integers(600, 3000)))
        documents.append((end, end + length))
        end += length
    return tuple(documents), end + draw(st.integers(0, 5)) + (not end)


def schedule_for(costs):
    return ring(len(costs.token_s), 8, 4)


@given(random_costs(), batches())
def test_every_position_is_held_once_and_memory_suffices_or_the_batch_is_refused(costs, batch):
    documents, length = batch
    schedule = schedule_for(costs)
    if length > sum(costs.most_tokens):
        with pytest.raises(BatchError, match=f"{length:,} tokens does not fit"):
            place_documents(schedule, documents, length, costs)
        return
    placement = place_documents(schedule, documents, length, costs)
    held = [p for rank in schedule.ranks for p in placement.positions(rank)]
    assert sorted(held) == list(range(length))
    for position, most in enumerate(costs.most_tokens):
        assert placement.group_tokens(position) <= most


@given(random_costs(), batches())
def test_lanes_come_between_nodes_first_then_inside_nodes_then_local_and_short_documents_are_whole(costs, batch):
    documents, length = batch
    assume(length <= sum(costs.most_tokens))
    placement = place_documents(schedule_for(costs), documents, length, costs)
    zones = [lane.zone(costs.node) for lane in placement.lanes]
    assert zones == sorted(zones, key=("cluster", "node", "local").index)
    for lane in placement.lanes:
        assert list(lane.members) == sorted(lane.members, key=lambda unit: (costs.node[unit], unit))
        assert list(lane.spans) == sorted(lane.spans)


# --- costs --------------------------------------------------------------------------------------------


@given(random_costs())
def test_costs_survive_being_sent_as_a_list_of_floats(costs):
    assert UnitCosts.from_floats(costs.to_floats()) == costs


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"token_s": (1.0, 0.0)}, r"token_s must be finite and > 0, got \(1.0, 0.0\)"),
        ({"square_s": (1.0, float("nan"))}, "square_s must be finite and > 0"),
        ({"cross_s": (float("inf"),)}, "cross_s must be finite and >= 0"),
        ({"most_tokens": (1, 2, 3)}, "most_tokens has 3 entries; there are 2 units"),
        ({"receive_s": (1.0, 2.0)}, "receive_s has 2 entries; there are 1 nodes"),
        ({"node": (1, 1)}, "node must number the nodes from 0 without gaps|receive_s has 1 entries"),
        ({"exchange_per_receive": -1.0}, "exchange_per_receive must be finite and >= 0, got -1.0"),
    ],
)
def test_costs_that_make_no_sense_are_refused(change, message):
    plain = {
        "token_s": (1.0, 2.0),
        "square_s": (0.1, 0.2),
        "most_tokens": (100, 100),
        "node": (0, 0),
        "receive_s": (0.1,),
        "cross_s": (0.1,),
    }
    with pytest.raises(PlanError, match=message):
        UnitCosts(**{**plain, **change})


def test_a_list_of_another_length_is_no_costs():
    with pytest.raises(PlanError, match="2 numbers are not the costs of 0 units on 0 nodes"):
        UnitCosts.from_floats([1.0, 2.0])


def test_weights_stand_for_speeds_where_no_cluster_is_known():
    costs = UnitCosts.from_weights(proportional((4, 2, 0), 8, 8))
    assert costs.token_s[1] == 2 * costs.token_s[0]
    assert costs.square_s[1] == 2 * costs.square_s[0]
    assert costs.most_tokens[2] == 0 < costs.most_tokens[1]


def test_the_calibrated_model_gives_costs_in_proportion_to_its_speeds():
    cluster, model = load_cluster("hexiseq-setting-2"), load_model("llama-3.1-8b")  # 4 H100 and 8 A100
    cost = make_cost_model("calibrated", cluster, model, Workload(seq_len=65536))
    costs = unit_costs(cost, proportional([1.0] * 12, model.num_heads, model.num_kv_heads))
    assert costs.node == (0,) * 4 + (1,) * 8
    whole = 65536 * (65536 * costs.square_s[0])
    assert whole == pytest.approx(model.num_heads * 65536**2 * cost.least_attention_s_D[0])
    # Keys and values forward, recomputed and backward in bf16, their gradients in fp32: 20 bytes per head and channel.
    assert costs.receive_s[0] == pytest.approx(20 * model.num_kv_heads * model.head_dim / 450e9 / 1.0, rel=0.3)
    assert costs.exchange_per_receive == pytest.approx(12 * (32 + 8) / (20 * 8))


def test_a_unit_over_two_nodes_is_a_node_of_its_own():
    cluster, model = load_cluster("zeppelin-a"), load_model("llama-2-7b")
    cost = make_cost_model("calibrated", cluster, model, Workload(seq_len=65536))
    ranks = ((0, 1, 2, 3, 8, 9, 10, 11), (4, 5, 6, 7), (12, 13, 14, 15))
    groups = tuple(Group(ranks=r, tokens=(1.0,) * len(r), heads=(32 // len(r),) * len(r)) for r in ranks)
    costs = unit_costs(cost, Schedule(num_heads=32, num_kv_heads=32, groups=groups))
    assert costs.node == (0, 1, 2)
    assert costs.token_s[0] < costs.token_s[1]


# --- the placer ---------------------------------------------------------------------------------------


def test_the_placer_cuts_batches_without_known_documents_by_length():
    schedule = proportional((2, 1), 8, 8)
    placer = DocumentPlacer(UnitCosts.from_weights(schedule))
    rows = (Rows(0, 1, ((0, 9000),)), Rows(1, 2, ((0, 4000), (4000, 9000))))
    assert placer(schedule, 9000) == stream_placement(schedule, 9000)
    assert placer(schedule, 9000, rows) == stream_placement(schedule, 9000, rows)
    placed = placer(schedule, 9000, rows[1:])
    assert placed.rows == rows[1:] and len(placed.lanes) > 1


@pytest.mark.parametrize("documents", [((0, 5), (4, 9)), ((5, 9), (0, 5)), ((0, 11),), ((3, 3),)])
def test_documents_that_are_no_intervals_of_the_row_are_refused(documents):
    schedule = ring(2, 8, 8)
    with pytest.raises(BatchError, match="documents must be disjoint, ascending and inside a row of 10 tokens"):
        place_documents(schedule, documents, 10, UnitCosts.from_weights(schedule))
