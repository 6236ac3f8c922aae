"""Weighted cuts of flat groups (stages 1 and 2) and of single parameters (stage 3)."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ds_hetero.errors import ConfigError
from ds_hetero.zero.layout import ALIGNMENT, Slots, alignment_of, check_weights, cut_flat_group, is_even

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
        ((0, 0), 2, 2, "one is positive"),
        ((1, 0), 2, 3, "gives rank 1 a weight of 0"),
    ],
)
def test_weights_that_cannot_be_are_refused(weights, world_size, stage, said):
    with pytest.raises(ConfigError, match=said):
        check_weights(weights, world_size, zero_stage=stage)


# --- stage 3 ---------------------------------------------------------------------------------------


def test_slots_are_the_smallest_whole_numbers_in_the_wanted_proportion():
    assert Slots.from_weights((4, 3, 2, 1)).counts == (4, 3, 2, 1)
    assert Slots.from_weights((0.75, 0.25)).counts == (3, 1)
    assert Slots.from_weights((80, 80, 40)).counts == (2, 2, 1)
    assert Slots.from_weights((3, 2)).counts == (3, 2)
    assert Slots.from_weights((7.0, 7.0)).counts == (1, 1)
    assert Slots.from_weights((1000, 1, 1, 1)).counts == (510, 1, 1, 1)  # 512 of four ranks, and one more


@given(st.lists(positive, min_size=1, max_size=8))
def test_slots_follow_the_weights(weights):
    slots = Slots.from_weights(weights)
    wanted = [weight / sum(weights) for weight in weights]
    got = [count / slots.total for count in slots.counts]
    if min(wanted) > 0.05:
        assert all(abs(g / w - 1) <= 0.0101 for g, w in zip(got, wanted, strict=True))
    assert slots.total <= 128 * len(weights) + len(weights)


@given(st.lists(st.integers(1, 5), min_size=1, max_size=5), st.integers(0, 300))
def test_shards_of_a_parameter_are_contiguous_and_cover_it(counts, num_elements):
    slots = Slots(tuple(counts))
    ranges = [slots.shard_range(num_elements, rank) for rank in range(len(counts))]
    assert ranges[0][0] == 0
    assert ranges[-1][1] == num_elements
    assert all(before[1] == after[0] for before, after in pairwise(ranges))
    for rank, (start, stop) in enumerate(ranges):
        assert stop - start <= slots.shard_elements(num_elements, rank)
        assert start == min(slots.first(rank) * slots.slot_elements(num_elements), num_elements)


def test_a_rank_without_slots_is_refused():
    with pytest.raises(ConfigError, match="at least one slot"):
        Slots((2, 0))
