"""The result of the planner as a value: the schedule, its prediction, and what it was compared with."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ds_hetero.cost.prediction import Prediction
from ds_hetero.schedule import Schedule

__all__ = ["PlannedSchedule", "Rejected"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Rejected:
    """A candidate that was not chosen, and why.

    Args:
        name: what it is, for people.
        schedule: the candidate; None where no such schedule exists.
        prediction: None where no such schedule exists.
        reason: one sentence.
    """

    name: str
    schedule: Schedule | None
    prediction: Prediction | None
    reason: str


@dataclass(frozen=True, kw_only=True, slots=True)
class PlannedSchedule:
    """The chosen schedule, how long it takes, and how that compares.

    Args:
        schedule: ranks as in the cluster.
        prediction: of the schedule, with its bottleneck and the bound of perfect balance.
        name: what the schedule is, for people.
        search_s: time the search took.
        baselines: the best legal schedule of ``ulysses``, ``ring`` and ``usp``; None where infeasible.
        baseline_names: which one that is, such as ``usp 2x8``.
        baseline_reasons: why, for those that are None.
        rejected: other candidates with reasons.
        idle: ranks that get neither tokens nor heads.
    """

    schedule: Schedule
    prediction: Prediction
    name: str
    search_s: float
    baselines: dict[str, Prediction | None]
    baseline_names: dict[str, str]
    baseline_reasons: dict[str, str]
    rejected: tuple[Rejected, ...]
    idle: tuple[int, ...]

    @property
    def gain(self) -> float | None:
        """Throughput over the strongest baseline; None where no baseline is feasible."""
        rates = [p.tokens_per_s for p in self.baselines.values() if p is not None]
        return self.prediction.tokens_per_s / max(rates) if rates else None

    @property
    def of_bound(self) -> float:
        """Share of the speed at perfect balance with free communication that the schedule reaches."""
        return self.prediction.bound_s / self.prediction.block_s

    def to_dict(self) -> dict[str, Any]:
        """Plain data for ``--json``."""
        return {
            "schedule": self.schedule.to_dict(),
            "name": self.name,
            "search_s": self.search_s,
            "predicted": self.prediction.to_dict(),
            "baselines": {name: p and p.to_dict() for name, p in self.baselines.items()},
            "baseline_names": self.baseline_names,
            "baseline_reasons": self.baseline_reasons,
            "gain": self.gain,
            "of_bound": self.of_bound,
            "idle_ranks": list(self.idle),
            "rejected": [
                {"name": r.name, "block_s": r.prediction and r.prediction.block_s, "reason": r.reason}
                for r in self.rejected
            ],
        }
