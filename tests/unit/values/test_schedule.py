"""Schedules: worked cases, the JSON file, every refusal, and properties over random schedules."""

from __future__ import annotations

import json
from dataclasses import replace
from math import inf, nan

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from ds_hetero.errors import ScheduleError
from ds_hetero.values.baselines import proportional, ring, ulysses
from ds_hetero.values.placement import stream_placement
from ds_hetero.values.schedule import LAYOUTS, Group, Schedule, schedules_for_world
from ds_hetero.values.splits import Piece, share

# Two groups of two ranks, 32 heads over 8 KV heads.
EXAMPLE = {
    "version": 1,
    "num_heads": 32,
    "num_kv_heads": 8,
    "layout": "zigzag",
    "ring": [0, 1],
    "groups": [
        {"ranks": [0, 1], "tokens": [3, 1], "heads": [24, 8]},
        {"ranks": [2, 3], "tokens": [1, 1], "heads": [16, 16]},
    ],
}


@st.composite
def schedules(draw, layouts=LAYOUTS):
    """Any legal schedule of up to six ranks: scattered ranks, zero weights, zero heads, a shuffled ring."""
    num_ranks = draw(st.integers(1, 6))
    ranks = draw(st.permutations(range(num_ranks)))
    cuts = sorted(draw(st.sets(st.integers(1, num_ranks - 1)))) if num_ranks > 1 else []
    members = [tuple(ranks[a:b]) for a, b in zip([0, *cuts], [*cuts, num_ranks], strict=True)]
    num_kv_heads = draw(st.integers(1, 4))
    num_heads = num_kv_heads * draw(st.integers(1, 3))
    weight = st.one_of(st.integers(0, 4), st.floats(0, 4, allow_subnormal=False))
    groups = []
    for group in members:
        head_weights = draw(st.lists(st.integers(0, 3), min_size=len(group), max_size=len(group)).filter(any))
        tokens = draw(st.lists(weight, min_size=len(group), max_size=len(group)))
        groups.append(Group(ranks=group, tokens=tuple(tokens), heads=share(num_heads, head_weights)))
    assume(any(group.weight for group in groups))
    return Schedule(
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        groups=tuple(groups),
        ring=tuple(draw(st.permutations(range(len(groups))))),
        layout=draw(st.sampled_from(layouts)),
    )


lengths = st.integers(6, 400)


# --- worked by hand ---------------------------------------------------------------------------------


def test_tokens_chunks_and_positions_of_the_example_by_hand():
    schedule = Schedule.from_dict(EXAMPLE)
    assert schedule.sp_size == 4
    assert schedule.ranks == (0, 1, 2, 3)
    assert schedule.ring_size == 2
    assert schedule.queries_per_kv_head == 4
    # 13 tokens at 3:1:1:1 of 6 are 6.5, 2.17, 2.17, 2.17: 6, 2, 2, 2 and one left, to the largest remainder.
    assert schedule.tokens(13) == {0: 7, 1: 2, 2: 2, 3: 2}
    assert schedule.group_tokens(13) == (9, 4)
    # Front halves of 9 and 4 rounded up: 5 and 2, then the back halves in reverse: 2 and 4.
    assert schedule.chunks(13) == (((0, 5), (9, 13)), ((5, 7), (7, 9)))
    # Group 0 holds 0 1 2 3 4 9 10 11 12 in this order: rank 0 the first seven, rank 1 the other two.
    assert stream_placement(schedule, 13).positions(0) == [0, 1, 2, 3, 4, 9, 10]
    assert stream_placement(schedule, 13).positions(1) == [11, 12]
    assert stream_placement(schedule, 13).intervals(0) == ((0, 5), (9, 11))
    assert stream_placement(schedule, 13).positions(2) == [5, 6]
    assert stream_placement(schedule, 13).positions(3) == [7, 8]
    # Heads are cut at 24 in one group and at 16 in the other.
    assert schedule.sub_rings == (Piece(0, 16, (0, 2)), Piece(16, 24, (0, 3)), Piece(24, 32, (1, 3)))


def test_contiguous_layout_follows_the_ring():
    schedule = replace(Schedule.from_dict(EXAMPLE), layout="contiguous", ring=(1, 0))
    assert schedule.group_tokens(13) == (4, 9)
    assert schedule.chunks(13) == (((0, 4),), ((4, 13),))
    assert stream_placement(schedule, 13).positions(2) == [0, 1]
    assert stream_placement(schedule, 13).positions(0) == [4, 5, 6, 7, 8, 9, 10]
    assert [schedule.ring_position(rank) for rank in range(4)] == [1, 1, 0, 0]
    assert [piece.owners for piece in schedule.sub_rings] == [(2, 0), (3, 0), (3, 1)]


def test_zigzag_of_three_groups_is_mirrored():
    # Groups of 4, 2 and 5 tokens; front halves 2, 1, 3 (rounded up), back halves 2, 1, 2 in reverse order of groups:
    # position  0 1 2 3 4 5 6 7 8 9 10
    # group     0 0 1 2 2 2 2 2 1 0 0
    schedule = proportional((4, 2, 5), 4, 4)
    assert schedule.chunks(11) == (((0, 2), (9, 11)), ((2, 3), (8, 9)), ((3, 6), (6, 8)))
    # Causal work is positions + 1, summed: 1+2+10+11 = 24, 3+9 = 12 and 4+5+6+7+8 = 30, that is 6 per token.
    assert [sum(p + 1 for p in stream_placement(schedule, 11).positions(rank)) for rank in range(3)] == [24, 12, 30]


def test_tokens_follow_ascending_ranks_and_heads_the_listed_order():
    group = Group(ranks=(2, 0, 1), tokens=(3, 1, 2), heads=(5, 0, 1))
    schedule = Schedule(num_heads=6, num_kv_heads=3, groups=(group,), layout="contiguous")
    assert stream_placement(schedule, 6).intervals(0) == ((0, 1),)
    assert stream_placement(schedule, 6).intervals(1) == ((1, 3),)
    assert stream_placement(schedule, 6).intervals(2) == ((3, 6),)
    assert [group.head_range(rank) for rank in (2, 0, 1)] == [(0, 5), (5, 5), (5, 6)]
    assert schedule.sub_rings == (Piece(0, 5, (2,)), Piece(5, 6, (1,)))


def test_kv_heads_on_a_cut_are_on_both_sides():
    schedule = ulysses(2, 12, 3)  # four query heads per KV head
    assert schedule.kv_heads(0, 6) == (0, 2)
    assert schedule.kv_heads(6, 12) == (1, 3)
    assert schedule.kv_heads(4, 8) == (1, 2)
    assert schedule.kv_heads(5, 6) == (1, 2)
    assert schedule.kv_heads(6, 6) == (1, 1)


def test_a_rank_of_weight_zero_holds_nothing():
    schedule = proportional((2, 0, 1), 4, 4)
    assert schedule.tokens(7) == {0: 5, 1: 0, 2: 2}
    assert stream_placement(schedule, 7).intervals(1) == ()
    assert stream_placement(schedule, 7).positions(1) == []
    assert schedule.tokens(2) == {0: 1, 1: 0, 2: 1}  # two ranks hold something, so two tokens are enough


def test_ring_order_is_the_order_given_when_left_out():
    assert ring(3, 4, 4).ring == (0, 1, 2)


# --- replicas ---------------------------------------------------------------------------------------


def test_a_schedule_is_repeated_over_blocks_of_ranks():
    first, second, third = schedules_for_world(proportional((2, 1), 4, 2), 6)
    assert first == proportional((2, 1), 4, 2)
    assert (second.ranks, third.ranks) == ((2, 3), (4, 5))
    assert third.tokens(9) == {4: 6, 5: 3}
    assert third.shifted(0) == first


def test_a_world_that_the_schedule_does_not_fill_is_refused():
    with pytest.raises(ScheduleError, match=r"has 4 ranks, the job has 6, .* multiple of 4 processes or plan for 6"):
        schedules_for_world(ring(4, 8, 8), 6)
    with pytest.raises(ScheduleError, match=r"ranks \(1, 2\) must begin at 0"):
        schedules_for_world(ring(2, 8, 8).shifted(1), 2)


# --- the file ---------------------------------------------------------------------------------------


def test_the_example_is_written_as_its_file():
    assert Schedule.from_dict(EXAMPLE).to_dict() == EXAMPLE
    assert Schedule.from_dict(json.loads(Schedule.from_dict(EXAMPLE).to_json())) == Schedule.from_dict(EXAMPLE)


def test_layout_and_ring_may_be_left_out_of_the_file():
    short = {key: value for key, value in EXAMPLE.items() if key not in ("layout", "ring")}
    assert Schedule.from_dict(short) == Schedule.from_dict(EXAMPLE)


def test_the_fingerprint_is_of_the_contents():
    schedule = Schedule.from_dict(EXAMPLE)
    assert schedule.fingerprint == Schedule.from_dict(EXAMPLE).fingerprint
    assert 0 <= schedule.fingerprint < 2**63
    different = [
        replace(schedule, layout="contiguous"),
        replace(schedule, ring=(1, 0)),
        replace(schedule, num_kv_heads=4),
        schedule.shifted(4),
    ]
    assert len({schedule.fingerprint, *(other.fingerprint for other in different)}) == 5


def test_the_fingerprint_does_not_depend_on_process_or_machine():
    assert Schedule.from_dict(EXAMPLE).fingerprint == 2835722068652896977


def _file(**changes):
    return {key: value for key, value in {**EXAMPLE, **changes}.items() if value is not ...}


def _one_group(**changes):
    group = {"ranks": [0, 1, 2, 3], "tokens": [1, 1, 1, 1], "heads": [8, 8, 8, 8], **changes}
    return _file(ring=[0], groups=[{key: value for key, value in group.items() if value is not ...}])


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ([EXAMPLE], r"schedule must be an object, got \["),
        (None, r"schedule must be an object, got None"),
        (_file(sp_size=4), r"schedule: unknown keys \['sp_size'\], missing keys \[\]; it takes groups, layout, num_h"),
        ({**EXAMPLE, 1: 2, "sp_size": 4}, r"schedule: unknown keys \[1, 'sp_size'\]"),
        (_file(num_heads=..., groups=...), r"unknown keys \[\], missing keys \['groups', 'num_heads'\]"),
        (_file(version=2), r"schedule version 2 is unknown; this release reads version 1"),
        (_file(version="1"), r"schedule version '1' is unknown"),
        (_file(groups="[0, 1]"), r"groups must be a list, got '\[0, 1\]'"),
        (_file(groups={"ranks": [0]}), r"groups must be a list, got \{"),
        (_file(groups=[]), r"groups is empty; a schedule has at least one group"),
        (_file(groups=[[0, 1]]), r"groups\[0\] must be an object, got \[0, 1\]"),
        (_one_group(speed=[1]), r"groups\[0\]: unknown keys \['speed'\], missing keys \[\]; it takes heads"),
        (_one_group(heads=...), r"groups\[0\]: unknown keys \[\], missing keys \['heads'\]"),
        (_one_group(heads=32), r"groups\[0\].heads must be a list, one entry per rank, got 32"),
        (_one_group(ranks="0123"), r"groups\[0\].ranks must be a list, one entry per rank, got '0123'"),
        (_file(ring=0), r"ring must be a list of group indices, got 0"),
        (_file(ring="01"), r"ring must be a list of group indices, got '01'"),
        (_file(ring=["a", 1]), r"ring \['a', 1\] must name each of the 2 groups once, by index"),
        (_file(ring=[0, True]), r"ring \[0, True\] must name each of the 2 groups once, by index"),
        (_file(ring=[0, 0]), r"ring \[0, 0\] must name each of the 2 groups once, by index"),
        (_file(ring=[0]), r"ring \[0\] must name each of the 2 groups once, by index"),
        (_file(num_heads=0), r"num_heads must be a whole number >= 1, got 0"),
        (_file(num_heads=32.0), r"num_heads must be a whole number >= 1, got 32.0"),
        (_file(num_heads=True), r"num_heads must be a whole number >= 1, got True"),
        (_file(num_kv_heads="8"), r"num_kv_heads must be a whole number >= 1, got '8'"),
        (_file(num_kv_heads=5), r"num_heads=32 is not a multiple of num_kv_heads=5"),
        (_file(layout="striped"), r"layout 'striped' is unknown; it is one of contiguous, zigzag"),
        (_file(layout=["zigzag"]), r"layout \['zigzag'\] is unknown"),
        (_one_group(tokens=[1]), r"groups\[0\] needs one entry of tokens and heads per rank, got ranks=\["),
        (_one_group(ranks=[], tokens=[], heads=[]), r"groups\[0\] needs one entry of tokens and heads per"),
        (_one_group(ranks=[0, 1, 2, -3]), r"groups\[0\].ranks must be whole numbers >= 0, got \[0, 1, 2, -3"),
        (_one_group(ranks=[0, 1, 2, "3"]), r"groups\[0\].ranks must be whole numbers >= 0"),
        (_one_group(ranks=[0, 1, 2, 2]), r"groups must hold consecutive ranks, each once, got \[0, 1, 2, 2"),
        (_one_group(ranks=[0, 1, 2, 4]), r"groups must hold consecutive ranks, each once, got \[0, 1, 2, 4"),
        (_one_group(heads=[8, 8, 8, 7]), r"heads \[8, 8, 8, 7\] sum to 31, but the model has num_heads=32"),
        (_one_group(heads=[8, 8, 17, -1]), r"groups\[0\].heads must be whole numbers >= 0"),
        (_one_group(heads=[8, 8, 8, 8.0]), r"groups\[0\].heads must be whole numbers >= 0"),
        (_one_group(tokens=[1, 1, 1, -1]), r"groups\[0\].tokens must be finite weights >= 0, got \[1, 1, 1,"),
        (_one_group(tokens=[1, 1, 1, nan]), r"groups\[0\].tokens must be finite weights >= 0"),
        (_one_group(tokens=[1, 1, 1, inf]), r"groups\[0\].tokens must be finite weights >= 0"),
        (_one_group(tokens=[1, 1, 1, 10**400]), r"groups\[0\].tokens must be finite weights >= 0"),
        (_one_group(tokens=[1, 1, 1, "1"]), r"groups\[0\].tokens must be finite weights >= 0"),
        (_one_group(tokens=[1, 1, 1, True]), r"groups\[0\].tokens must be finite weights >= 0"),
        (_one_group(tokens=[0, 0, 0, 0.0]), r"all token weights are zero; at least one rank must hold"),
    ],
)
def test_a_faulty_schedule_file_is_refused_with_the_reason(data, message):
    with pytest.raises(ScheduleError, match=message):
        Schedule.from_dict(data)


def test_a_sequence_shorter_than_the_ranks_is_refused():
    with pytest.raises(
        ScheduleError, match="a sequence of 2 tokens is shorter than the 3 ranks that need at least one"
    ):
        ring(3, 4, 4).tokens(2)


def test_a_rank_outside_the_schedule_is_refused():
    with pytest.raises(ScheduleError, match=r"rank 7 is not in the schedule, whose ranks are \(0, 1\)"):
        ring(2, 4, 4).ring_position(7)


# --- properties -------------------------------------------------------------------------------------


@given(schedules(layouts=("zigzag",)), lengths)
def test_causal_work_of_a_zigzag_group_is_in_proportion_to_its_tokens(schedule, length):
    """Position p attends p + 1 tokens, so n tokens are due n (length + 1) / 2.

    With even groups only this is exact: a mirrored pair of positions attends length + 1. An odd group has one position
    without a partner, off by at most length / 2, and moves the back halves of the groups after it by one position.
    """
    odd_before = 0
    for tokens, chunks in zip(schedule.group_tokens(length), schedule.chunks(length), strict=True):
        work = sum(p + 1 for start, stop in chunks for p in range(start, stop))
        assert abs(work - tokens * (length + 1) / 2) <= (tokens * odd_before + tokens % 2 * length) / 2
        odd_before += tokens % 2


@given(schedules())
def test_sub_rings_cover_the_heads_with_one_rank_per_group(schedule):
    position = 0
    for task in schedule.sub_rings:
        assert task.start == position
        position = task.stop
        for rank, group in zip(task.owners, schedule.ring_groups, strict=True):
            start, stop = group.head_range(rank)
            assert start <= task.start < task.stop <= stop
    assert position == schedule.num_heads


@given(schedules())
def test_kv_heads_of_a_rank_serve_exactly_its_query_heads(schedule):
    for group in schedule.groups:
        for start, stop in group.head_split.ranges:
            first, last = schedule.kv_heads(start, stop)
            assert set(range(first, last)) == {head // schedule.queries_per_kv_head for head in range(start, stop)}


@given(schedules())
def test_a_schedule_survives_its_file(schedule):
    again = Schedule.from_dict(json.loads(schedule.to_json()))
    assert again == schedule
    assert again.fingerprint == schedule.fingerprint
    assert hash(again) == hash(schedule)


@given(schedules(), st.integers(0, 9), lengths)
def test_a_shifted_schedule_is_the_same_for_other_ranks(schedule, first_rank, length):
    moved = schedule.shifted(first_rank)
    assert moved.ranks == tuple(rank + first_rank for rank in schedule.ranks)
    for rank in schedule.ranks:
        assert stream_placement(moved, length).intervals(rank + first_rank) == stream_placement(
            schedule, length
        ).intervals(rank)


@given(schedules(), lengths)
def test_a_longer_sequence_never_gives_a_group_much_less(schedule, length):
    # Largest remainder is not monotone in the total (the Alabama paradox), but never off by more than the rounding.
    before, after = schedule.tokens(length), schedule.tokens(length + 1)
    assert all(after[rank] >= before[rank] - 1 for rank in schedule.ranks)
