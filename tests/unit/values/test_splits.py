"""Splits: worked cases, then the properties that everything uneven rests on."""

from __future__ import annotations

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ds_hetero.values.splits import Piece, Split, refine, share, share_in_units

sizes = st.lists(st.integers(0, 12), min_size=1, max_size=8).map(tuple)
weights = st.lists(
    st.one_of(st.integers(0, 50), st.floats(0, 1e6, allow_nan=False), st.just(0.1)), min_size=1, max_size=8
).filter(any)


@st.composite
def splits_of_one_axis(draw, min_splits=1, max_splits=4):
    total = draw(st.integers(0, 40))
    cuts = st.lists(st.integers(0, total), max_size=6).map(sorted)
    return [
        Split(tuple(b - a for a, b in zip([0, *inner], [*inner, total], strict=True)))
        for inner in draw(st.lists(cuts, min_size=min_splits, max_size=max_splits))
    ]


# --- Split ------------------------------------------------------------------------------------------


def test_a_split_by_hand():
    split = Split((3, 0, 2))
    assert split.total == 5
    assert split.cuts == (0, 3, 3, 5)
    assert split.ranges == ((0, 3), (3, 3), (3, 5))
    assert [split.owner(unit) for unit in range(5)] == [0, 0, 0, 2, 2]


def test_a_split_may_have_no_parts_or_only_empty_ones():
    assert (Split(()).total, Split(()).cuts, Split(()).ranges) == (0, (0,), ())
    assert Split((0, 0)).ranges == ((0, 0), (0, 0))


@pytest.mark.parametrize("bad", [(-1, 2), (1.0, 2), (True, 2), ("3",), (None,)])
def test_sizes_are_whole_and_not_negative(bad):
    with pytest.raises(ValueError, match="a split takes whole sizes >= 0, got "):
        Split(bad)


@pytest.mark.parametrize("unit", [-1, 5, 100])
def test_a_unit_outside_the_axis_has_no_owner(unit):
    with pytest.raises(IndexError, match=f"unit {unit} lies outside a split of 5 units"):
        Split((3, 0, 2)).owner(unit)


@given(sizes)
def test_every_unit_lies_in_its_owners_range_and_no_other(parts):
    split = Split(parts)
    for unit in range(split.total):
        assert [i for i, (start, stop) in enumerate(split.ranges) if start <= unit < stop] == [split.owner(unit)]


# --- refine -----------------------------------------------------------------------------------------


def test_refinement_by_hand():
    # 0  1  2  3  4  5  6  7  8
    # |  0     |  1        | 2 |      cuts 3, 7
    # |      0          |  1   |      cut 6, and part 1 of three is empty: owners 0 and 2
    pieces = refine([Split((3, 4, 1)), Split((6, 0, 2))])
    assert pieces == (Piece(0, 3, (0, 0)), Piece(3, 6, (1, 0)), Piece(6, 7, (1, 2)), Piece(7, 8, (2, 2)))
    assert [piece.size for piece in pieces] == [3, 3, 1, 1]


def test_refinement_of_one_split_is_its_parts_without_the_empty_ones():
    assert refine([Split((0, 2, 0, 1, 0))]) == (Piece(0, 2, (1,)), Piece(2, 3, (3,)))


def test_refinement_of_an_axis_without_units_is_empty():
    assert refine([Split((0, 0)), Split(())]) == ()


def test_refinement_needs_splits_of_one_axis():
    with pytest.raises(ValueError, match=r"common refinement, got totals \[4, 5\]"):
        refine([Split((2, 2)), Split((5,))])
    with pytest.raises(ValueError, match=r"common refinement, got totals \[\]"):
        refine([])


@given(splits_of_one_axis())
def test_pieces_cover_the_axis_in_order_without_gaps(splits):
    position = 0
    for piece in refine(splits):
        assert piece.start == position
        assert piece.size >= 1
        position = piece.stop
    assert position == splits[0].total


@given(splits_of_one_axis())
def test_every_piece_lies_in_one_part_of_every_split(splits):
    for piece in refine(splits):
        for split, owner in zip(splits, piece.owners, strict=True):
            start, stop = split.ranges[owner]
            assert start <= piece.start < piece.stop <= stop


@given(splits_of_one_axis())
def test_the_refinement_is_the_coarsest(splits):
    cuts = {cut for split in splits for cut in split.cuts} - {splits[0].total}
    assert {piece.start for piece in refine(splits)} == (cuts if splits[0].total else set())


@given(splits_of_one_axis(max_splits=3))
def test_refining_a_refinement_changes_nothing(splits):
    pieces = refine(splits)
    again = refine([Split(tuple(piece.size for piece in pieces)), *splits])
    assert tuple((p.start, p.stop) for p in again) == tuple((p.start, p.stop) for p in pieces)


# --- share ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("total", "of", "expected"),
    [
        (10, (4, 3, 2, 1), (4, 3, 2, 1)),
        (7, (1, 1, 1), (3, 2, 2)),  # 2 1/3 each; one unit is left, to the lowest index
        (10, (1, 1, 4), (2, 2, 6)),  # 1.667, 1.667, 6.667: remainders tie, two units left, to 0 and 1
        (5, (1, 2), (2, 3)),  # 1.667, 3.333: the unit goes to the larger remainder
        (3, (0, 1, 0), (0, 3, 0)),
        (0, (2, 1), (0, 0)),
        (1, (1e-300, 1e300), (0, 1)),
        (2, (5e-324, 5e-324), (1, 1)),  # the smallest floats: their sum is exact all the same
    ],
)
def test_shares_by_hand(total, of, expected):
    assert share(total, of) == expected


def test_shares_do_not_depend_on_the_rounding_of_floats():
    # As floats 10 * 0.1 / (0.1 + 0.2 + 0.7) is 1.0000000000000002 or 0.9999999999999999 with the order of the sum.
    assert share(10, (0.1, 0.2, 0.7)) == (1, 2, 7)
    assert share(10, (0.7, 0.2, 0.1)) == (7, 2, 1)
    # 2^62 units: a float has 53 bits and would lose some.
    assert share(2**62 + 1, (1, 1)) == (2**61 + 1, 2**61)


@pytest.mark.parametrize("bad", [(), (0, 0), (1, -1), (1, float("nan")), (1, float("inf"))])
def test_weights_without_a_share_are_refused(bad):
    with pytest.raises(ValueError, match="weights must be finite, >= 0 and not all zero, got "):
        share(5, bad)


def test_a_negative_total_cannot_be_shared():
    with pytest.raises(ValueError, match="cannot share -1 units"):
        share(-1, (1, 1))


@given(st.integers(0, 10_000), weights)
def test_shares_sum_to_the_total_and_differ_from_the_ideal_by_less_than_one(total, of):
    shares = share(total, of)
    whole = sum(map(Fraction, of))
    assert sum(shares) == total
    for got, weight in zip(shares, of, strict=True):
        assert abs(got - total * Fraction(weight) / whole) < 1
        assert weight or got == 0


@given(st.integers(0, 1000), weights)
def test_more_weight_never_gets_less_and_ties_go_to_the_lower_index(total, of):
    shares = share(total, of)
    for i, j in ((i, j) for i in range(len(of)) for j in range(len(of)) if of[i] > of[j] or (of[i] == of[j] and i < j)):
        assert shares[i] >= shares[j]
        assert of[i] > of[j] or shares[i] - shares[j] <= 1


@given(st.integers(0, 1000), weights, st.sampled_from([2, 8, 0.5]))
def test_only_the_ratio_of_weights_matters(total, of, scale):
    assert share(total, [weight * scale for weight in of if weight == 0 or weight > 1e-300]) == share(
        total, [weight for weight in of if weight == 0 or weight > 1e-300]
    )


# --- share_in_units ---------------------------------------------------------------------------------


def test_shares_in_units_by_hand():
    # 22 elements in units of 4 are 5 units and a rest of 2: 5 units at 3:1:1 are 3, 1, 1, and the rest goes to the end.
    assert share_in_units(22, (3, 1, 1), 4) == (12, 4, 6)
    assert share_in_units(22, (3, 1, 0), 4) == (16, 6, 0)  # ... of those that may hold something; 3.75, 1.25 -> 4, 1
    assert share_in_units(3, (1, 1), 4) == (0, 3)
    assert share_in_units(5, (1, 2), 1) == share(5, (1, 2))


@pytest.mark.parametrize("unit", [0, -4])
def test_a_unit_is_at_least_one(unit):
    with pytest.raises(ValueError, match=f"unit must be >= 1, got {unit}"):
        share_in_units(8, (1, 1), unit)


@pytest.mark.parametrize("bad", [(), (0, 0), (1, -1)])
def test_shares_in_units_check_the_weights_too(bad):
    with pytest.raises(ValueError, match="weights must be finite"):
        share_in_units(8, bad, 4)


@given(st.integers(0, 1000), weights, st.integers(1, 16))
def test_boundaries_are_multiples_of_the_unit(total, of, unit):
    shares = share_in_units(total, of, unit)
    assert sum(shares) == total
    assert all(cut % unit == 0 or cut == total for cut in Split(shares).cuts)
    assert all(weight or not got for weight, got in zip(of, shares, strict=True))
