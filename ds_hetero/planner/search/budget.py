"""Budget of a search: a count of evaluations and not a clock, so that every machine finds the same plan.

The budget is in estimated seconds. A call of the cost model is counted with a fixed time, and every assignment that the
call evaluates with a time that grows with its ranks and with its pairs of groups. Example: a call for 100 assignments
of 64 ranks in 8 groups counts as 5e-4 + 100 (64 * 3e-7 + 64 * 1.2e-8) = 2.5 ms.

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
# machine, without a record; their ratios decide how many evaluations large clusters get.
CALL_S = 5e-4
RANK_S = 3e-7
PAIR_S = 1.2e-8

# Chosen; `python -m benchmarks.planner exact`, with ``--cards`` too, compares what they lead to with the optimum.
EXHAUSTIVE_RANKS = 5  # 5 ranks have 52 partitions, 6 have 203
THOROUGH_RANKS = 6  # with many starts, one descent finds what another one misses
FEW_RANKS = 8

# Seconds for a search: (up to these ranks, seconds). Chosen so that `ds-hetero plan` answers at once; what ten times as
# much would gain is printed by `python -m benchmarks.planner growth`.
_FEW_BUDGETS_S = ((EXHAUSTIVE_RANKS, 0.4), (FEW_RANKS, 0.7))
_BUDGET_OF_128_S = 0.3
_GROWTH_TO_128, _GROWTH_FROM_128 = 0.33, 0.85  # exponents: 0.15 s for 16 ranks, nearly proportional beyond 128


@dataclass(slots=True)
class EvaluationBudget:
    """Evaluations that a search may still make."""

    left_s: float  # estimated seconds that may still be spent

    @classmethod
    def for_ranks(cls, num_ranks: int) -> EvaluationBudget:
        """Return the usual budget of one search; it is larger for few ranks, where nearly all assignments are tried."""
        for most_ranks, seconds in _FEW_BUDGETS_S:
            if num_ranks <= most_ranks:
                return cls(seconds)
        exponent = _GROWTH_TO_128 if num_ranks < 128 else _GROWTH_FROM_128
        return cls(_BUDGET_OF_128_S * (num_ranks / 128) ** exponent)

    def split(self, parts: int) -> EvaluationBudget:
        """Take an equal part out of this budget and return it: of 6 seconds, ``split(3)`` takes 2 and leaves 4."""
        part = EvaluationBudget(max(self.left_s, 0.0) / parts)
        self.left_s -= part.left_s
        return part

    def split_all(self, parts: int) -> list[EvaluationBudget]:
        """Divide the whole budget into equal parts."""
        return [self.split(remaining_parts) for remaining_parts in range(parts, 0, -1)]

    def is_spent(self, share: float) -> bool:
        """Whether ``share`` of the budget is too little for any evaluation."""
        return self.left_s * share <= CALL_S

    def rows(self, grouping: Grouping, wanted: int, share: float = 1.0) -> int:
        """Return how many of ``wanted`` assignments one call of the cost model may evaluate, and charge the budget.

        Args:
            grouping: groups of the assignments; rows are assignments with these groups.
            share: share of the budget that the call may take.
        """
        row_s = RANK_S * len(grouping.order) + PAIR_S * grouping.num_groups**2
        num_affordable = int((self.left_s * share - CALL_S) / row_s)
        num_rows = min(wanted, num_affordable)
        if num_rows <= 0:
            return 0
        self.left_s -= CALL_S + num_rows * row_s
        return num_rows
