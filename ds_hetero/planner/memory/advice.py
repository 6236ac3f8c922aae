"""Changes that would make a training fit, cheapest first.

Each change is tried alone. Where none is enough, changes are added in the order of what each costs alone until it fits,
and the ones that turn out to be needless are removed again. LoRA and QLoRA come last: they change what is trained.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ds_hetero.common.reading import JsonDict
from ds_hetero.errors import PlanError
from ds_hetero.planner.memory.best import Fitted
from ds_hetero.planner.memory.changes import CHANGES, Change, apply
from ds_hetero.values.schedule import Schedule


@dataclass(frozen=True, slots=True)
class Advice:
    """Changes, and the training after them."""

    changes: tuple[Change, ...]  # to make together
    after: Fitted | None  # what they come to; None where there is no such training
    why_not: str | None = None  # the reason for it

    @classmethod
    def of(cls, fitted: Fitted, source: str | Schedule, changes: tuple[Change, ...]) -> Advice:
        """Plan a training with these changes."""
        try:
            return cls(changes, apply(fitted, source, changes))
        except PlanError as error:
            return cls(changes, None, str(error).partition(". ")[0])

    @property
    def fits(self) -> bool:
        """Whether it fits with them."""
        return self.after is not None and self.after.fits

    @property
    def name(self) -> str:
        """The changes in words."""
        return " and ".join(change.name for change in self.changes)

    @property
    def missing_bytes(self) -> float:
        """Bytes that the fullest rank still lacks; negative if it fits."""
        if self.after is None:
            return float("inf")
        fitted = self.after
        return float((np.array(fitted.prediction.memory_bytes) - fitted.cost.capacity_bytes_D).max())

    def to_dict(self) -> JsonDict:
        """Plain data for JSON."""
        return {
            "changes": [change.name for change in self.changes],
            "how": [change.how for change in self.changes],
            "fits": self.fits,
            "why_not": self.why_not,
            "iteration_s": None if self.after is None else self.after.iteration_s,
            "missing_bytes": None if self.after is None else max(self.missing_bytes, 0.0),
        }


def advise(fitted: Fitted, source: str | Schedule) -> tuple[Advice, ...]:
    """Find what would make a training fit, the cheapest first, then what is not enough alone."""
    cost = fitted.cost
    offloads = not cost.cluster.shares_host_memory.all()
    changes = [each for each in CHANGES if each.applies(cost.workload, source) and (offloads or not each.offloads)]
    alone = [Advice.of(fitted, source, (change,)) for change in changes]
    alone.sort(key=_cost)
    same_result = [advice for advice in alone if not advice.changes[0].trains_less]
    together: tuple[Advice, ...] = ()
    if not any(advice.fits for advice in same_result):
        together = _together(fitted, source, same_result)
        if not together and not any(advice.fits for advice in alone):
            together = _together(fitted, source, alone)
    return (*together, *sorted(alone, key=lambda advice: (not advice.fits, *_cost(advice))))


def _together(fitted: Fitted, source: str | Schedule, alone: Sequence[Advice]) -> tuple[Advice, ...]:
    """Changes that fit together, each of them needed; none if all together do not."""
    chosen: tuple[Change, ...] = ()
    best: Advice | None = None
    for advice in alone:
        (change,) = advice.changes
        if not _superseded(change, chosen):
            chosen = (*(old for old in chosen if not _superseded(old, (change,))), change)
            best = Advice.of(fitted, source, chosen)
            if best.fits:
                break
    if best is None or not best.fits:
        return ()
    for change in best.changes:
        fewer = tuple(other for other in best.changes if other is not change)
        without = Advice.of(fitted, source, fewer) if fewer else best
        best = without if without.fits and len(fewer) else best
    return (best,)


def _superseded(change: Change, by: Sequence[Change]) -> bool:
    """Whether one of ``by`` is the same kind of change, and a stronger one."""
    stage = "ZeRO stage "
    return change.name.startswith(stage) and any(b.name.startswith(stage) and b.name >= change.name for b in by)


def _cost(advice: Advice) -> tuple[bool, float]:
    """Sort key: changes of what is trained come last, then slower ones."""
    trains_less = any(change.trains_less for change in advice.changes)
    return trains_less, float("inf") if advice.after is None else advice.after.iteration_s
