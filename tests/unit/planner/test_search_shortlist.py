"""The shortlist of a search keeps what sorting everything would keep, and its limit lets nothing of that go."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from ds_hetero.planner.search.problem import Assignment
from ds_hetero.planner.search.shortlist import Shortlist, working_partition

PARTITIONS = (((0, 1), (2,)), ((0,), (1, 2)), ((0, 1, 2),), ((2,), (1, 0)), ((0,), (1,), (2,)))


@st.composite
def assignments(draw):
    """A time, a partition, and which ranks work."""
    partition = draw(st.sampled_from(PARTITIONS))
    works = np.array([True, *draw(st.lists(st.booleans(), min_size=2, max_size=2))])
    return Assignment(
        time_s=float(draw(st.integers(1, 12))),
        groups=tuple(np.array(group) for group in partition),
        tokens=np.where(works, 8.0, 0.0),
        heads=np.where(works, 2, 0),
    )


@given(st.lists(assignments(), max_size=30), st.integers(1, 4), st.sampled_from([1.0, 1.4, np.inf]))
def test_it_keeps_the_best_of_every_partition_and_of_equal_ones_the_earlier(of_search, keep, slower):
    shortlist, skipping = Shortlist(keep, slower), Shortlist(keep, slower)
    for each in of_search:
        shortlist.add(each)
        if each.time_s < skipping.limit_s:
            skipping.add(each)
    best = {}
    for each in sorted(of_search, key=lambda one: one.time_s):
        best.setdefault(working_partition(each), each)
    expected = list(best.values())[:keep]
    expected = [each for each in expected if each.time_s <= slower * expected[0].time_s]
    assert all(a is b for a, b in zip(shortlist.best, expected, strict=True))
    assert all(a is b for a, b in zip(skipping.best, expected, strict=True))
