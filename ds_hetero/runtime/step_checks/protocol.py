"""Interface of the checks of a step.

A check collects a few numbers on its rank while a step runs. Before the optimizer's step the ranks exchange their
numbers, and every rank judges the same rows, so every rank comes to the same verdict.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from ds_hetero.errors import HeteroError


@dataclass(frozen=True)
class Undecided:
    """Verdict that a check cannot tell whether the step is right; rank 0 logs it once.

    Attributes:
        text: to be logged.
        subject: identifies verdicts of which only the first is logged. If empty, the text does, so it must not contain
            values of the step.
    """

    text: str
    subject: str = ""


Verdict = HeteroError | Undecided | None
"""An error that every rank raises before the optimizer's step, or a warning that rank 0 logs once, or neither."""


Numbers = Tensor | Sequence[float] | tuple[Tensor, ...]
"""Numbers of a rank about a step; a tuple of tensors, on the host or a device each, is concatenated."""


class StepCheck(Protocol):
    """A check of one engine's steps; `numbers` ends a step and clears the values collected in the step."""

    @property
    def width(self) -> int:
        """How many numbers a rank has; the same on every rank and in every step."""

    def numbers(self) -> Numbers:
        """Return this rank's numbers of the optimizer step that ends, [width] in float64, on any device.

        Called once per step. Must not run collectives. An exception is raised on every rank.
        """

    def verdict(self, rows: Sequence[Sequence[float]]) -> Verdict:
        """Judge the numbers of all ranks, ``rows`` by global rank; depends on nothing that differs between ranks."""
