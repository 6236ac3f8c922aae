"""Placements: today's cut against its definition, lanes of documents, and tokens that others hold outside attention."""

import random
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.proof.chance import random_placement, random_schedule, with_moves
from ds_hetero.batch.ring_table import RingTable
from ds_hetero.batch.routes import Round
from ds_hetero.batch.token_moves import MoveTable, move_table
from ds_hetero.batch.visible_blocks import Block
from ds_hetero.errors import ScheduleError
from ds_hetero.values.baselines import proportional, ring
from ds_hetero.values.placement import Lane, Placement, Rows, TokenMove, stream_placement
from ds_hetero.values.schedule import Group, Schedule
from tests.unit.values.test_schedule import lengths, schedules

# --- the stream -------------------------------------------------------------------------------------


@given(schedules(), lengths)
def test_the_ranks_hold_every_position_once(schedule, length):
    placement = stream_placement(schedule, length)
    held = [p for rank in schedule.ranks for p in placement.positions(rank)]
    assert sorted(held) == list(range(length))


@given(schedules(), lengths)
def test_a_rank_holds_its_tokens_in_ascending_intervals_of_its_group(schedule, length):
    placement = stream_placement(schedule, length)
    for rank, tokens in schedule.tokens(length).items():
        positions = placement.positions(rank)
        chunks = schedule.chunks(length)[schedule.ring_position(rank)]
        assert len(positions) == placement.tokens(rank) == tokens
        assert positions == sorted(positions)
        for start, stop in placement.intervals(rank):
            assert start < stop
            assert any(a <= start and stop <= b for a, b in chunks)


@given(schedules(), lengths)
def test_a_groups_tokens_in_rank_order_are_its_chunks_in_order(schedule, length):
    placement = stream_placement(schedule, length)
    (lane,) = placement.lanes
    assert lane.intervals == schedule.chunks(length)
    for position, (group, chunks) in enumerate(zip(schedule.ring_groups, lane.intervals, strict=True)):
        held = [p for rank in sorted(group.ranks) for p in placement.positions(rank)]
        assert held == [p for start, stop in chunks for p in range(start, stop)]
        assert placement.group_tokens(position) == schedule.group_tokens(length)[position] == len(held)


def test_the_same_schedule_and_length_give_the_same_object():
    assert stream_placement(ring(2, 4, 4), 10) is stream_placement(ring(2, 4, 4), 10)


def test_a_sequence_shorter_than_the_ranks_is_refused():
    with pytest.raises(ScheduleError, match="a sequence of 2 tokens is shorter than the 3 ranks"):
        stream_placement(ring(3, 4, 4), 2)


def test_a_rank_outside_the_schedule_is_refused():
    with pytest.raises(ScheduleError, match=r"rank 7 is not in the schedule, whose ranks are \(0, 1\)"):
        stream_placement(ring(2, 4, 4), 10).intervals(7)


# --- identity ---------------------------------------------------------------------------------------


def test_a_fingerprint_tells_apart_what_ranks_must_agree_on():
    plain = stream_placement(proportional((2, 1), 4, 4), 12)
    others = [
        stream_placement(proportional((2, 1), 4, 4), 13),
        stream_placement(proportional((1, 1), 4, 4), 12),
        stream_placement(replace(plain.schedule, layout="contiguous"), 12),
        plain.with_rows((Rows(0, 1, ((0, 12),)),)),
        plain.with_rows((Rows(0, 1, ((0, 5), (5, 12))),)),
    ]
    assert len({placement.fingerprint for placement in (plain, *others)}) == 6
    assert all(0 <= placement.fingerprint < 2**63 for placement in others)
    again = Placement(
        schedule=plain.schedule, length=12, rank_tokens=plain.rank_tokens, lanes=plain.lanes, rows=plain.rows
    )
    assert (again, again.fingerprint) == (plain, plain.fingerprint)


def test_a_cut_that_does_not_add_up_is_refused():
    lane = Lane(members=(0, 1), spans=((0, 10),), tokens=((6, 4),), layout="contiguous")
    with pytest.raises(AssertionError):
        replace(lane, tokens=((6, 5),))
    with pytest.raises(AssertionError):
        Placement(schedule=ring(2, 4, 4), length=10, rank_tokens=(5, 5), lanes=(lane,))
    with pytest.raises(AssertionError):
        Placement(schedule=ring(2, 4, 4), length=11, rank_tokens=(6, 4), lanes=(lane,))


# --- lanes of documents -----------------------------------------------------------------------------

# Three units, the first of ranks 0 and 1. Document 2-12 is cut over units 2 and 0; the others are whole on one unit.
UNITS = Schedule(
    num_heads=4,
    num_kv_heads=4,
    groups=(
        Group(ranks=(0, 1), tokens=(1, 1), heads=(2, 2)),
        Group(ranks=(2,), tokens=(1,), heads=(4,)),
        Group(ranks=(3,), tokens=(1,), heads=(4,)),
    ),
)
DOCUMENTS = ((0, 2), (2, 12), (12, 15), (15, 19))
LANES = (
    Lane(members=(2, 0), spans=((2, 12),), tokens=((6, 4),), layout="zigzag"),
    Lane(members=(0,), spans=((0, 2),), tokens=((2,),), layout="zigzag"),
    Lane(members=(1,), spans=((12, 15), (15, 19)), tokens=((3,), (4,)), layout="zigzag"),
)
PLACEMENT = Placement(schedule=UNITS, length=19, rank_tokens=(4, 2, 7, 6), lanes=LANES, rows=(Rows(0, 1, DOCUMENTS),))


def test_a_unit_orders_its_tokens_by_lane_and_its_ranks_share_them_in_that_order():
    # Front halves of 6 and 4 are 3 and 2, then the back halves in reverse: 2 and 3.
    assert LANES[0].intervals == (((2, 5), (9, 12)), ((5, 7), (7, 9)))
    assert PLACEMENT.group_tokens(0) == 6
    assert PLACEMENT.intervals(0) == ((5, 7), (7, 9))
    assert PLACEMENT.intervals(1) == ((0, 1), (1, 2))
    assert PLACEMENT.positions(2) == list(range(12, 19))
    assert PLACEMENT.intervals(3) == ((2, 5), (9, 12))


def test_a_lane_has_a_ring_of_its_members_and_no_others():
    table = RingTable(PLACEMENT, LANES[0], True, None)
    assert table.size == 2
    # The first member, unit 2, sees all of the other's four tokens from its back half, which is the document's end.
    ((_, blocks),) = table.blocks_between(0, 1)
    assert blocks == (Block((3, 6), (0, 4), None, None),)
    # That block is all that the first needs; the second sees the front half of the first, positions 2-4.
    assert [table.travelling_keys(source) for source in (0, 1)] == [((0, 3),), ((0, 4),)]
    assert table.reads(1, 0) and table.reads(0, 1)
    assert [len(round_.receives) for round_ in table.forward_rounds(0)] == [1, 0]
    alone = RingTable(PLACEMENT, LANES[2], True, None)
    ((_, blocks),) = alone.blocks_between(0, 0)
    assert blocks == (Block((0, 3), (0, 3), None, 0), Block((3, 7), (3, 7), None, 0))
    assert alone.forward_rounds(0) == (Round((), ()),)


# --- tokens that move -------------------------------------------------------------------------------

# Rank 2 gives its last five tokens, two of them to rank 0 and three to rank 3.
MOVED = PLACEMENT.with_moves([TokenMove(2, 3, 3), TokenMove(2, 0, 2)])


def test_a_rank_holds_all_but_its_last_tokens_and_behind_its_own_those_it_takes_over():
    assert MOVED.rank_tokens == (6, 2, 2, 9)
    assert MOVED.intervals(2) == ((12, 14),)
    assert MOVED.intervals(0) == ((5, 7), (7, 9), (14, 15), (15, 16))
    assert MOVED.intervals(3) == ((2, 5), (9, 12), (16, 17), (17, 19))
    assert MOVED.in_attention == PLACEMENT and PLACEMENT.in_attention is PLACEMENT
    assert MOVED.fingerprint != PLACEMENT.fingerprint
    assert MOVED.parts == PLACEMENT.parts


def test_what_a_rank_gives_before_attention_is_what_it_takes_after_it():
    assert move_table(MOVED, 2) == MoveTable(sent=(0, 0, 0, 0), received=(2, 0, 0, 3))
    assert move_table(MOVED, 3) == MoveTable(sent=(0, 0, 3, 0), received=(0, 0, 0, 0))
    assert move_table(MOVED, 3).sizes(10) == ([0, 0, 30, 0], [0, 0, 0, 0])
    assert move_table(MOVED, 3).sizes(10, back=True) == ([0, 0, 0, 0], [0, 0, 30, 0])


@pytest.mark.parametrize(
    "moves",
    [[TokenMove(2, 3, 8)], [TokenMove(2, 3, 1), TokenMove(3, 0, 1)], [TokenMove(2, 3, 0)]],
    ids=["too many", "passed on", "none"],
)
def test_moves_that_cannot_be_are_refused(moves):
    with pytest.raises(AssertionError):
        PLACEMENT.with_moves(moves)


@given(st.integers(0, 2**32))
def test_moved_tokens_are_held_once_and_come_back_in_the_order_of_attention(seed):
    rng = random.Random(seed)
    schedule = random_schedule(rng, rng.randint(2, 5), 4, 2)
    moved = with_moves(rng, random_placement(rng, schedule, [(0, 9), (9, 30), (30, 47)]))
    held = {rank: moved.positions(rank) for rank in schedule.ranks}
    assert sorted(p for positions in held.values() for p in positions) == list(range(47))
    assert [len(positions) for positions in held.values()] == list(moved.rank_tokens)
    tables = {rank: move_table(moved, rank) for rank in schedule.ranks}
    given_away = {rank: iter(held[rank][len(held[rank]) - sum(tables[rank].sent) :]) for rank in schedule.ranks}
    parcels = {  # as all_to_all_single cuts what a rank sends
        (rank, other): [next(given_away[rank]) for _ in range(count)]
        for rank in schedule.ranks
        for other, count in zip(schedule.ranks, tables[rank].sent, strict=True)
    }
    for rank in schedule.ranks:
        kept = held[rank][: len(held[rank]) - sum(tables[rank].sent)]
        arrived = [p for other in schedule.ranks for p in parcels[other, rank]]
        assert kept + arrived == moved.in_attention.positions(rank)
