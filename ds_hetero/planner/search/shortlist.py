"""Shortlist: the few assignments that go on to the next stage of a search.

Example: two places, at most 1.2 times the best time, and assignments of 10, 13, 11 and 10.5 s in different partitions.
10 s is added; 13 s is above 12 s and is not; 11 s is added; 10.5 s is added, and 11 s is removed for lack of a place.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterable
from operator import attrgetter

import numpy as np

from ds_hetero.planner.search.problem import Assignment


class Shortlist:
    """The best assignments so far, one for each partition of the working ranks; of equally fast ones the earlier.

    Assignments in the same partition often end in the same local optimum. Without the rule of one per partition they
    would push out other partitions.

    Args:
        keep: most assignments on the list.
        slower: most time of an assignment, as a multiple of the best one's.
    """

    def __init__(self, keep: int, slower: float = np.inf) -> None:
        self._keep, self._slower = keep, slower
        self._by_time: list[Assignment] = []
        self._by_partition: dict[bytes, Assignment] = {}

    @property
    def best(self) -> list[Assignment]:
        """The assignments within ``slower`` times the best time, best first."""
        if not self._by_time:
            return []
        limit_s = self._slower * self._by_time[0].time_s
        return [assignment for assignment in self._by_time if assignment.time_s <= limit_s]

    @property
    def limit_s(self) -> float:
        """Time below which an assignment of a new partition is added."""
        if not self._by_time:
            return np.inf
        is_full = len(self._by_time) == self._keep
        last_s = self._by_time[-1].time_s if is_full else np.inf
        slowest_s = self._slower * self._by_time[0].time_s  # an assignment of this time is still added
        return float(min(last_s, np.nextafter(slowest_s, np.inf)))

    def add(self, assignment: Assignment) -> None:
        """Add an assignment if it is among the best; it replaces a slower one of the same partition."""
        partition = working_partition(assignment)
        rival = self._by_partition.get(partition)  # of the same partition
        limit_s = self.limit_s if rival is None else rival.time_s
        if assignment.time_s >= limit_s:
            return
        if rival is not None:
            self._by_time = [listed for listed in self._by_time if listed is not rival]
        self._by_partition[partition] = assignment
        insort(self._by_time, assignment, key=attrgetter("time_s"))
        for removed in self._by_time[self._keep :]:
            del self._by_partition[working_partition(removed)]
        del self._by_time[self._keep :]


def best_of(assignments: Iterable[Assignment], keep: int, slower: float = np.inf) -> list[Assignment]:
    """Return the ``keep`` best, one for each partition of the working ranks, see `Shortlist`."""
    shortlist = Shortlist(keep, slower)
    for assignment in assignments:
        shortlist.add(assignment)
    return shortlist.best


def working_partition(assignment: Assignment) -> bytes:
    """Return the partition of the ranks that have tokens or heads, as bytes that are equal for equal partitions.

    The order of the groups and idle ranks make no difference.
    """
    has_work = assignment.tokens + assignment.heads > 0
    groups = [np.sort(group[has_work[group]]).tobytes() for group in assignment.groups]
    return b"|".join(sorted(groups))
