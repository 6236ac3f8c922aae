"""The few assignments that go on to the next stage of a search, and the time that another one has to undercut."""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterable
from operator import attrgetter

import numpy as np

from ds_hetero.planner.search.problem import Assignment


class Shortlist:
    """The best assignments so far, one per partition of the working ranks; of equal ones the earlier.

    Args:
        keep: how many.
        slower: how many times as slow as the best they may be.
    """

    def __init__(self, keep: int, slower: float = np.inf) -> None:
        self._keep, self._slower = keep, slower
        self._kept: list[Assignment] = []
        self._partitions: dict[bytes, Assignment] = {}

    @property
    def best(self) -> list[Assignment]:
        """Those that are kept, best first."""
        return [each for each in self._kept if each.time_s <= self._slower * self._kept[0].time_s]

    @property
    def limit_s(self) -> float:
        """An assignment that takes this long, or longer, does not come in."""
        if not self._kept:
            return np.inf
        last_s = self._kept[-1].time_s if len(self._kept) == self._keep else np.inf
        return float(min(last_s, np.nextafter(self._slower * self._kept[0].time_s, np.inf)))

    def add(self, assignment: Assignment) -> None:
        """Take an assignment in, if it is among the best."""
        partition = working(assignment)
        earlier = self._partitions.get(partition)
        if assignment.time_s >= (earlier.time_s if earlier is not None else self.limit_s):
            return
        if earlier is not None:
            self._kept = [each for each in self._kept if each is not earlier]
        self._partitions[partition] = assignment
        insort(self._kept, assignment, key=attrgetter("time_s"))
        for left_out in self._kept[self._keep :]:
            del self._partitions[working(left_out)]
        del self._kept[self._keep :]


def best_of(assignments: Iterable[Assignment], keep: int, slower: float = np.inf) -> list[Assignment]:
    """The ``keep`` best, one per partition of the working ranks, at most ``slower`` times as slow as the best."""
    shortlist = Shortlist(keep, slower)
    for assignment in assignments:
        shortlist.add(assignment)
    return shortlist.best


def working(assignment: Assignment) -> bytes:
    """The partition of the ranks that work."""
    work = assignment.tokens + assignment.heads
    return b"|".join(sorted(np.sort(group[work[group] > 0]).tobytes() for group in assignment.groups))
