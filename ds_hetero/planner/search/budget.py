"""How much the search may evaluate: a count, not a clock, so that every machine finds the same plan.

One evaluation costs about as much as the ranks it sums over plus the ring's recurrence over pairs of groups; the
weights are those of the cost models of this package in numpy.

The few assignments that go on to the next stage of a search, and the time that another one has to undercut.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterable
from dataclasses import dataclass
from operator import attrgetter

import numpy as np

from ds_hetero.cost.terms.grouping import Grouping
from ds_hetero.planner.search.problem import Assignment

CALL_S = 5e-4
RANK_S = 3e-7
PAIR_S = 1.2e-8
EXHAUSTIVE_RANKS = 5  # ranks up to which all partitions are tried
THOROUGH_RANKS = 6  # ranks up to which so many starts are refined that what one descent misses another one finds
FEW_RANKS = 8  # ranks up to which a few starts are refined with more evaluations each


@dataclass(slots=True)
class EvaluationBudget:
    """Evaluations that may still be made."""

    left_s: float  # estimated seconds

    @classmethod
    def for_ranks(cls, num_ranks: int) -> EvaluationBudget:
        """0.15 s for 16 ranks, 0.3 s for 128, nearly proportional beyond; more for few, which are searched widely."""
        if num_ranks <= FEW_RANKS:
            return cls(0.4 if num_ranks <= EXHAUSTIVE_RANKS else 0.7)
        return cls(0.3 * (num_ranks / 128) ** (0.33 if num_ranks < 128 else 0.85))

    def split(self, parts: int) -> EvaluationBudget:
        """An equal part of what is left, taken out."""
        part = EvaluationBudget(max(self.left_s, 0.0) / parts)
        self.left_s -= part.left_s
        return part

    def is_spent(self, share: float) -> bool:
        """Whether ``share`` of what is left is too little for any evaluation."""
        return self.left_s * share <= CALL_S

    def rows(self, grouping: Grouping, wanted: int, share: float = 1.0) -> int:
        """How many of ``wanted`` evaluations of a grouping are within ``share`` of what is left; they count as made."""
        row_s = RANK_S * len(grouping.order) + PAIR_S * grouping.num_groups**2
        rows = min(wanted, int((self.left_s * share - CALL_S) / row_s))
        if rows <= 0:
            return 0
        self.left_s -= CALL_S + rows * row_s
        return rows


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
