"""Weighted cuts of flat groups (stages 1 and 2) and of single parameters (stage 3)."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ds_hetero.errors import ConfigError
from ds_hetero.sharding.zero_partition import (
    ALIGNMENT,
    FlatGroup,
    Fragment,
    Move,
    alignment_of,
    check_weights,
    cut_as_deepspeed,
    cut_flat_group,
    cut_parameter,
    is_even,
    node_pieces,
    node_sizes,
    repartition_moves,
    round_robin_order,
)
from ds_hetero.values.splits import Split

positive = st.floats(min_value=0.01, max_value=100, allow_subnormal=False)
some_zero = st.lists(st.one_of(st.just(0.0), positive), min_size=1, max_size=12).filter(any)
sizes = st.integers(0, 200_000)


def test_a_flat_group_is_cut_at_multiples_of_the_alignment():
    # 10,000 elements by 4:3:2:1 would be cut at 4000, 7000 and 9000; with 8 * 4 units of at most 312 it is cut in 128s:
    # 31.25, 54.7 and 70.3 units are 31, 55 and 70.
    assert cut_flat_group(10_000, (4, 3, 2, 1)).cuts == (0, 3968, 7040, 8960, 10_000)


def test_ranks_of_weight_zero_own_nothing_and_the_last_other_one_takes_the_tail():
    assert cut_flat_group(5_001, (1, 0, 3, 0)).sizes == (1280, 0, 3721, 0)


def test_a_group_of_a_few_elements_is_still_spread():
    assert alignment_of(96, 4) == 2
    assert cut_flat_group(96, (4, 3, 2, 1)).sizes == (38, 30, 18, 10)
    assert cut_flat_group(4, (1, 1, 2)).sizes == (0, 2, 2)
    assert cut_flat_group(0, (1, 2)).sizes == (0, 0)


@given(sizes, some_zero)
def test_parts_follow_the_weights_within_one_unit(num_elements, weights):
    cut = cut_flat_group(num_elements, weights)
    unit = alignment_of(num_elements, len(weights))
    assert cut.total == num_elements
    for size, weight in zip(cut.sizes, weights, strict=True):
        assert abs(size - num_elements * weight / sum(weights)) <= unit + 1e-6
        assert weight or not size
    if not is_even(weights):
        assert all(start % unit == 0 or start == num_elements for start in cut.cuts)
    assert unit == ALIGNMENT or num_elements < 8 * len(weights) * ALIGNMENT


@given(st.integers(1, 8), st.integers(0, 1000))
def test_equal_weights_are_deepspeeds_partitions(num_ranks, units):
    num_elements = 2 * num_ranks * units  # DeepSpeed pads its flat groups to that
    assert cut_flat_group(num_elements, [0.3] * num_ranks).sizes == (2 * units,) * num_ranks


@given(sizes, st.lists(positive, min_size=2, max_size=8), st.data())
def test_a_larger_weight_never_owns_less(num_elements, weights, data):
    rank = data.draw(st.integers(0, len(weights) - 1))
    more = [weight * (2 if i == rank else 1) for i, weight in enumerate(weights)]
    unit = alignment_of(num_elements, len(weights))
    assert cut_flat_group(num_elements, more).sizes[rank] >= cut_flat_group(num_elements, weights).sizes[rank] - unit


@pytest.mark.parametrize(
    ("weights", "world_size", "stage", "said"),
    [
        ((1, 2), 3, 1, "lists 2 weights, but the job has 3 ranks"),
        ((1, -1), 2, 1, "not negative"),
        ((1, float("nan")), 2, 2, "finite"),
        ((0, 0), 2, 2, "one of them positive"),
        ((1, 0), 2, 3, "gives rank 1 a weight of 0"),
    ],
)
def test_weights_that_cannot_be_are_refused(weights, world_size, stage, said):
    with pytest.raises(ConfigError, match=said):
        check_weights(weights, world_size, zero_stage=stage)


def test_a_part_is_mapped_to_the_parameters_it_cuts():
    group = FlatGroup(starts=(0, 30, 40), sizes=(25, 10, 60), cut=Split((32, 0, 68)))  # five elements of padding
    assert group.fragments(0) == (Fragment(0, 0, 0, 25), Fragment(1, 0, 30, 2))
    assert group.fragments(1) == ()
    assert group.fragments(2) == (Fragment(1, 2, 0, 8), Fragment(2, 0, 8, 60))


def test_moves_join_what_stays_together():
    before = FlatGroup((0, 10), (10, 22), Split((16, 16)))
    after = FlatGroup((0, 10), (10, 22), Split((8, 8, 16)))
    assert repartition_moves(before, after, 1) == (Move(0, 8, 0, 8),)
    assert repartition_moves(after, before, 0) == (Move(0, 0, 0, 8), Move(1, 0, 8, 8))


def test_round_robin_deals_parameters_to_ranks():
    assert round_robin_order(7, 3) == [0, 3, 6, 1, 4, 2, 5]
    assert round_robin_order(2, 3) == [0, 1]


@st.composite
def flat_groups(draw, sizes):
    order = draw(st.permutations(range(len(sizes))))
    starts, end = [0] * len(sizes), 0
    for parameter in order:
        starts[parameter] = end
        end += sizes[parameter] + draw(st.integers(0, 3))
    return FlatGroup(tuple(starts), tuple(sizes), cut_flat_group(end, draw(some_zero)))


@given(st.data())
def test_moves_bring_every_element_where_it_belongs(data):
    sizes = tuple(data.draw(st.lists(st.integers(0, 40), max_size=6)))
    before, after = data.draw(flat_groups(sizes)), data.draw(flat_groups(sizes))

    def flat(group):
        vector = ["padding"] * group.cut.total
        for parameter, (start, size) in enumerate(zip(group.starts, group.sizes, strict=True)):
            vector[start : start + size] = [(parameter, i) for i in range(size)]
        return vector

    saved = [flat(before)[start:stop] for start, stop in before.cut.ranges]
    for part, (start, stop) in enumerate(after.cut.ranges):
        target = ["padding"] * (stop - start)
        for move in repartition_moves(before, after, part):
            target[move.in_target : move.in_target + move.count] = saved[move.source][move.in_source :][: move.count]
        assert target == flat(after)[start:stop]


def test_layouts_of_different_parameters_have_no_moves():
    with pytest.raises(ValueError, match="must be equal"):
        repartition_moves(FlatGroup((0,), (4,), Split((4,))), FlatGroup((0,), (6,), Split((6,))), 0)


# --- stage 3 ---------------------------------------------------------------------------------------


def test_a_parameter_is_cut_at_multiples_of_the_alignment():
    # 4096 by 3:1 is cut at 3072; by 4:3:2:1 at 1638.4, 2867.2 and 3686.4, which are 12.8, 22.4 and 28.8 units of 128.
    assert cut_parameter(4096, (3, 1)).cuts == (0, 3072, 4096)
    assert cut_parameter(4096, (4, 3, 2, 1)).cuts == (0, 1664, 2816, 3712, 4096)


def test_every_rank_owns_something_of_every_parameter():
    assert cut_parameter(7, (100, 1, 1)).sizes == (5, 1, 1)
    assert cut_parameter(7, (1, 1, 100)).sizes == (1, 1, 5)
    assert cut_parameter(2, (1, 5, 1)).sizes == (1, 1, 1)
    assert cut_parameter(0, (1, 2)).sizes == (1, 1)
    assert cut_parameter(100_000, (1, 1e9, 1)).sizes == (128, 99_712, 160)


@given(sizes, st.lists(positive, min_size=1, max_size=8))
def test_shards_follow_the_weights_within_one_unit(num_elements, weights):
    cut = cut_parameter(num_elements, weights)
    total = max(num_elements, len(weights))
    unit = alignment_of(total, len(weights), least=1)
    assert cut.total == total
    assert min(cut.sizes) >= unit
    assert all(start % unit == 0 for start in cut.cuts[:-1])
    if all(total * weight / sum(weights) >= 2 * unit for weight in weights):
        for size, weight in zip(cut.sizes, weights, strict=True):
            assert abs(size - total * weight / sum(weights)) <= unit + 1e-6


def test_deepspeeds_own_cut_pads_the_end():
    assert cut_as_deepspeed(10, 4).sizes == (3, 3, 3, 3)
    assert cut_as_deepspeed(2, 4).sizes == (1, 1, 1, 1)
    assert cut_as_deepspeed(0, 2).sizes == (0, 0)


def test_pieces_of_two_nodes_end_where_either_cuts_and_in_the_middle():
    # 10 elements: 3:1 is 8 + 2 (7.5 rounded to even), one rank alone has all; each node adds up five.
    pieces = node_pieces(10, ((3.0, 1.0), (2.0,)))
    assert [(piece.start, piece.stop, piece.owners) for piece in pieces] == [
        (0, 5, (0, 0, 0)),
        (5, 8, (0, 0, 1)),
        (8, 10, (1, 0, 1)),
    ]


@given(st.integers(1, 20_000), st.lists(st.lists(positive, min_size=1, max_size=4).map(tuple), min_size=2, max_size=4))
def test_pieces_lie_in_one_shard_of_every_node_and_are_added_up_in_equal_parts(num_elements, weights):
    pieces = node_pieces(num_elements, tuple(weights))
    assert [piece.start for piece in pieces] == [0, *(piece.stop for piece in pieces[:-1])]
    assert pieces[-1].stop == num_elements
    added = [0] * len(weights)
    for piece in pieces:
        *owners, adder = piece.owners
        for owner, of_node in zip(owners, weights, strict=True):
            start, stop = cut_parameter(num_elements, of_node).ranges[owner]
            assert start <= piece.start < piece.stop <= stop
        added[adder] += piece.size
    assert max(added) - min(added) <= 1


def test_nodes_follow_from_local_ranks_or_are_given():
    assert node_sizes("node", [0, 1, 0, 0, 1, 2]) == (2, 1, 3)
    assert node_sizes([3, 1], [0, 1, 2, 3]) == (3, 1)


@pytest.mark.parametrize(
    ("within", "local_ranks", "message"),
    [
        ("node", [0, 0, 1, 1], "LOCAL_RANK by rank is"),
        ("node", [-1, -1], "LOCAL_RANK by rank is"),
        ("node", [0, 1], r"divides 2 ranks into nodes of \[2\]"),
        ([1, 2], [0, 1], r"divides 2 ranks into nodes of \[1, 2\]"),
    ],
)
def test_other_nodes_are_refused(within, local_ranks, message):
    with pytest.raises(ConfigError, match=message):
        node_sizes(within, local_ranks)
