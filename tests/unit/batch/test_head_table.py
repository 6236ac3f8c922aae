"""Members of an exchange that one copy serves: the fewer, the fewer launches."""

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from ds_hetero.batch.head_table import HeadTable, members_of
from ds_hetero.values.placement import stream_placement
from ds_hetero.values.schedule import Group, Schedule


def _table(heads, per_kv_head=1, ranks=None):
    group = Group(ranks=tuple(ranks or range(len(heads))), tokens=(1,) * len(heads), heads=tuple(heads))
    schedule = Schedule(num_heads=sum(heads), num_kv_heads=sum(heads) // per_kv_head, groups=(group,))
    members = members_of(stream_placement(schedule, 64), group, sorted(group.ranks))
    return HeadTable(members, 0, schedule.num_heads, schedule.num_kv_heads)


def test_equal_shares_are_one_run():
    assert _table((4,) * 8, per_kv_head=4).runs == ((0, 8),)


def test_unequal_neighbours_are_in_runs_of_their_own():
    assert _table((4, 4, 2, 2, 2, 4)).runs == ((0, 2), (2, 3), (5, 1))


def test_ranks_whose_heads_are_in_another_order_are_not_joined():
    assert _table((4, 4), ranks=(1, 0)).runs == ((0, 1), (1, 1))


def test_a_kv_head_on_a_cut_keeps_its_ranks_apart():
    assert _table((2, 2), per_kv_head=4).runs == ((0, 1), (1, 1))


@given(st.lists(st.integers(0, 3), min_size=1, max_size=6).filter(any), st.sampled_from([1, 2, 3]))
def test_runs_hold_every_member_once_and_heads_that_follow_on(heads, per_kv_head):
    table = _table([per_kv_head * count for count in heads], per_kv_head)
    assert [i for first, count in table.runs for i in range(first, first + count)] == list(range(len(heads)))
    for first, count in table.runs:
        members = table.members[first : first + count]
        assert {(m.num_q, m.num_kv) for m in members} == {(members[0].num_q, members[0].num_kv)}
        assert all((a.q[1], a.kv[1]) == (b.q[0], b.kv[0]) for a, b in pairwise(members))
