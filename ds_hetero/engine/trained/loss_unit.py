"""The unit that the loss of a whole model is a mean over: samples, labels or tokens.

declared    the section names it (``"loss": "label_mean"``)
found       with accumulation, the first batch has shown it, in this process or before a checkpoint
neither     the weights of losses are read from their graphs alone
"""

from __future__ import annotations


class LossUnit:
    """The unit of one model's loss.

    Attributes:
        name: a field of `ds_hetero.runtime.data.loss_units.UnitCounts`; None if the unit is not known.
        is_declared: True if the section names it.
        is_examined: True if a first batch was examined for it, with or without success.
    """

    def __init__(self) -> None:
        self.name: str | None = None
        self.is_declared = False
        self.is_examined = False

    def declare(self, convention: str | None) -> None:
        """Set the unit to the section's ``"loss"``; ``"replica_mean"`` and None name no unit."""
        self.name = None if convention == "replica_mean" else convention
        self.is_declared = self.name is not None

    def take(self, name: str | None) -> None:
        """Set the unit that was found from the loss of a first batch; None if no unit was found."""
        self.name, self.is_examined = name, True
