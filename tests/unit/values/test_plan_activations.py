"""Hops between stages: every receiver gets each of its tokens once, from a rank that holds it."""

import random

import pytest

from ds_hetero.values.plans import Stage
from ds_hetero.values.plans.timetable import held_intervals, token_parts, transfers
from ds_hetero.values.schedule import Group, Schedule


def positions(intervals):
    return [p for start, stop in intervals for p in range(start, stop)]


def random_stage(rng, first_rank):
    """A stage of one to four ranks, and the rank after its last."""
    inner = rng.choice(("one", "tensor", "sequence"))
    ranks = tuple(range(first_rank, first_rank + (1 if inner == "one" else rng.randint(2, 4))))
    schedule = None
    if inner == "sequence":
        cut = rng.randint(0, len(ranks) - 1)
        groups = [group for group in (ranks[:cut], ranks[cut:]) if group]
        schedule = Schedule(
            num_heads=4,
            num_kv_heads=4,
            layout=rng.choice(("contiguous", "zigzag")),
            groups=tuple(
                Group(
                    ranks=group,
                    tokens=tuple(rng.choice((0.0, 1.0, 2.5)) if i else 1.0 for i in range(len(group))),
                    heads=(4, *[0] * (len(group) - 1)),
                )
                for group in groups
            ),
        )
    return Stage(ranks=ranks, inner=inner, schedule=schedule), ranks[-1] + 1


@pytest.mark.parametrize("seed", range(60))
def test_every_token_arrives_once_from_a_rank_that_holds_it(seed):
    rng = random.Random(seed)
    source, following = random_stage(rng, 0)
    target, _ = random_stage(rng, following)
    length = rng.choice((8, 37, 64, 101))
    messages = transfers(source, target, length)
    for part in token_parts(target, length):
        for receiver in part.ranks:
            arriving = [p for m in messages if m.receiver == receiver for p in positions(m.intervals)]
            assert sorted(arriving) == sorted(positions(part.intervals))
    for message in messages:
        held = positions(held_intervals(source, length, message.sender))
        assert set(positions(message.intervals)) <= set(held)
        assert message.tokens == len(positions(message.intervals)) > 0
    pairs = [(m.sender, m.receiver) for m in messages]
    assert len(pairs) == len(set(pairs))


def test_copies_send_by_turns():
    two, four = Stage(ranks=(0, 1), inner="tensor"), Stage(ranks=(2, 3, 4, 5), inner="tensor")
    assert [(m.sender, m.receiver) for m in transfers(two, four, 16)] == [(0, 2), (1, 3), (0, 4), (1, 5)]
    back = transfers(four, two, 16)
    assert [(m.sender, m.receiver) for m in back] == [(2, 0), (3, 1)]
    assert all(m.tokens == 16 for m in back)
