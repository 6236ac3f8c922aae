"""How much a search may evaluate: a count and not a clock, so that every machine finds the same plan.

The count is in estimated seconds. One call of the cost model costs a fixed time, and each assignment about as much as
the ranks that it sums over plus the ring's recurrence over pairs of groups.

Tiers of problems by their number of ranks:

    up to EXHAUSTIVE_RANKS   all partitions and all sets of working ranks are tried
    up to THOROUGH_RANKS     many starts are refined
    up to FEW_RANKS          a few starts are refined, with more evaluations each
    above                    few evaluations per start; moves of single ranks end at other limits, see `rank_sets`
"""

from __future__ import annotations

from dataclasses import dataclass

from ds_hetero.cost.terms.grouping import Grouping

# Seconds of one call of a cost model in numpy, and per rank and per pair of groups of an assignment. From times on one
# machine, without a record; what they decide is the share of evaluations that large clusters get.
CALL_S = 5e-4
RANK_S = 3e-7
PAIR_S = 1.2e-8

# Chosen; `python -m benchmarks.planner exact`, with ``--cards`` too, compares what they lead to with the optimum.
EXHAUSTIVE_RANKS = 5  # 52 partitions of 5 ranks, 203 of 6
THOROUGH_RANKS = 6  # here what one descent misses another one finds
FEW_RANKS = 8

# Seconds for a search: (up to these ranks, seconds). Chosen so that `ds-hetero plan` answers at once; what ten times as
# much would gain is printed by `python -m benchmarks.planner growth`.
_FEW_BUDGETS_S = ((EXHAUSTIVE_RANKS, 0.4), (FEW_RANKS, 0.7))
_BUDGET_OF_128_S = 0.3
_GROWTH_TO_128, _GROWTH_FROM_128 = 0.33, 0.85  # exponents: 0.15 s for 16 ranks, nearly proportional beyond 128


@dataclass(slots=True)
class EvaluationBudget:
    """Evaluations that may still be made."""

    left_s: float  # estimated seconds

    @classmethod
    def for_ranks(cls, num_ranks: int) -> EvaluationBudget:
        """The budget of one search; more for few ranks, which are searched widely."""
        for most_ranks, seconds in _FEW_BUDGETS_S:
            if num_ranks <= most_ranks:
                return cls(seconds)
        exponent = _GROWTH_TO_128 if num_ranks < 128 else _GROWTH_FROM_128
        return cls(_BUDGET_OF_128_S * (num_ranks / 128) ** exponent)

    def split(self, parts: int) -> EvaluationBudget:
        """Take out an equal part of what is left: of 6 seconds, ``split(3)`` takes 2 and leaves 4."""
        part = EvaluationBudget(max(self.left_s, 0.0) / parts)
        self.left_s -= part.left_s
        return part

    def split_all(self, parts: int) -> list[EvaluationBudget]:
        """Share out all that is left."""
        return [self.split(left) for left in range(parts, 0, -1)]

    def is_spent(self, share: float) -> bool:
        """Whether ``share`` of what is left is too little for any evaluation."""
        return self.left_s * share <= CALL_S

    def rows(self, grouping: Grouping, wanted: int, share: float = 1.0) -> int:
        """How many of ``wanted`` evaluations of a grouping are within ``share`` of what is left; they count as made."""
        row_s = RANK_S * len(grouping.order) + PAIR_S * grouping.num_groups**2
        allowed = int((self.left_s * share - CALL_S) / row_s)
        rows = min(wanted, allowed)
        if rows <= 0:
            return 0
        self.left_s -= CALL_S + rows * row_s
        return rows
