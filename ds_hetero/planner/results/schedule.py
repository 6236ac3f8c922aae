"""A planned schedule of one replica, and the candidates that it was preferred to."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from ds_hetero.common.reading import JsonDict
from ds_hetero.cost.model import Prediction
from ds_hetero.planner.results.planned import Planned
from ds_hetero.planner.results.sentences import slower_text
from ds_hetero.values.schedule import Schedule


class Rejected(NamedTuple):
    """A candidate that was not chosen, and why."""

    name: str  # what it is, for people
    prediction: Prediction | None  # None where no such schedule exists
    reason: str  # one sentence

    def to_dict(self) -> JsonDict:
        """Plain data for ``--json``."""
        return {"name": self.name, "block_s": self.prediction and self.prediction.block_s, "reason": self.reason}


def compared(name: str, prediction: Prediction, best: Prediction) -> Rejected:
    """The candidate ``name`` with the reason why the one of prediction ``best`` is preferred."""
    if not prediction.feasible:
        reason = f"does not fit: {prediction.reason}"
    else:
        reason = f"{slower_text(prediction.iteration_s / best.iteration_s)}; {prediction.bottleneck.text}"
    return Rejected(name=name, prediction=prediction, reason=reason)


@dataclass(frozen=True, kw_only=True)
class PlannedSchedule(Planned):
    """The chosen schedule of one replica, how long it takes, and how that compares."""

    prediction: Prediction  # of the schedule, with its bottleneck and the bound of perfect balance
    name: str  # what the schedule is, for people
    baselines: dict[str, Prediction | None]  # the best ``ulysses``, ``ring`` and ``usp``; None where infeasible
    baseline_names: dict[str, str]  # which one that is, such as ``usp 2x8``
    baseline_reasons: dict[str, str]  # why, for those that are None
    rejected: tuple[Rejected, ...]  # other candidates with reasons

    @property
    def busy(self) -> dict[int, float]:
        """Share of a block that every rank with work computes."""
        seconds, block_s = self.prediction.busy_s, self.prediction.block_s
        return {rank: busy_s / block_s for rank, busy_s in enumerate(seconds) if rank not in self.idle_ranks}

    @property
    def schedule(self) -> Schedule:
        """The schedule of the plan; ranks as in the cluster."""
        return self.plan.schedules[0]

    @property
    def gain(self) -> float | None:
        """Throughput over the strongest baseline; None where no baseline is feasible."""
        rates = [p.tokens_per_s for p in self.baselines.values() if p is not None]
        return self.prediction.tokens_per_s / max(rates) if rates else None

    @property
    def of_bound(self) -> float:
        """Share of the speed at perfect balance with free communication that the schedule reaches."""
        return self.prediction.bound_s / self.prediction.block_s

    def to_dict(self) -> JsonDict:
        """Plain data for ``--json``."""
        return {
            "schedule": self.schedule.to_dict(),
            "name": self.name,
            "planner": self.planner,
            "search_s": self.search_s,
            "predicted": self.prediction.to_dict(),
            "baselines": {name: p and p.to_dict() for name, p in self.baselines.items()},
            "baseline_names": self.baseline_names,
            "baseline_reasons": self.baseline_reasons,
            "gain": self.gain,
            "of_bound": self.of_bound,
            "idle_ranks": list(self.idle_ranks),
            "rejected": [rejected.to_dict() for rejected in self.rejected],
        }
