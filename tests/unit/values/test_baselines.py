"""The schedules of other systems, and the list of them that everybody reads."""

import pytest

from ds_hetero.errors import ScheduleError
from ds_hetero.values.baselines import (
    COMPARED,
    STRATEGIES,
    UNIFORM,
    all_baselines,
    even,
    proportional,
    ring,
    ulysses,
    usp,
    usp_meshes,
)


def test_ulysses_is_one_group_with_heads_as_equal_as_they_go():
    schedule = ulysses(3, 8, 8)
    assert [group.heads for group in schedule.groups] == [(3, 3, 2)]
    assert schedule.layout == "contiguous"
    assert schedule.chunks(9) == (((0, 9),),)


def test_ulysses_with_more_ranks_than_heads_leaves_some_without():
    assert ulysses(3, 2, 2).groups[0].heads == (1, 1, 0)


def test_ring_is_a_group_per_rank():
    schedule = ring(2, 8, 8)
    assert [(group.ranks, group.heads) for group in schedule.groups] == [((0,), (8,)), ((1,), (8,))]
    assert schedule.layout == "zigzag"
    assert even(2, 8, 8) == schedule


@pytest.mark.parametrize(
    ("num_ranks", "num_heads", "num_kv_heads", "ulysses_size"),
    [(8, 32, 8, 8), (8, 32, 2, 2), (6, 12, 4, 2), (5, 10, 2, 1), (4, 4, 4, 4)],
)
def test_usp_takes_the_largest_group_that_divides_ranks_and_kv_heads(num_ranks, num_heads, num_kv_heads, ulysses_size):
    schedule = usp(num_ranks, num_heads, num_kv_heads)
    assert [len(group.ranks) for group in schedule.groups] == [ulysses_size] * (num_ranks // ulysses_size)


def test_usp_makes_groups_of_a_given_size():
    schedule = usp(6, 6, 2, ulysses_size=3)
    assert [group.ranks for group in schedule.groups] == [(0, 1, 2), (3, 4, 5)]
    assert [group.heads for group in schedule.groups] == [(2, 2, 2), (2, 2, 2)]
    with pytest.raises(ScheduleError, match="ulysses_size 4 does not divide 6 ranks"):
        usp(6, 6, 2, ulysses_size=4)


def test_usp_meshes_run_from_ring_to_ulysses():
    meshes = usp_meshes(4, 8, 2)
    assert [mesh.ring_size for mesh in meshes] == [4, 2, 1]
    assert meshes[0] == ring(4, 8, 2)
    assert meshes[-1] == ulysses(4, 8, 2)
    assert [mesh.ring_size for mesh in usp_meshes(4, 6, 2)] == [4, 2]  # four does not divide six heads


def test_proportional_shares_tokens_by_speed():
    schedule = proportional((4, 3, 2, 1), 8, 4)
    assert schedule.tokens(100) == {0: 40, 1: 30, 2: 20, 3: 10}
    assert schedule.group_tokens(100) == (40, 30, 20, 10)


@pytest.mark.parametrize("name", UNIFORM)
@pytest.mark.parametrize("num_ranks", [1, 2, 3, 8])
def test_uniform_strategies_give_every_rank_the_same_tokens(name, num_ranks):
    schedule = UNIFORM[name](num_ranks, 8, 4)
    assert schedule.sp_size == num_ranks
    assert set(schedule.tokens(24).values()) == {24 // num_ranks}


@pytest.mark.parametrize(("num_ranks", "num_heads"), [(1, 8), (2, 8), (3, 8), (8, 8), (12, 24)])
def test_the_list_of_baselines_holds_every_mesh_once_or_the_reason_why_not(num_ranks, num_heads):
    schedules, missing = all_baselines(num_ranks, num_heads, num_heads)
    assert {name.split()[0] for name in schedules} | set(missing) == set(COMPARED)
    assert not {name.split()[0] for name in schedules} & set(missing)
    meshes = {mesh.ring_size: mesh for mesh in usp_meshes(num_ranks, num_heads, num_heads)}
    assert {schedule.ring_size for schedule in schedules.values()} == set(meshes)
    assert schedules.get("ulysses", meshes.get(1)) == meshes.get(1)
    for name in set(schedules) - {"ring", "ulysses"}:
        ring_size, group_size = map(int, name.split()[1].split("x"))
        assert schedules[name] == meshes[ring_size] and ring_size * group_size == num_ranks


def test_the_names_of_strategies_include_every_baseline():
    assert set(UNIFORM) | set(COMPARED) < set(STRATEGIES)
    assert len(set(STRATEGIES)) == len(STRATEGIES)
