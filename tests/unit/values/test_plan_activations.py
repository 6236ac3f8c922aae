"""Hops between stages: every token of an activation crosses the boundary once, from a rank that holds it."""

import random

import pytest

from ds_hetero.values.plans import Stage
from ds_hetero.values.plans.activation_transfers import carried_intervals, held_intervals, transfers
from ds_hetero.values.schedule import Group, Schedule


def positions(intervals):
    return [p for start, stop in intervals for p in range(start, stop)]


def random_stage(rng, first_rank):
    """A stage of one to four members, each a rank or a tensor group, and the rank after its last."""
    inner = rng.choice(("one", "tensor", "sequence"))
    step = rng.choice((1, 2, 3)) if inner == "sequence" else 1
    size = step * (1 if inner == "one" else rng.randint(2, 4))
    ranks = tuple(range(first_rank, first_rank + size, step))
    schedule = None
    if inner == "sequence":
        cut = rng.randint(0, len(ranks) - 1)
        groups = [group for group in (ranks[:cut], ranks[cut:]) if group]
        schedule = Schedule(
            num_heads=6,
            num_kv_heads=6,
            rank_step=step,
            layout=rng.choice(("contiguous", "zigzag")),
            groups=tuple(
                Group(
                    ranks=group,
                    tokens=tuple(rng.choice((0.0, 1.0, 2.5)) if i else 1.0 for i in range(len(group))),
                    heads=(6, *[0] * (len(group) - 1)),
                )
                for group in groups
            ),
        )
    ranks = tuple(range(first_rank, first_rank + size))
    return Stage(ranks=ranks, inner=inner, schedule=schedule, tensor_size=step), first_rank + size


@pytest.mark.parametrize("seed", range(90))
def test_every_token_crosses_once_from_a_rank_that_holds_it(seed):
    rng = random.Random(seed)
    source, following = random_stage(rng, 0)
    target, _ = random_stage(rng, following)
    length = rng.choice((8, 37, 64, 101))
    messages = transfers(source, target, length)
    for receiver in target.ranks:
        arriving = [p for m in messages if m.receiver == receiver for p in positions(m.intervals)]
        assert sorted(arriving) == sorted(positions(carried_intervals(target, length, receiver)))
    assert sorted(p for m in messages for p in positions(m.intervals)) == list(range(length))
    for message in messages:
        held = positions(held_intervals(source, length, message.sender))
        assert set(positions(message.intervals)) <= set(held)
        assert message.tokens == len(positions(message.intervals)) > 0
    pairs = [(m.sender, m.receiver) for m in messages]
    assert len(pairs) == len(set(pairs))


def test_ranks_with_copies_carry_equal_parts_in_the_order_of_their_numbers():
    two, four = Stage(ranks=(1, 0), inner="tensor"), Stage(ranks=(2, 3, 4, 5), inner="tensor")
    assert [tuple(m) for m in transfers(two, four, 14)] == [
        (0, 2, ((0, 4),)),
        (1, 3, ((7, 8),)),
        (0, 3, ((4, 7),)),
        (1, 4, ((8, 12),)),
        (1, 5, ((12, 14),)),
    ]
    assert [(m.sender, m.receiver, m.tokens) for m in transfers(four, Stage(ranks=(6,)), 5)] == [
        (2, 6, 2),
        (3, 6, 2),
        (4, 6, 1),
    ]
