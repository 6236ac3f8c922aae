"""How much the search may evaluate: a count, not a clock, so that every machine finds the same plan.

One evaluation costs about as much as the ranks it sums over plus the ring's recurrence over pairs of groups; the
weights are those of the cost models of this package in numpy.
"""

from __future__ import annotations

from dataclasses import dataclass

from ds_hetero.cost.terms.grouping import Grouping

CALL_S = 5e-4
RANK_S = 3e-7
PAIR_S = 1.2e-8
EXHAUSTIVE_RANKS = 5  # ranks up to which all partitions are tried
THOROUGH_RANKS = 6  # ranks up to which so many starts are refined that what one descent misses another one finds
FEW_RANKS = 8  # ranks up to which a few starts are refined with more evaluations each


@dataclass(slots=True)
class EvaluationBudget:
    """Evaluations that may still be made.

    Args:
        left_s: estimated seconds.
    """

    left_s: float

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
