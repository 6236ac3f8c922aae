"""Interface of a check of a step.

A check collects a few numbers on its rank while a step runs. Before the optimizer's step the numbers of all ranks are
exchanged, and every rank judges the same rows, so that every rank comes to the same verdict.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from ds_hetero.errors import HeteroError


@dataclass(frozen=True)
class Undecided:
    """The check cannot tell whether the step is right; rank 0 says so once."""

    text: str
    subject: str = ""  # said once; the text where it is empty, which must then name no values of the step


Verdict = HeteroError | Undecided | None
"""An error that every rank raises before the optimizer's step, or what rank 0 says once, or nothing to say."""


Numbers = Tensor | Sequence[float] | tuple[Tensor, ...]
"""Numbers of a rank about a step; tensors of one axis, put together, where some are on a device."""


class StepCheck(Protocol):
    """A check of one engine's steps; it forgets a step when its numbers are taken."""

    @property
    def width(self) -> int:
        """Numbers of a rank; the same on every rank and in every step."""

    def numbers(self) -> Numbers:
        """This rank's numbers of the optimizer step that ends, [width] in float64, on any device; called once a step.

        It must not run collectives. What it raises is raised on every rank.
        """

    def verdict(self, rows: Sequence[Sequence[float]]) -> Verdict:
        """Judge the numbers of all ranks, by global rank; a function of ``rows`` and of what all ranks have alike."""
