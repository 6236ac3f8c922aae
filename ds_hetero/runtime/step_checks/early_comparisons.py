"""Make comparisons early while gradients are exactly zero, since they show nothing of the layers behind.

Examples are the layers behind a head that is initialized with zeros, and LoRA's A behind a B of zeros. The first
optimizer step changes the head, so the layer behind it gets a gradient in the second step, and so on. If the latest
comparison saw zeros on any rank, the next ones come after 1, 2, 4 and 8 steps, whatever they cost.
"""

from __future__ import annotations

# A parameter that is never used has a gradient of zero in every step, so early comparisons have to end. Chosen, never
# measured.
_MAX_EARLY_COMPARISONS = 4


class EarlyComparisons:
    """Counts early comparisons and decides whether the next one is due.

    Its decisions are the same on every rank, since they follow from the argument of `learn`, which is the same.

    Attributes:
        has_zeros: the latest comparison had a gradient of zeros on this rank.
        runs: the present comparison came early.
    """

    def __init__(self) -> None:
        self.has_zeros = False
        self.runs = False
        self._has_zeros_on_any = False
        self._num_early = 0  # comparisons that came early

    def is_due(self, num_steps: int) -> bool:
        """Whether an early comparison is due, ``num_steps`` optimizer steps after the latest comparison."""
        may_be_early = self._has_zeros_on_any and self._num_early < _MAX_EARLY_COMPARISONS
        return may_be_early and num_steps >= 2**self._num_early

    def begin(self, *, is_due: bool, shows_new: bool, num_steps: int) -> None:
        """Note that a comparison begins.

        Args:
            is_due: an early comparison is due.
            shows_new: the comparison is made because its batch is of a new kind, so it does not count as an early one.
            num_steps: optimizer steps since the comparison before; 0 if both compare batches of the same step, so that
                zeros of either count.
        """
        self.runs = is_due and not shows_new
        self._num_early += is_due
        if num_steps > 0:
            self.has_zeros = False

    def learn(self, has_zeros_on_any: bool) -> None:
        """Note whether any rank had gradients of zeros in the latest comparison, for `is_due`."""
        self._has_zeros_on_any = has_zeros_on_any
