"""Zeppelin's remapping program: as good as a linear program, and what is sent makes the tokens even.

Whether tokens move in a job: where it is predicted to pay, and never elsewhere.
"""

import random
from dataclasses import replace
from itertools import accumulate, pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.optimize import linprog

from ds_hetero.errors import ConfigError
from ds_hetero.planner.document_search.candidates import PlacedLengths
from ds_hetero.planner.document_search.loads import loads_of
from ds_hetero.planner.document_search.placement_loads import placement_loads
from ds_hetero.planner.document_search.remapping import (
    MAX_MOVING_RATIO,
    even_tokens,
    least_remap_s,
    remap,
    remapped,
    with_linear_tokens,
)
from ds_hetero.planner.document_search.traffic import KVBytes, exchange_bytes
from ds_hetero.planner.documents import DocumentPlacer, UnitCosts, place_documents
from ds_hetero.values.baselines import ring
from ds_hetero.values.placement import Lane, Placement, Rows
from ds_hetero.values.schedule import Group, Schedule
from ds_hetero.values.section import read_section
from tests.unit.planner.documents.test_documents import batches, random_costs

REMAPS = ("where_faster", "always", "never")


def costs_of(node, inside_s=1.0, between_s=8.0):
    units, nodes = len(node), max(node) + 1
    return UnitCosts(
        token_s=(1.0,) * units,
        square_s=(1.0,) * units,
        most_tokens=(10**6,) * units,
        node=tuple(node),
        receive_s=(inside_s,) * nodes,
        cross_s=(between_s,) * nodes,
    )


def linear_program_s(surplus, node, inside_s, between_s):
    """Eq. 2 of the paper as a linear program: the transfers of every pair, and their largest cost by sender."""
    count = len(surplus)
    cost = np.where(np.equal.outer(node, node), inside_s, between_s)
    sends = np.kron(np.eye(count), np.ones(count))
    receives = np.kron(np.ones(count), np.eye(count))
    equal = np.hstack([np.vstack([sends, receives]), np.zeros((2 * count, 1))])
    sums = np.concatenate([np.maximum(surplus, 0), np.maximum(-np.array(surplus), 0)])
    limits = np.hstack([sends * cost.ravel(), -np.ones((count, 1))])
    solved = linprog([0.0] * count**2 + [1.0], A_ub=limits, b_ub=np.zeros(count), A_eq=equal, b_eq=sums)
    return solved.fun


@pytest.mark.parametrize("seed", range(40))
def test_bisection_is_as_good_as_the_linear_program(seed):
    generator = random.Random(seed)
    number: dict[int, int] = {}
    node = [number.setdefault(generator.randrange(3), len(number)) for _ in range(generator.randint(2, 9))]
    have = [generator.randint(0, 50) for _ in node]
    even = sum(have) / len(have)
    surplus = [tokens - even for tokens in have]
    between_s = generator.choice((1.5, 8.0))
    least_s, _ = least_remap_s(surplus, node, 1.0, between_s)
    assert least_s == pytest.approx(linear_program_s(surplus, node, 1.0, between_s), rel=1e-9, abs=1e-9)


@given(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 500), st.integers(1, 4)), min_size=1, max_size=9))
def test_transfers_lead_from_what_units_have_to_what_they_want(units):
    number: dict[int, int] = {}
    node = [number.setdefault(where, len(number)) for where, _, _ in units]
    have = [tokens for _, tokens, _ in units]
    want = [0] * len(have)
    for token in range(sum(have)):
        want[token % len(have)] += 1
    costs = costs_of(node)
    after, sent_s = list(have), [0.0] * len(have)
    for sender, receiver, tokens in remap(have, want, node, costs):
        assert tokens > 0 and have[sender] > want[sender] and have[receiver] < want[receiver]
        after[sender] -= tokens
        after[receiver] += tokens
        sent_s[sender] += tokens * (1.0 if node[sender] == node[receiver] else 8.0)
    assert after == want
    surplus = [a - b for a, b in zip(have, want, strict=True)]
    least_s, _ = least_remap_s(surplus, node, 1.0, 8.0)
    assert max(sent_s) <= least_s + 2 * 8.0  # whole tokens


def test_tokens_are_made_even_by_speed_as_far_as_memory_allows():
    # 3:1 would be 300 and 100.
    costs = UnitCosts(
        token_s=(1.0, 3.0),
        square_s=(0.01, 0.01),
        most_tokens=(220, 10**6),
        node=(0, 0),
        receive_s=(1.0,),
        cross_s=(8.0,),
    )
    assert even_tokens(400, costs) == (220, 180)


def test_a_remapped_block_is_as_slow_as_its_slowest_attention_and_even_linear_layers():
    # Units 0 and 1 attend to 300 and 100 tokens in two whole documents, and 0.25 s a token of the 1 s is attention's.
    # 100 tokens travel at 1 s each way, once and a half.
    costs = UnitCosts(
        token_s=(1.0, 1.0),
        square_s=(0.01, 0.01),
        most_tokens=(10**6,) * 2,
        node=(0, 0),
        receive_s=(1.0,),
        cross_s=(8.0,),
        exchange_per_receive=1.5,
        edge_s=(0.25, 0.25),
    )
    pieces = [[(0, 300)], [(1, 100)]]
    moved = remapped(PlacedLengths(pieces, [0, 0], loads_of([300, 100], pieces, costs)), costs)
    assert moved.linear_tokens == (200, 200)
    assert moved.predicted_s == pytest.approx(200 * 0.75 + 300 * 300 * 0.01 + 300 * 0.25 + 1.5 * 100)


# Two nodes of two units, 4:3:2:1 in speed, with attention eight times slower on every other one: what balances sums
# gives that one few tokens of everything.
FOUR = UnitCosts(
    token_s=tuple(1 / speed for speed in (4, 3, 2, 1)),
    square_s=(1e-4 / 4, 8e-4 / 3, 1e-4 / 2, 8e-4),
    most_tokens=(10**6,) * 4,
    node=(0, 0, 1, 1),
    receive_s=(0.001, 0.001),
    cross_s=(0.01, 0.01),
    exchange_per_receive=3.0,
)
DOCUMENTS, LENGTH = ((0, 3000), (3000, 6000), (6000, 9000), (9000, 12000)), 12000


def test_tokens_move_where_attention_is_slower_on_some_ranks_than_their_linear_layers():
    schedule = ring(4, 8, 4)
    stays = place_documents(schedule, DOCUMENTS, LENGTH, FOUR, remap="never")
    moved = place_documents(schedule, DOCUMENTS, LENGTH, FOUR)
    assert not stays.moves and moved.moves
    assert moved.rank_tokens == (4800, 3600, 2400, 1200)
    loads = placement_loads(moved, DOCUMENTS, FOUR)
    assert loads.tokens == moved.rank_tokens
    assert loads.predicted_s <= MAX_MOVING_RATIO * placement_loads(stays, DOCUMENTS, FOUR).predicted_s
    assert loads.predicted_s >= loads.moved_s + max(loads.linear_s) + max(loads.attention_s)


@pytest.mark.parametrize(
    "costs",
    [replace(FOUR, cross_s=(0.3, 0.3), receive_s=(0.3, 0.3)), replace(FOUR, exchange_per_receive=0.0)],
    ids=["slow links", "unknown links"],
)
def test_tokens_stay_where_moving_costs_more_or_what_it_costs_is_unknown(costs):
    schedule = ring(4, 8, 4)
    assert place_documents(schedule, DOCUMENTS, LENGTH, costs) == place_documents(
        schedule, DOCUMENTS, LENGTH, costs, remap="never"
    )


@given(random_costs(), batches(), st.sampled_from([0.0, 0.6]))
def test_tokens_move_only_where_that_is_predicted_to_pay(costs, batch, edge):
    documents, length = batch
    if length > sum(costs.most_tokens):
        return
    costs = replace(costs, edge_s=tuple(edge * s for s in costs.token_s))
    schedule = ring(len(costs.token_s), 8, 4)
    stays, moved, always = (
        place_documents(schedule, documents, length, costs, remap=remap)
        for remap in ("never", "where_faster", "always")
    )
    assert not stays.moves
    for placement in (moved, always):
        held = [p for rank in schedule.ranks for p in placement.positions(rank)]
        assert sorted(held) == list(range(length))
        for position, most in enumerate(costs.most_tokens):
            assert max(placement.group_tokens(position), placement.in_attention.group_tokens(position)) <= most
    if moved.moves:
        stays_s, moved_s = (placement_loads(p, documents, costs).predicted_s for p in (stays, moved))
        assert moved_s <= MAX_MOVING_RATIO * stays_s * (1 + 1e-9)
    else:
        assert moved == stays


def test_ranks_of_a_unit_share_what_it_holds_by_their_weights():
    groups = (
        Group(ranks=(0, 1), tokens=(2, 1), heads=(4, 4)),
        Group(ranks=(2, 3), tokens=(1, 1), heads=(4, 4)),
    )
    schedule = Schedule(num_heads=8, num_kv_heads=4, groups=groups)
    lane = Lane(members=(0,), spans=((0, 400),), tokens=((400,),), layout="contiguous")
    other = Lane(members=(1,), spans=((400, 500),), tokens=((100,),), layout="contiguous")
    placement = Placement(schedule=schedule, length=500, rank_tokens=(267, 133, 50, 50), lanes=(lane, other))
    moved = with_linear_tokens(placement, (250, 250), costs_of([0, 1]))
    assert moved.in_attention == placement
    assert moved.rank_tokens == (167, 83, 125, 125)


def test_moves_are_in_the_bytes_of_a_block():
    placed = place_documents(ring(4, 8, 4), DOCUMENTS, LENGTH, FOUR).with_rows((Rows(0, 1, DOCUMENTS),))
    of_head = KVBytes(forward=4, backward=4, gradients=8)
    bytes_by_link = exchange_bytes(placed, (0, 0, 1, 1), of_head)
    tokens = sum(move.tokens for move in placed.moves)
    assert tokens and sum(bytes_by_link.values()) == tokens * 2 * (8 + 4) * 4


def test_a_published_planner_has_its_placements_remapped():
    costs = replace(FOUR, token_s=(1.0,) * 4, square_s=(1e-2,) * 4)
    ends = list(accumulate([3000, *[700] * 5, *[100] * 10], initial=0))
    rows = (Rows(0, 1, tuple(pairwise(ends))),)
    placers = [DocumentPlacer(costs, planner="zeppelin", remap=remap) for remap in ("never", "always")]
    stays, moved = (placer(ring(4, 8, 4), ends[-1], rows) for placer in placers)
    assert len(set(stays.rank_tokens)) > 1 and moved.in_attention == stays
    assert moved.rank_tokens == (1875,) * 4


def test_a_placement_for_a_check_has_moves_where_a_job_may_have_them():
    schedule, rows = ring(4, 8, 4), (Rows(0, 1, DOCUMENTS),)
    moved = {remap: DocumentPlacer(FOUR, remap=remap).everywhere(schedule, LENGTH, rows).moves for remap in REMAPS}
    assert moved["where_faster"] == moved["always"] and moved["always"] and not moved["never"]


@pytest.mark.parametrize(
    ("placement", "message"),
    [
        ({"mode": "documents", "remap": True}, r'"heterogeneity.placement.remap": true. It takes "where_faster"'),
        ({"mode": "stream", "remap": "always"}, r'has remap "always", but mode "stream" cuts every batch'),
        ({"mode": "stream", "remap": "where_faster"}, r'has remap "where_faster", but mode "stream" cuts every batch'),
    ],
)
def test_a_remap_that_cannot_be_is_refused(placement, message):
    with pytest.raises(ConfigError, match=message):
        read_section({"placement": placement})
