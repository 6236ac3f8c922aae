"""Zeppelin's remapping program: as good as a linear program, and what is sent makes the tokens even."""

import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.optimize import linprog

from ds_hetero.planner.document_search.loads import loads_of
from ds_hetero.planner.document_search.unit_costs import UnitCosts
from ds_hetero.planner.published.zeppelin import even_tokens, least_remap_s, remap, remapped_s


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
    for sender, receiver, tokens in remap(have, want, costs):
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


def test_a_remapped_block_is_as_slow_as_its_slowest_attention_and_even_linear_modules():
    # Units 0 and 1 hold 300 and 100 tokens in two whole documents; 100 tokens travel at 1 s each way, once and a half.
    costs = UnitCosts(
        token_s=(1.0, 1.0),
        square_s=(0.01, 0.01),
        most_tokens=(10**6,) * 2,
        node=(0, 0),
        receive_s=(1.0,),
        cross_s=(8.0,),
        exchange_per_receive=1.5,
    )
    loads = loads_of([300, 100], [[(0, 300)], [(1, 100)]], costs)
    assert remapped_s(loads, costs) == pytest.approx(200 + 300 * 300 * 0.01 + 1.5 * 100)
