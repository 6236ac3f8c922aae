"""Comparisons that come early because a gradient of the one before was exactly zero.

A gradient of zeros shows nothing of the layer that it belongs to: a layer behind a head that begins with zeros, LoRA's
A behind a B of zeros. The first optimizer step moves the head, the second one the layer behind it, and so on. While a
rank saw zeros, the next comparisons come after 1, 2, 4 and 8 steps, whatever they cost.
"""

from __future__ import annotations

# A parameter that is never used has zeros for ever, so that early comparisons have to end. Chosen, never measured.
_MOST_EARLY = 4


class EarlyComparisons:
    """Count of comparisons that came early, and whether the latest one saw gradients of zeros.

    What it decides is the same on every rank: it judges by what `learn` was told, which all ranks exchange.

    Attributes:
        has_zeros: a gradient was zero in the latest comparison, on this rank.
        runs: the comparison that runs came early.
    """

    def __init__(self) -> None:
        self.has_zeros = False
        self.runs = False
        self._has_zeros_on_any = False
        self._num_comparisons = 0  # that came early

    def is_due(self, num_steps: int) -> bool:
        """Whether a piece is to be compared again, ``num_steps`` optimizer steps after the latest comparison."""
        is_left = self._has_zeros_on_any and self._num_comparisons < _MOST_EARLY
        return is_left and num_steps >= 2**self._num_comparisons

    def begin(self, *, is_due: bool, shows_new: bool, num_steps: int) -> None:
        """Note that a comparison begins.

        Args:
            is_due: it comes early.
            shows_new: the batch is of a new kind, so the comparison is due anyway, and not an early one.
            num_steps: optimizer steps since the comparison before; 0 where both compare batches of the same step, whose
                zeros add up.
        """
        self.runs = is_due and not shows_new
        self._num_comparisons += is_due
        if num_steps > 0:
            self.has_zeros = False

    def learn(self, has_zeros_on_any: bool) -> None:
        """Take over whether any rank saw zeros in the latest comparison."""
        self._has_zeros_on_any = has_zeros_on_any
