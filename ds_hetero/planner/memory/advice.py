"""Advise changes that make a training fit into memory, the cheapest first.

Each change is tried alone. If none is enough, changes are added one by one, the cheapest first, until the training
fits; then those that are not needed are removed again. LoRA and QLoRA come last, since they change what is trained.
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
    """Changes to make together, and the training after them."""

    changes: tuple[Change, ...]  # changes to make together
    after: Fitted | None  # the training after the changes; None if no schedule can be planned for it
    why_not: str | None = None  # why no schedule can be planned; None if one can

    @classmethod
    def of(cls, fitted: Fitted, source: str | Schedule, changes: tuple[Change, ...]) -> Advice:
        """Plan the training with these changes.

        Args:
            source: a schedule, or the name of a strategy, see `best_schedule`.
        """
        try:
            return cls(changes, apply(fitted, source, changes))
        except PlanError as error:
            return cls(changes, None, str(error).partition(". ")[0])

    @property
    def fits(self) -> bool:
        """Whether the training fits after the changes."""
        return self.after is not None and self.after.fits

    @property
    def name(self) -> str:
        """Names of the changes, joined by "and"."""
        return " and ".join(change.name for change in self.changes)

    @property
    def missing_bytes(self) -> float:
        """Bytes that the fullest rank lacks after the changes; negative if all fit, infinite if ``after`` is None."""
        if self.after is None:
            return float("inf")
        needs_bytes = np.array(self.after.prediction.memory_bytes)
        return float((needs_bytes - self.after.cost.capacity_bytes_D).max())

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
    """Return changes that make a training fit, the cheapest first, then changes that are not enough alone.

    Args:
        fitted: the training without changes.
        source: a schedule, or the name of a strategy, see `best_schedule`.
    """
    cost = fitted.cost
    offloads_help = not cost.cluster.shares_host_memory.all()  # whether offloading frees memory on some device
    single_changes: list[Advice] = []
    for change in CHANGES:
        is_possible = offloads_help or not change.offloads
        if change.applies(cost.workload, source) and is_possible:
            single_changes.append(Advice.of(fitted, source, (change,)))
    single_changes.sort(key=_cost)
    train_as_much = [advice for advice in single_changes if not advice.changes[0].trains_less]
    combined: tuple[Advice, ...] = ()
    if not any(advice.fits for advice in train_as_much):
        combined = _combine(fitted, source, train_as_much)
        if not combined and not any(advice.fits for advice in single_changes):
            combined = _combine(fitted, source, single_changes)
    return (*combined, *sorted(single_changes, key=lambda advice: (not advice.fits, *_cost(advice))))


def _combine(fitted: Fitted, source: str | Schedule, single_changes: Sequence[Advice]) -> tuple[Advice, ...]:
    """Return changes that make the training fit together, each of them necessary; empty if all are not enough.

    Args:
        single_changes: changes, the cheapest first, each with the training after it alone.
    """
    changes: tuple[Change, ...] = ()
    best: Advice | None = None
    for advice in single_changes:
        (change,) = advice.changes
        if not _is_superseded(change, changes):
            not_superseded = [earlier for earlier in changes if not _is_superseded(earlier, (change,))]
            changes = (*not_superseded, change)
            best = Advice.of(fitted, source, changes)
            if best.fits:
                break
    if best is None or not best.fits:
        return ()
    for change in best.changes:  # leave out those without which the training still fits
        fewer_changes = tuple(other for other in best.changes if other is not change)
        if not fewer_changes:
            continue
        with_fewer = Advice.of(fitted, source, fewer_changes)
        if with_fewer.fits:
            best = with_fewer
    return (best,)


def _is_superseded(change: Change, others: Sequence[Change]) -> bool:
    """Whether one of ``others`` includes this change: ZeRO stage 3 includes stage 2. Only ZeRO stages do."""
    prefix = "ZeRO stage "
    if not change.name.startswith(prefix):
        return False
    return any(other.name.startswith(prefix) and other.name >= change.name for other in others)


def _cost(advice: Advice) -> tuple[bool, float]:
    """Sort key: faster changes first; those that train fewer weights come after all others."""
    trains_less = any(change.trains_less for change in advice.changes)
    return trains_less, float("inf") if advice.after is None else advice.after.iteration_s
