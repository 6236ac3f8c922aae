"""The few assignments that go on to the next stage of a search, and the time that another one has to undercut."""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterable
from operator import attrgetter

import numpy as np

from ds_hetero.planner.search.problem import Assignment


class Shortlist:
    """The best assignments so far, one per partition of the working ranks; of equal ones the earlier.

    One per partition: many assignments of tokens and heads in one partition end in one local optimum, and would push
    out the partitions that end in others.
    """

    def __init__(self, keep: int, slower: float = np.inf) -> None:
        self._keep, self._slower = keep, slower
        self._by_time: list[Assignment] = []
        self._by_partition: dict[bytes, Assignment] = {}

    @property
    def best(self) -> list[Assignment]:
        """At most ``keep`` assignments, at most ``slower`` times as slow as the best, best first."""
        return [each for each in self._by_time if each.time_s <= self._slower * self._by_time[0].time_s]

    @property
    def limit_s(self) -> float:
        """An assignment that takes this long, or longer, does not come in."""
        if not self._by_time:
            return np.inf
        is_full = len(self._by_time) == self._keep
        last_s = self._by_time[-1].time_s if is_full else np.inf
        slowest_s = self._slower * self._by_time[0].time_s  # which itself comes in
        return float(min(last_s, np.nextafter(slowest_s, np.inf)))

    def add(self, assignment: Assignment) -> None:
        """Take an assignment in, if it is among the best."""
        partition = working(assignment)
        earlier = self._by_partition.get(partition)
        limit_s = self.limit_s if earlier is None else earlier.time_s
        if assignment.time_s >= limit_s:
            return
        if earlier is not None:
            self._by_time = [each for each in self._by_time if each is not earlier]
        self._by_partition[partition] = assignment
        insort(self._by_time, assignment, key=attrgetter("time_s"))
        for too_many in self._by_time[self._keep :]:
            del self._by_partition[working(too_many)]
        del self._by_time[self._keep :]


def best_of(assignments: Iterable[Assignment], keep: int, slower: float = np.inf) -> list[Assignment]:
    """The ``keep`` best, one per partition of the working ranks, at most ``slower`` times as slow as the best."""
    shortlist = Shortlist(keep, slower)
    for assignment in assignments:
        shortlist.add(assignment)
    return shortlist.best


def working(assignment: Assignment) -> bytes:
    """The partition of the ranks that have tokens or heads, as a key."""
    work = assignment.tokens + assignment.heads
    groups = [np.sort(group[work[group] > 0]).tobytes() for group in assignment.groups]
    return b"|".join(sorted(groups))
